"""Reads the user's ds_config.json as DeepSpeed does, and merges it with the run file.

Its values become keys of the run file's data, before that is read and checked; what only DeepSpeed
knows is kept for it. `"auto"` means the run file's value, or its default. If both files set a key
to different values, the error names both places, and nothing starts.

In this module, "their" means "of the user's ds_config.json".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.explain import LEFT_OUT
from runner.config.fields import Choice
from runner.errors import (
    DS_CONFIG,
    Lines,
    UsageError,
    check_kind,
    quoted,
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
    "scheduler.params.warmup_num_steps": "schedule.warmup",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
}
SEVERAL = {
    "precision": "fp16.enabled and bf16.enabled",
    "engine.offload": "the device of zero_optimization.offload_optimizer and offload_param",
}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
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
            f"{place}: {path} cannot be read: {error}", f"Look at it: ls -l {quoted(path)}"
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


@dataclass(frozen=True)
class Merged:
    """What a ds_config.json adds to a run file.

    Attributes:
        rest: the settings that go to DeepSpeed unchanged.
        keys: the keys of the run file that it sets.
        autos: those that it leaves to the run file.
        notes: each decision, for printing.
        accumulation: `gradient_accumulation_steps`; None: not set. It is compared with the batch
            when the number of ranks is known.
    """

    rest: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    autos: tuple[str, ...] = ()
    notes: tuple[Choice, ...] = ()
    accumulation: int | None = None


def merge(data: dict[str, Any], lines: Lines) -> Merged:
    """Merges the ds_config.json that a run file names, if it names one, with its data.

    Args:
        data: of the run file; gets the values that only the ds_config.json has.
        lines: of the run file; keeps the mistakes: contradictions, and settings that this version
            does not support.
    """
    named, engine = _get(data, "engine.config"), _get(data, "engine.name")
    if not isinstance(named, str) or engine not in (None, "deepspeed"):
        return Merged()
    path = (lines.path.parent / Path(named).expanduser()).resolve()
    with lines.mistakes:
        theirs = _Theirs(load(path, lines.place("engine", "config")), path, lines)
        data["engine"]["config"] = str(path)
        return theirs.merged_with(data)
    return Merged()


class _Theirs:
    """A ds_config.json while it is read.

    Attributes:
        rest: what was not read yet; in the end DeepSpeed's own.
        found: key of the run file -> their key, and its value.
        autos: keys of the run file that are "auto".
    """

    def __init__(self, rest: dict[str, Any], path: Path, lines: Lines) -> None:
        self.rest, self.path, self.lines = rest, path, lines
        self.found: dict[str, tuple[str, Any]] = {}
        self.autos: dict[str, None] = {}
        self.notes: list[Choice] = []

    def merged_with(self, data: dict[str, Any]) -> Merged:
        """Merges all settings with the run file's data.

        Raises:
            UsageError: a section is none, or both files set a key to different values.
        """
        self.check_sections()
        for their_key, key in PLAIN_KEYS.items():
            self.found_or_auto(their_key, key, self.take(their_key))
        self.read_optimizer(data)
        self.read_offload()
        self.read_precision()
        with self.lines.mistakes:
            self.read_schedule()
        accumulation = None
        with self.lines.mistakes:
            accumulation = self.take_accumulation()
        self.check_zero()
        for reporter in REPORTERS:
            if self.rest.pop(reporter, None):
                self.note(reporter, LEFT_OUT, "it reports over the network")
        rest = self.without_auto(self.rest, "")
        self.check_contradictions(data)
        new = {key: v for key, (_, v) in self.found.items() if _get(data, key) in (None, "auto")}
        for key, value in new.items():
            if isinstance(data.get(key.partition(".")[0], {}), dict | str):
                self.lines.put(data, key.split("."), value, str(self.path))
        return Merged(
            rest=rest,
            keys=tuple(new),
            autos=tuple(key for key in self.autos if key not in self.found),
            notes=tuple(self.notes),
            accumulation=accumulation,
        )

    def note(self, key: str, value: object, reason: str) -> None:
        self.notes.append(Choice(key, value, reason, self.path.name))

    def refuse(self, problem: str, remedy: str) -> None:
        with self.lines.mistakes:
            raise UsageError(f"{self.path}: {problem}", remedy)

    def take(self, dotted: str) -> Any:
        """Removes a value from `rest`, and returns it."""
        *outer, last = dotted.split(".")
        section = self.rest
        for key in outer:
            section = section.get(key) or {}
        return section.pop(last, None)

    def found_or_auto(self, their_key: str, key: str, value: Any) -> None:
        if value == "auto":
            self.autos[key] = None
        elif value is not None:
            self.found.setdefault(key, (their_key, value))

    def check_sections(self) -> None:
        for section in SECTIONS:
            here: Any = self.rest
            for key in section.split("."):
                here = here.get(key) if isinstance(here, dict) else None
            if here is not None and not isinstance(here, dict):
                raise UsageError(
                    f"{self.path}: `{section}` must be {{...}}, found `{here}`.",
                    "Put the settings of this section in braces, or remove it.",
                )

    def check_zero(self) -> None:
        zero = self.rest.get("zero_optimization") or {}
        if zero.get("cpu_offload"):
            self.refuse(
                "zero_optimization.cpu_offload is an old key of DeepSpeed.",
                'Write "offload_optimizer": {"device": "cpu"} instead.',
            )
        for key in WHOLE & zero.keys():
            value = zero[key]
            if value != "auto" and (not isinstance(value, int | float) or value % 1):
                whole = int(value) if isinstance(value, float) else 50_000_000
                self.refuse(
                    f"zero_optimization.{key} must be a whole number, found `{value}`: "
                    "DeepSpeed would refuse it in each rank.",
                    f'Write "{key}": {whole}, or "auto".',
                )

    def read_optimizer(self, data: dict[str, Any]) -> None:
        """Reads what remains of the optimizer after its numbers were taken."""
        optimizer = self.rest.pop("optimizer", None)
        if optimizer is None:
            return
        kind = optimizer.get("type", "auto")
        if kind in TYPES:
            self.found["optimizer.name"] = ("optimizer.type", TYPES[kind])
        elif kind != "auto":
            self.refuse(
                f"optimizer.type {kind} is not supported by this version.",
                "Use AdamW or SGD; or remove `optimizer` and set optimizer.name in the run file.",
            )
        for name in ("weight_decay", "momentum") if kind == "SGD" else ("weight_decay",):
            key = f"optimizer.{name}"
            if key not in {*self.found, *self.autos} and _get(data, key) is None:
                self.found[key] = (f"optimizer.params.{name}", 0.0)
                reason = f"DeepSpeed's default: {self.path.name} names an optimizer and no {name}"
                self.note(key, 0.0, reason)
        for key, value in (optimizer.get("params") or {}).items():
            if value != "auto" and (key, value) != ("adam_w_mode", True):
                reason = "torch's optimizer is used, without this setting"
                self.note(f"optimizer.params.{key}", LEFT_OUT, reason)

    def read_offload(self) -> None:
        """Reads the device of offloading. The other settings of offloading stay in `rest`."""
        zero = self.rest.get("zero_optimization") or {}
        for name in ("offload_optimizer", "offload_param"):
            device = (zero.get(name) or {}).get("device", "none")
            if device == "auto":
                del zero[name]
                self.note(f"zero_optimization.{name}", "as engine.offload", 'its device is "auto"')
            if device != "none":
                self.found_or_auto(f"zero_optimization.{name}.device", "engine.offload", device)

    def read_precision(self) -> None:
        names = [name for name in ("bf16", "fp16") if self.rest.get(name) is not None]
        enabled = {name: self.rest[name].pop("enabled", "auto") for name in names}
        chosen = [name for name in names if enabled[name] is True]
        if chosen:
            self.found["precision"] = (f"{chosen[0]}.enabled", chosen[0])
        elif names and all(value is False for value in enabled.values()):
            self.found["precision"] = (f"{'/'.join(names)}.enabled", "fp32")
        elif names:
            self.autos["precision"] = None

    def read_schedule(self) -> None:
        """Reads what remains of the scheduler after its numbers were taken."""
        scheduler = self.rest.pop("scheduler", None)
        if not scheduler:
            return
        name, values = scheduler.get("type", "auto"), scheduler.get("params") or {}
        if name not in (*SCHEDULES, "auto"):
            raise UsageError(
                f"{self.path}: scheduler.type {name} is not supported by this version.",
                suggest(str(name), SCHEDULES, f"Use one of {', '.join(SCHEDULES)}."),
            )
        self.found_or_auto("scheduler.type", "schedule.name", SCHEDULES.get(name, name))
        if name != "auto" and values.get("warmup_type", "log") != "linear":
            reason = "DeepSpeed's default, logarithmic, is not supported here"
            self.note("scheduler.warmup_type", "linear", reason)
        if values.get("total_num_steps") is not None:
            reason = "the schedule ends with the run"
            self.note("scheduler.total_num_steps", LEFT_OUT, reason)
        for key in FROM_ZERO:
            if values.get(key, 0) not in (0, "auto"):
                reason = "the rate rises from zero and falls to it"
                self.note(f"scheduler.{key}", LEFT_OUT, reason)

    def take_accumulation(self) -> int | None:
        """Their accumulation: DeepSpeed gets the number that follows from batch and ranks."""
        accumulation = self.rest.pop("gradient_accumulation_steps", "auto")
        if accumulation == "auto":
            return None
        if type(accumulation) is not int or accumulation < 1:
            raise UsageError(
                f"{self.path}: gradient_accumulation_steps must be a whole number from 1 on, "
                f"found `{accumulation}`.",
                'Correct it, or write "auto".',
            )
        return accumulation

    def without_auto(self, tree: dict[str, Any], where: str) -> dict[str, Any]:
        """Settings without the "auto"s that no key of the run file has: DeepSpeed's defaults."""
        kept: dict[str, Any] = {}
        for key, value in tree.items():
            if isinstance(value, dict):
                value = self.without_auto(value, f"{where}{key}.")
            elif value == "auto":
                reason = '"auto", and no key of the run file'
                self.note(f"{where}{key}", "DeepSpeed's default", reason)
            if value not in ("auto", {}):
                kept[key] = value
        return kept

    def check_contradictions(self, data: dict[str, Any]) -> None:
        clashes = [
            f"{self.path.name} says {their_key}: {value}, "
            f"{self.lines.place(*key.split('.'))} says {key}: {given}"
            for key, (their_key, value) in self.found.items()
            if (given := _get(data, key)) not in (None, "auto", value)
        ]
        if clashes:
            remedy = f'Make them equal, or write "auto" in {self.path}.'
            raise UsageError(f"{'; '.join(clashes)}.", remedy)


def _get(data: Any, dotted: str) -> Any:
    """A value of the run file; None: it has none."""
    for key in dotted.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    return data
