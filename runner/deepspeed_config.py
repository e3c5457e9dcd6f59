"""Their ds_config.json: read as DeepSpeed reads it, then made one with the run file.

(their file, keys given in the run file) -> values for the run file's keys + what only DeepSpeed understands. `"auto"`
means the run file's value, its default where it names none. Where both say something and differ, both places are named
and nothing starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import UsageError

PLAIN_KEYS = {
    "train_batch_size": "batch.global",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_clipping": "optimizer.clip",
    "zero_optimization.stage": "engine.zero",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
RUN_FILE_KEYS = (
    *PLAIN_KEYS.values(),
    "engine.offload",
    "optimizer.name",
    "precision",
    "schedule.name",
    "schedule.warmup",
)
FROM_ZERO = ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio")
REPORTERS = ("wandb", "comet")
SECTIONS = (
    "optimizer",
    "optimizer.params",
    "scheduler",
    "scheduler.params",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "bf16",
    "fp16",
    *REPORTERS,
)


@dataclass(frozen=True)
class Merged:
    """What their file means here.

    Attributes:
        values: dotted run file key -> value, for keys the run file left open.
        rest: what goes to DeepSpeed as they wrote it.
        notes: (key, value, reason) of each decision worth a line.
        autos: run file keys whose value they left to it with "auto".
    """

    values: Mapping[str, Any]
    rest: Mapping[str, Any]
    notes: tuple[tuple[str, object, str], ...]
    autos: tuple[str, ...]


def load(path: Path, place: str) -> dict[str, Any]:
    """Reads a ds_config.json, `//` and `#` comments and trailing commas included.

    Args:
        path: their file.
        place: where the run file names it, for the message.

    Raises:
        UsageError: no such file, not hjson, a key twice.
    """
    try:
        import hjson  # DeepSpeed's own reader: what it accepts is what must be accepted here
    except ImportError:
        raise UsageError("reading a ds_config.json needs hjson", "pip install 'airlift[train]'") from None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{path}: `{twice[0]}` is written twice", "Keep one.")
        return dict(pairs)

    try:
        data = hjson.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except FileNotFoundError:
        raise UsageError(f"{place}: {path}: no such file", "The path is relative to the run file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: {path} cannot be read: {error}") from None
    except hjson.HjsonDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: not JSON: {error.msg}", "Correct that line.") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: expected {{...}}")
    return data


def merge(theirs: dict[str, Any], path: Path, given: Mapping[str, Any], place: Callable[[str], str]) -> Merged:
    """Makes their settings and the run file one. Pure.

    Args:
        theirs: the content of `path`.
        given: run file keys chosen there, with their values.
        place: file:line of a run file key.

    Raises:
        UsageError: all contradictions at once, or something this version does not do.
    """
    _check_sections(theirs, path)
    rest, notes, autos = dict(theirs), list[tuple[str, object, str]](), list[str]()
    said: dict[str, tuple[str, Any]] = {}
    _refuse_what_is_not_done(rest, path)
    for their_key, key in PLAIN_KEYS.items():
        value = _take(rest, their_key)
        if value == "auto":
            autos.append(key)
        elif value is not None:
            said[key] = (their_key, tuple(value) if isinstance(value, list) else value)
    _read_optimizer(rest, said, {*given, *autos}, path, notes)
    _read_offload(rest, said, autos, notes)
    _read_precision(rest, said, autos)
    _read_schedule(rest, said, autos, notes)
    _read_accumulation(rest, said, given, notes)
    for reporter in REPORTERS:
        if rest.pop(reporter, None):
            notes.append((reporter, "left out", "it reports over the network"))
    rest = _without_auto(rest, "", notes)
    clashes = [
        f"{path.name} says {their_key}: {value}, {place(key)} says {key}: {given[key]}"
        for key, (their_key, value) in said.items()
        if key in given and given[key] not in ("auto", value)
    ]
    if clashes:
        raise UsageError("; ".join(clashes), f'Make them equal, or write "auto" in {path}.')
    values = {key: value for key, (_, value) in said.items() if given.get(key, "auto") == "auto"}
    return Merged(values, rest, tuple(notes), tuple(dict.fromkeys(key for key in autos if key not in said)))


def _check_sections(theirs: Mapping[str, Any], path: Path) -> None:
    for section in SECTIONS:
        here: Any = theirs
        for key in section.split("."):
            here = here.get(key) if here else None
        if here is not None and not isinstance(here, dict):
            raise UsageError(f"{path}: `{section}` must be {{...}}, found `{here}`")


def _refuse_what_is_not_done(theirs: Mapping[str, Any], path: Path) -> None:
    kind = (theirs.get("optimizer") or {}).get("type", "AdamW")
    if kind not in ("Adam", "AdamW", "auto"):
        raise UsageError(f"{path}: optimizer.type {kind} is not done by this version", "Use AdamW.")
    zero = theirs.get("zero_optimization") or {}
    if zero.get("cpu_offload"):
        raise UsageError(
            f"{path}: zero_optimization.cpu_offload is DeepSpeed's old way of saying it",
            'Write "offload_optimizer": {"device": "cpu"} instead.',
        )


def _take(tree: dict[str, Any], dotted: str) -> Any:
    """Removes a value from nested dicts and returns it, leaving their own dicts alone."""
    first, _, rest = dotted.partition(".")
    if not rest:
        return tree.pop(first, None)
    if not isinstance(tree.get(first), dict):
        return None
    tree[first] = dict(tree[first])
    return _take(tree[first], rest)


def _read_optimizer(
    rest: dict[str, Any],
    said: dict[str, tuple[str, Any]],
    elsewhere: set[str],
    path: Path,
    notes: list[tuple[str, object, str]],
) -> None:
    """What is left of their optimizer, once the numbers were taken.

    Args:
        elsewhere: keys that the run file gives, or that were left to it.
    """
    optimizer = rest.pop("optimizer", None)
    if optimizer is None:
        return
    if optimizer.get("type", "auto") != "auto":
        said["optimizer.name"] = ("optimizer.type", "adamw")
    if "optimizer.weight_decay" not in {*said, *elsewhere}:
        said["optimizer.weight_decay"] = ("optimizer.params.weight_decay", 0.0)
        notes.append(
            ("optimizer.weight_decay", 0.0, f"DeepSpeed's default: {path.name} names an optimizer and no weight_decay")
        )
    for key, value in (optimizer.get("params") or {}).items():
        if value != "auto" and (key, value) != ("adam_w_mode", True):
            notes.append((f"optimizer.params.{key}", "left out", "torch's AdamW is used, which has no such setting"))


def _read_offload(
    rest: dict[str, Any],
    said: dict[str, tuple[str, Any]],
    autos: list[str],
    notes: list[tuple[str, object, str]],
) -> None:
    """Where they offload to; how, stays in `rest` as they wrote it, but for what they leave to the run file."""
    zero = dict(rest.get("zero_optimization") or {})
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device == "auto":
            autos.append("engine.offload")
            del zero[key]
            notes.append((f"zero_optimization.{key}", "as engine.offload", 'its device is "auto"'))
        elif device != "none":
            said.setdefault("engine.offload", (f"zero_optimization.{key}.device", device))
    if "zero_optimization" in rest:
        rest["zero_optimization"] = zero


def _read_precision(rest: dict[str, Any], said: dict[str, tuple[str, Any]], autos: list[str]) -> None:
    enabled = {name: rest.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16") if name in rest}
    for name in enabled:
        rest[name] = {key: value for key, value in rest[name].items() if key != "enabled"}
    chosen = [name for name, value in enabled.items() if value is True]
    if chosen:
        said["precision"] = (f"{chosen[0]}.enabled", chosen[0])
    elif enabled and all(value is False for value in enabled.values()):
        said["precision"] = (f"{'/'.join(enabled)}.enabled", "fp32")
    elif enabled:
        autos.append("precision")


def _read_schedule(
    rest: dict[str, Any],
    said: dict[str, tuple[str, Any]],
    autos: list[str],
    notes: list[tuple[str, object, str]],
) -> None:
    scheduler = rest.pop("scheduler", None)
    if not scheduler:
        return
    name, values = scheduler.get("type", "auto"), scheduler.get("params") or {}
    if name not in (*SCHEDULES, "auto"):
        raise UsageError(f"scheduler.type {name} is not done by this version", f"Use one of {', '.join(SCHEDULES)}.")
    if name == "auto":
        autos.append("schedule.name")
    else:
        said["schedule.name"] = ("scheduler.type", SCHEDULES[name])
    for their_key, key in (("warmup_num_steps", "schedule.warmup"), ("warmup_max_lr", "optimizer.lr")):
        value = values.get(their_key)
        if value == "auto":
            autos.append(key)
        elif value is not None:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            said.setdefault(key, (f"scheduler.params.{their_key}", float(value) if number else value))
    if name != "auto" and values.get("warmup_type", "log") != "linear":
        notes.append(("scheduler.warmup_type", "linear", "DeepSpeed's default, logarithmic, is not done here"))
    if values.get("total_num_steps") is not None:
        notes.append(("scheduler.total_num_steps", "left out", "the schedule ends with the run"))
    notes += [
        (f"scheduler.{key}", "left out", "the rate rises from zero and falls to it")
        for key in FROM_ZERO
        if values.get(key, 0) not in (0, "auto")
    ]


def _read_accumulation(
    rest: dict[str, Any],
    said: Mapping[str, tuple[str, Any]],
    given: Mapping[str, Any],
    notes: list[tuple[str, object, str]],
) -> None:
    accumulation = rest.get("gradient_accumulation_steps", "auto")
    has_total = "batch.global" in said or given.get("batch.global", "auto") != "auto"
    if (accumulation == "auto" or has_total) and rest.pop("gradient_accumulation_steps", "auto") != "auto":
        notes.append(("gradient_accumulation_steps", "derived", f"theirs, {accumulation}, follows from the others"))


def _without_auto(tree: dict[str, Any], where: str, notes: list[tuple[str, object, str]]) -> dict[str, Any]:
    """What is still "auto" has no key in the run file: DeepSpeed's default is taken."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if value == "auto":
            notes.append((f"{where}{key}", "DeepSpeed's default", '"auto", and no key of the run file'))
        elif isinstance(value, dict):
            inner = _without_auto(value, f"{where}{key}.", notes)
            if inner:
                kept[key] = inner
        else:
            kept[key] = value
    return kept
