"""Their ds_config.json: read as DeepSpeed reads it, then made one with the run file.

(their file, keys given in the run file) -> values for the run file's keys + what only DeepSpeed understands. `"auto"`
means the run file's value. Where both say something and differ, both places are named and nothing starts.
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
RUN_FILE_KEYS = (*PLAIN_KEYS.values(), "engine.offload", "precision", "schedule.name", "schedule.warmup")
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
    """

    values: Mapping[str, Any]
    rest: Mapping[str, Any]
    notes: tuple[tuple[str, object, str], ...]


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
    rest, notes = dict(theirs), list[tuple[str, object, str]]()
    said: dict[str, tuple[str, Any]] = {}
    _refuse_what_is_not_done(rest, path)
    for their_key, key in PLAIN_KEYS.items():
        value = _take(rest, their_key)
        if value not in (None, "auto"):
            said[key] = (their_key, tuple(value) if isinstance(value, list) else value)
    if "optimizer" in theirs and "optimizer.weight_decay" not in said and "optimizer.weight_decay" not in given:
        said["optimizer.weight_decay"] = ("optimizer.params.weight_decay", 0.0)
        notes.append(("optimizer.weight_decay", 0.0, f"DeepSpeed's default, since {path.name} names an optimizer"))
    _read_offload(theirs, said)
    _read_precision(rest, said)
    _read_schedule(rest, said, notes)
    rest.pop("optimizer", None)
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
    return Merged(values, rest, tuple(notes))


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


def _read_offload(theirs: Mapping[str, Any], said: dict[str, tuple[str, Any]]) -> None:
    """Where they offload to; how, stays in `rest` as they wrote it."""
    zero = theirs.get("zero_optimization") or {}
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device not in ("none", "auto"):
            said.setdefault("engine.offload", (f"zero_optimization.{key}.device", device))


def _read_precision(rest: dict[str, Any], said: dict[str, tuple[str, Any]]) -> None:
    enabled = {name: rest.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16") if name in rest}
    for name in enabled:
        rest[name] = {key: value for key, value in rest[name].items() if key != "enabled"}
    chosen = [name for name, value in enabled.items() if value is True]
    if chosen:
        said["precision"] = (f"{chosen[0]}.enabled", chosen[0])
    elif enabled and all(value is False for value in enabled.values()):
        said["precision"] = (f"{'/'.join(enabled)}.enabled", "fp32")


def _read_schedule(
    rest: dict[str, Any], said: dict[str, tuple[str, Any]], notes: list[tuple[str, object, str]]
) -> None:
    scheduler = rest.pop("scheduler", None)
    if not scheduler or scheduler.get("type", "auto") == "auto":
        return
    name, values = scheduler["type"], scheduler.get("params") or {}
    if name not in SCHEDULES:
        raise UsageError(f"scheduler.type {name} is not done by this version", f"Use one of {', '.join(SCHEDULES)}.")
    said["schedule.name"] = ("scheduler.type", SCHEDULES[name])
    if values.get("warmup_num_steps", "auto") != "auto":
        said["schedule.warmup"] = ("scheduler.params.warmup_num_steps", float(values["warmup_num_steps"]))
    if values.get("warmup_max_lr", "auto") != "auto" and "optimizer.lr" not in said:
        said["optimizer.lr"] = ("scheduler.params.warmup_max_lr", float(values["warmup_max_lr"]))
    if values.get("warmup_type", "log") != "linear":
        notes.append(("schedule.warmup", "linear", "DeepSpeed's default, logarithmic, is not done here"))
    if values.get("total_num_steps", "auto") != "auto":
        notes.append(("scheduler.total_num_steps", "left out", "the schedule ends with the run"))


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
            notes.append((f"{where}{key}", "auto", "DeepSpeed's own default"))
        elif isinstance(value, dict):
            inner = _without_auto(value, f"{where}{key}.", notes)
            if inner:
                kept[key] = inner
        else:
            kept[key] = value
    return kept
