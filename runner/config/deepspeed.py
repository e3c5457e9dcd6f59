"""Reads the user's ds_config.json as DeepSpeed does, and merges it with the run file.

(ds_config.json, keys given in the run file) -> values for keys of the run file, and the settings
that only DeepSpeed knows. `"auto"` means the run file's value, or its default. If both files set a
key to different values, the error names both places, and nothing starts.

In this module, "their" means "of the user's ds_config.json".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from runner.config.explain import LEFT_OUT
from runner.errors import (
    DS_CONFIG,
    Mistakes,
    UsageError,
    check_kind,
    save_as_utf8,
    suggest,
    suggest_file,
)

PLAIN_KEYS = {
    "train_batch_size": "batch.global",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_clipping": "optimizer.clip",
    "zero_optimization.stage": "engine.zero",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.momentum": "optimizer.momentum",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
}
SEVERAL = {
    "precision": "fp16.enabled and bf16.enabled",
    "engine.offload": "the device of zero_optimization.offload_optimizer and offload_param",
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
TYPES = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"}
FROM_ZERO = ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio")
REPORTERS = ("wandb", "comet")
WHOLE = frozenset({
    "allgather_bucket_size", "reduce_bucket_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size",
})  # fmt: skip
"""Keys of `zero_optimization` that DeepSpeed reads as whole numbers, and refuses else."""
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

# Key of the run file -> (key of the ds_config.json, its value).
FoundKeys: TypeAlias = dict[str, tuple[str, Any]]


@dataclass(frozen=True)
class MergedConfig:
    """The result of merging a ds_config.json with the run file.

    Attributes:
        values: dotted run file key -> value, for keys that the run file does not set.
        rest: the settings that go to DeepSpeed unchanged.
        notes: (key, value, reason) of each decision that is printed.
        autos: run file keys that the ds_config.json sets to "auto".
        accumulation: `gradient_accumulation_steps`; None: not set. It is compared with the batch
            when the number of ranks is known.
    """

    values: Mapping[str, Any]
    rest: Mapping[str, Any]
    notes: tuple[tuple[str, object, str], ...]
    autos: tuple[str, ...]
    accumulation: int | None = None


def their_key(key: str) -> str:
    """Returns the name in a ds_config.json of a key of the run file."""
    if key in SEVERAL:
        return SEVERAL[key]
    return next((theirs for theirs, ours in PLAIN_KEYS.items() if ours == key), key)


def load(path: Path, place: str) -> dict[str, Any]:
    """Reads a ds_config.json, which may have `//` and `#` comments and trailing commas.

    Args:
        path: the file.
        place: where the run file names it, for the message.

    Raises:
        UsageError: the file does not exist, is not hjson, or has a key twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := dict.fromkeys(name for name in names if names.count(name) > 1):
            raise UsageError(f"{path}: `{'`, `'.join(twice)}` is written twice.", "Keep one.")
        return dict(pairs)

    try:
        content = path.read_bytes()
        check_kind(path, content, DS_CONFIG, f"{place}: ")
        data = _parse(content.decode("utf-8-sig"), once)
    except FileNotFoundError:
        raise UsageError(
            f"{place}: {path}: no such file",
            suggest_file(path, DS_CONFIG, "The path is relative to the run file."),
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{place}: {path} is not UTF-8 text.", save_as_utf8(path, error.object)
        ) from None
    except OSError as error:
        raise UsageError(
            f"{place}: {path} cannot be read: {error}", f"Look at it: ls -l {path}"
        ) from None
    except ValueError as error:  # of hjson or json: both have these two attributes
        line, why = getattr(error, "lineno", 1), getattr(error, "msg", error)
        raise UsageError(f"{path}:{line}: not JSON: {why}", "Correct that line.") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a ds_config.json is one JSON object, in braces.", "Write {...}.")
    return data


_STRING = r'("(?:\\.|[^"\\])*")'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")


def _parse(text: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> Any:
    """Reads JSON with comments and trailing commas; a light installation has no hjson.

    Raises:
        ValueError: not JSON; `lineno` and `msg` say where and why.
    """
    try:
        import hjson  # DeepSpeed's own reader, so that the same files are accepted
    except ImportError:
        plain = _COMMENT.sub(lambda match: match[1] or "\n" * match[0].count("\n"), text)
        plain = _LAST_COMMA.sub(lambda match: match[1] or "", plain)
        return json.loads(plain, object_pairs_hook=pairs)
    return hjson.loads(text, object_pairs_hook=pairs)


def merge(
    theirs: dict[str, Any], path: Path, given: Mapping[str, Any], place: Callable[[str], str]
) -> MergedConfig:
    """Merges a ds_config.json with the run file. Pure.

    Args:
        theirs: the content of `path`.
        path: the ds_config.json, for messages.
        given: run file keys that the user set there, with their values.
        place: run file key -> its file:line.

    Raises:
        UsageError: all contradictions at once, or a setting that this version does not support.
    """
    _check_sections(theirs, path)
    mistakes = Mistakes()
    rest, notes, autos = dict(theirs), list[tuple[str, object, str]](), list[str]()
    found: FoundKeys = {}
    _check_supported(rest, path, mistakes)
    for their_key, key in PLAIN_KEYS.items():
        value = _take(rest, their_key)
        if value == "auto":
            autos.append(key)
        elif value is not None:
            found[key] = (their_key, tuple(value) if isinstance(value, list) else value)
    _read_optimizer(rest, found, {*given, *autos}, path, notes)
    _read_offload(rest, found, autos, notes)
    _read_precision(rest, found, autos)
    with mistakes:
        _read_schedule(rest, found, autos, notes, path)
    accumulation = None
    with mistakes:
        accumulation = _read_accumulation(rest, path)
    for reporter in REPORTERS:
        if rest.pop(reporter, None):
            notes.append((reporter, LEFT_OUT, "it reports over the network"))
    rest = _without_auto(rest, "", notes)
    with mistakes:
        _check_contradictions(found, path, given, place)
    mistakes.check(str(path))
    return MergedConfig(
        values={k: value for k, (_, value) in found.items() if given.get(k, "auto") == "auto"},
        rest=rest,
        notes=tuple(notes),
        autos=tuple(dict.fromkeys(key for key in autos if key not in found)),
        accumulation=accumulation,
    )


def _check_contradictions(
    found: FoundKeys, path: Path, given: Mapping[str, Any], place: Callable[[str], str]
) -> None:
    clashes = [
        f"{path.name} says {their_key}: {value}, {place(key)} says {key}: {given[key]}"
        for key, (their_key, value) in found.items()
        if key in given and given[key] not in ("auto", value)
    ]
    if clashes:
        raise UsageError(f"{'; '.join(clashes)}.", f'Make them equal, or write "auto" in {path}.')


def _check_sections(theirs: Mapping[str, Any], path: Path) -> None:
    mistakes = Mistakes()
    for section in SECTIONS:
        here: Any = theirs
        for key in section.split("."):
            here = here.get(key) if isinstance(here, dict) else None
        with mistakes:
            if here is not None and not isinstance(here, dict):
                raise UsageError(
                    f"{path}: `{section}` must be {{...}}, found `{here}`.",
                    "Put the settings of this section in braces, or remove it.",
                )
    mistakes.check(str(path))


def _check_supported(theirs: Mapping[str, Any], path: Path, mistakes: Mistakes) -> None:
    kind = (theirs.get("optimizer") or {}).get("type", "AdamW")
    with mistakes:
        if kind not in TYPES and kind != "auto":
            raise UsageError(
                f"{path}: optimizer.type {kind} is not supported by this version.",
                "Use AdamW or SGD; or remove `optimizer` and set optimizer.name in the run file.",
            )
    zero = theirs.get("zero_optimization") or {}
    with mistakes:
        if zero.get("cpu_offload"):
            raise UsageError(
                f"{path}: zero_optimization.cpu_offload is an old key of DeepSpeed.",
                'Write "offload_optimizer": {"device": "cpu"} instead.',
            )
    for key in WHOLE & zero.keys():
        value = zero[key]
        with mistakes:
            if value != "auto" and (not isinstance(value, (int, float)) or value % 1):
                whole = int(value) if isinstance(value, float) else 50_000_000
                raise UsageError(
                    f"{path}: zero_optimization.{key} must be a whole number, found `{value}`: "
                    "DeepSpeed would refuse it in each rank.",
                    f'Write "{key}": {whole}, or "auto".',
                )


def _take(tree: dict[str, Any], dotted: str) -> Any:
    """Removes a value from nested dicts and returns it. Copies inner dicts before the change."""
    first, _, rest = dotted.partition(".")
    if not rest:
        return tree.pop(first, None)
    if not isinstance(tree.get(first), dict):
        return None
    tree[first] = dict(tree[first])
    return _take(tree[first], rest)


def _read_optimizer(
    rest: dict[str, Any],
    found: FoundKeys,
    elsewhere: set[str],
    path: Path,
    notes: list[tuple[str, object, str]],
) -> None:
    """Reads what remains of the optimizer after `merge` has removed the numbers.

    Args:
        elsewhere: keys that the run file sets, or that are "auto".
    """
    optimizer = rest.pop("optimizer", None)
    if optimizer is None:
        return
    kind = optimizer.get("type", "auto")
    if kind in TYPES:
        found["optimizer.name"] = ("optimizer.type", TYPES[kind])
    for key in ("weight_decay", *(["momentum"] if kind == "SGD" else [])):
        if f"optimizer.{key}" not in {*found, *elsewhere}:
            found[f"optimizer.{key}"] = (f"optimizer.params.{key}", 0.0)
            reason = f"DeepSpeed's default: {path.name} names an optimizer and no {key}"
            notes.append((f"optimizer.{key}", 0.0, reason))
    for key, value in (optimizer.get("params") or {}).items():
        if value != "auto" and (key, value) != ("adam_w_mode", True):
            notes.append(
                (
                    f"optimizer.params.{key}",
                    LEFT_OUT,
                    "torch's optimizer is used, without this setting",
                )
            )


def _read_offload(
    rest: dict[str, Any],
    found: FoundKeys,
    autos: list[str],
    notes: list[tuple[str, object, str]],
) -> None:
    """Reads the device of offloading. The other settings of offloading stay in `rest`."""
    zero = dict(rest.get("zero_optimization") or {})
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device == "auto":
            autos.append("engine.offload")
            del zero[key]
            notes.append((f"zero_optimization.{key}", "as engine.offload", 'its device is "auto"'))
        elif device != "none":
            found.setdefault("engine.offload", (f"zero_optimization.{key}.device", device))
    if "zero_optimization" in rest:
        rest["zero_optimization"] = zero


def _read_precision(rest: dict[str, Any], found: FoundKeys, autos: list[str]) -> None:
    enabled = {
        name: rest.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16") if name in rest
    }
    for name in enabled:
        rest[name] = {key: value for key, value in rest[name].items() if key != "enabled"}
    chosen = [name for name, value in enabled.items() if value is True]
    if chosen:
        found["precision"] = (f"{chosen[0]}.enabled", chosen[0])
    elif enabled and all(value is False for value in enabled.values()):
        found["precision"] = (f"{'/'.join(enabled)}.enabled", "fp32")
    elif enabled:
        autos.append("precision")


def _read_schedule(
    rest: dict[str, Any],
    found: FoundKeys,
    autos: list[str],
    notes: list[tuple[str, object, str]],
    path: Path,
) -> None:
    scheduler = rest.pop("scheduler", None)
    if not scheduler:
        return
    name, values = scheduler.get("type", "auto"), scheduler.get("params") or {}
    if name not in (*SCHEDULES, "auto"):
        raise UsageError(
            f"{path}: scheduler.type {name} is not supported by this version.",
            suggest(str(name), SCHEDULES, f"Use one of {', '.join(SCHEDULES)}."),
        )
    if name == "auto":
        autos.append("schedule.name")
    else:
        found["schedule.name"] = ("scheduler.type", SCHEDULES[name])
    for their_key, key in (
        ("warmup_num_steps", "schedule.warmup"),
        ("warmup_max_lr", "optimizer.lr"),
    ):
        value = values.get(their_key)
        if value == "auto":
            autos.append(key)
        elif value is not None:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            found.setdefault(
                key, (f"scheduler.params.{their_key}", float(value) if number else value)
            )
    _note_schedule(name, values, notes)


def _note_schedule(
    name: str, values: Mapping[str, Any], notes: list[tuple[str, object, str]]
) -> None:
    """Notes the settings of a scheduler that are not used."""
    if name != "auto" and values.get("warmup_type", "log") != "linear":
        reason = "DeepSpeed's default, logarithmic, is not supported here"
        notes.append(("scheduler.warmup_type", "linear", reason))
    if values.get("total_num_steps") is not None:
        notes.append(("scheduler.total_num_steps", LEFT_OUT, "the schedule ends with the run"))
    notes += [
        (f"scheduler.{key}", LEFT_OUT, "the rate rises from zero and falls to it")
        for key in FROM_ZERO
        if values.get(key, 0) not in (0, "auto")
    ]


def _read_accumulation(rest: dict[str, Any], path: Path) -> int | None:
    """Removes their accumulation: DeepSpeed gets the number that follows from batch and ranks."""
    accumulation = rest.pop("gradient_accumulation_steps", "auto")
    if accumulation == "auto":
        return None
    if not isinstance(accumulation, int) or isinstance(accumulation, bool) or accumulation < 1:
        raise UsageError(
            f"{path}: gradient_accumulation_steps must be a whole number from 1 on, "
            f"found `{accumulation}`.",
            'Correct it, or write "auto".',
        )
    return accumulation


def _without_auto(
    tree: dict[str, Any], where: str, notes: list[tuple[str, object, str]]
) -> dict[str, Any]:
    """Removes the remaining "auto" values, which have no key in the run file.

    DeepSpeed's defaults hold for them.
    """
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if value == "auto":
            notes.append(
                (f"{where}{key}", "DeepSpeed's default", '"auto", and no key of the run file')
            )
        elif isinstance(value, dict):
            inner = _without_auto(value, f"{where}{key}.", notes)
            if inner:
                kept[key] = inner
        else:
            kept[key] = value
    return kept
