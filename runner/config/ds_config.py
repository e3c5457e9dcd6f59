"""Reads the user's ds_config.json as DeepSpeed does, and merges it with the run file.

Its values become keys of the run file's data, before that is read and checked; what only DeepSpeed
knows is kept for it. `"auto"` means the run file's value, or its default. What neither file says
has DeepSpeed's default (docs/adr/0013-own-training-loop.md). If both files set a key to different
values, the error names both places, and nothing starts.

In this module, "their" means "of the user's ds_config.json".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.deepspeed_keys import (
    CLIP,
    KNOWN,
    OPTIMIZERS,
    REFUSED,
    REMOVED,
    REMOVED_FROM_ZERO,
    SCHEDULES,
    WITHOUT_EFFECT,
)
from runner.config.fields import LEFT_OUT, Choice
from runner.from_stage import (
    DS_CONFIG,
    Lines,
    Place,
    UsageError,
    about,
    check_kind,
    nearest_name,
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
}
SEVERAL = {
    "precision": "fp16.enabled and bf16.enabled",
    "engine.offload": "the device of zero_optimization.offload_optimizer and offload_param",
    "engine.nvme_path": "nvme_path of zero_optimization.offload_optimizer and offload_param",
}
OFFLOADS = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}
"""What is offloaded -> its old key, which DeepSpeed still reads."""
DEFAULT = "DeepSpeed's default"
HALF = ("bf16", "fp16")
BATCH = ("batch.micro", "batch.global")
_TRUE, _FALSE = ("true", "1", "yes", "on", "t", "y"), ("false", "0", "no", "off", "f", "n")
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
    *HALF,
    "tensor_parallel",
    "data_types",
)


def their_key(key: str) -> str:
    """Returns the name in a ds_config.json of a key of the run file."""
    if key in SEVERAL:
        return SEVERAL[key]
    return next((theirs for theirs, ours in PLAIN_KEYS.items() if ours == key), key)


def load(path: Path) -> dict[str, Any]:
    """Reads a ds_config.json, which may have `//` and `#` comments and trailing commas.

    Raises:
        UsageError: the file does not exist, is not hjson, or has a key twice. It has a place only
            where that is in this file.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := dict.fromkeys(name for name in names if names.count(name) > 1):
            raise UsageError(
                f"`{'`, `'.join(twice)}` is written twice.", "Keep one.", place=Place(str(path))
            )
        return dict(pairs)

    try:
        content = path.read_bytes()
        with about(str(path)):
            check_kind(path, content, DS_CONFIG)
        text = content.decode("utf-8-sig")
        _check_filled_in(path, text)
        data = _parse(text, once)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file",
            suggest_file(path, DS_CONFIG, "The path is relative to the run file."),
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", save_as_utf8(path, error.object)) from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error}", f"Look at it: ls -l {quoted(path)}"
        ) from None
    except ValueError as error:  # of hjson or json: both have these two attributes
        line, why = getattr(error, "lineno", 1), str(getattr(error, "msg", error))
        why = "a value is missing" if "quoteless" in why else why  # a word of hjson
        raise UsageError(
            f"not JSON: {why}", "Correct that line.", place=Place(str(path), line)
        ) from None
    if not isinstance(data, dict):
        raise UsageError(
            "a ds_config.json is one JSON object, in braces.",
            "Write {...}.",
            place=Place(str(path)),
        )
    return data


def _check_filled_in(path: Path, text: str) -> None:
    """Refuses a template: job scripts write such a file by `cat <<EOF`, which fills variables in.

    Raises:
        UsageError: a variable of a shell is in it.
    """
    plain = _without_comments(text)
    found = list(re.finditer(r"\$(\{[A-Za-z_]\w*\}|[A-Za-z_]\w*|\(+[^)\n]*\)+)", plain))
    if found:
        filled = path.with_stem(f"{path.stem}-filled")
        names = ", ".join(dict.fromkeys(f"`{one[0]}`" for one in found))
        raise UsageError(
            f"{names}: for a shell, and no shell has filled it in.",
            "Run the lines of the job script that write this file (cat <<EOF). Or export its "
            f"variables, then: envsubst < {quoted(path)} > {quoted(filled)}   and name that file "
            "in engine.config.",
            place=Place(str(path), plain.count("\n", 0, found[0].start()) + 1),
        )


_STRING = r'("(?:\\.|[^"\\])*")'
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
# hjson, DeepSpeed's reader, takes a comma after the last value, and none at the end of a line.
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
_NO_COMMA = re.compile(r'(?<=["\]}\w])(?=[ \t]*\n\s*")')


def _without_comments(text: str) -> str:
    return _COMMENT.sub(lambda match: match[1] or "\n" * match[0].count("\n"), text)


def _parse(text: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> Any:
    """Reads JSON with comments, with commas too many and too few; a light installation has no
    hjson.

    Raises:
        ValueError: not JSON; `lineno` and `msg` say where and why.
    """
    try:
        import hjson  # DeepSpeed's own reader, so that the same files are accepted
    except ImportError:
        plain = _NO_COMMA.sub(",", _without_comments(text))
        plain = _LAST_COMMA.sub(lambda match: match[1] or "", plain)
        return json.loads(plain, object_pairs_hook=pairs)
    return hjson.loads(text, object_pairs_hook=pairs)


def named_in(said: str, path: Path) -> str:
    """The key of a ds_config.json that a message names; the longest, if there are several."""
    keys = re.findall(
        r"""(?m)(?<![\w-])["']?([A-Za-z_]\w*)["']?\s*:""", path.read_text("utf-8-sig")
    )
    named = [key for key in keys if re.search(rf"(?<!\w){key}(?!\w)", said)]
    return max(named, key=len, default="")


def place_of(path: Path, key: str) -> Place:
    """The line of the first key of this name in a ds_config.json; the file, if none is found.

    Args:
        path: the file.
        key: dotted; its last part is looked for.
    """
    name = re.escape(key.rpartition(".")[2])
    text = _text_of(path)
    found = re.search(rf'(?<![\w-])"?{name}"?\s*:', text)
    return Place(str(path), text.count("\n", 0, found.start()) + 1 if found else 0)


def _text_of(path: Path) -> str:
    """The text for a message; empty where it cannot be read, as in a container without the file."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8-sig")
    return ""


@dataclass(frozen=True)
class Merged:
    """What a ds_config.json adds to a run file.

    Attributes:
        rest: the settings that go to DeepSpeed unchanged, and the `scheduler` for the loop.
        keys: the keys of the run file that it sets.
        autos: those that it leaves to the run file.
        notes: each decision, for printing.
        accumulation: `gradient_accumulation_steps`; None: free. It is compared with the batch when
            the number of ranks is known.
        half: what `precision: auto` may become beside fp32, the best first.
    """

    rest: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    autos: tuple[str, ...] = ()
    notes: tuple[Choice, ...] = ()
    accumulation: int | None = None
    half: tuple[str, ...] = HALF


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
        with about(lines.place("engine", "config")):
            loaded = load(path)
        theirs = _Theirs(loaded, path, lines, data)
        data["engine"]["config"] = str(path)
        return theirs.merged()
    return Merged()


class _Theirs:
    """A ds_config.json while it is read.

    Attributes:
        rest: what was not read yet; in the end DeepSpeed's own.
        data: of the run file.
        found: key of the run file -> their key, and its value.
        autos: keys of the run file that are "auto".
    """

    def __init__(self, rest: dict[str, Any], path: Path, lines: Lines, data: Any) -> None:
        # DeepSpeed reads null in most places as if the key were absent, and fails in the others.
        self.rest = {key: value for key, value in rest.items() if value is not None}
        self.path, self.lines, self.data = path, lines, data
        self.found: dict[str, tuple[str, Any]] = {}
        self.autos: dict[str, None] = {}
        self.notes: list[Choice] = []

    def merged(self) -> Merged:
        """Merges all settings with the run file's data.

        Raises:
            UsageError: a section is none, or both files set a key to different values.
        """
        self.check_names()
        self.read_old_names()
        self.check_sections()
        for their_key, key in PLAIN_KEYS.items():
            self.found_or_auto(their_key, key, self.take(their_key))
        self.read_scheduler()
        self.read_optimizer()
        self.read_offload()
        half = self.read_precision()
        accumulation = self.take_accumulation()
        self.default("optimizer.clip", CLIP, "gradient_clipping")
        self.check_zero()
        self.check_refused()
        for key in [key for key in WITHOUT_EFFECT if key in self.rest]:
            value = self.rest.pop(key)
            as_ours = key == "zero_allow_untested_optimizer"
            if _get(value, "enabled") is not False and value not in (as_ours, {}):
                self.note(key, LEFT_OUT, WITHOUT_EFFECT[key])
        rest = self.without_auto(self.rest, "")
        self.check_contradictions()
        said = {key: v for key, (_, v) in self.found.items() if self.given(key) in (None, "auto")}
        for key, value in said.items():
            if isinstance(self.data.get(key.partition(".")[0], {}), dict | str):
                their_key = self.found[key][0]
                place = f"{place_of(self.path, their_key)}: {their_key}"
                self.lines.put(self.data, key.split("."), value, place)
        return Merged(
            rest=rest,
            keys=tuple(said),
            autos=tuple(key for key in self.autos if key not in self.found),
            notes=tuple(self.notes),
            accumulation=accumulation,
            half=half,
        )

    def given(self, key: str) -> Any:
        """What the run file says of its key; None: nothing."""
        return _get(self.data, key)

    def note(self, key: str, value: object, reason: str) -> None:
        self.notes.append(Choice(key, value, reason, self.path.name))

    def refuse(self, key: str, problem: str, remedy: str) -> None:
        with self.lines.mistakes:
            raise UsageError(problem, remedy, place=place_of(self.path, key))

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

    def default(self, key: str, value: object, their_key: str) -> None:
        """Takes DeepSpeed's default for a key, if neither file has it."""
        if key not in {*self.found, *self.autos} and self.given(key) is None:
            self.found[key] = (their_key, value)
            self.note(key, value, f"{DEFAULT}: {self.path.name} has no {their_key}")

    def check_names(self) -> None:
        """DeepSpeed ignores a key that it does not know: a slip there trains something else."""
        zero = self.rest.get("zero_optimization")
        old = [key for key in REMOVED_FROM_ZERO if isinstance(zero, dict) and key in zero]
        for key in (*old, *(key for key in self.rest if key in REMOVED)):
            instead = "DeepSpeed no longer has this feature."
            if key == "amp":
                instead = "Instead of it, enable `fp16` or `bf16`."
            self.refuse(
                key,
                f"DeepSpeed has removed `{key}`, and refuses a file that has it.",
                f"Remove `{key}` with all that is in it. {instead}",
            )
        for key in [key for key in self.rest if key not in KNOWN | REMOVED]:
            if key.startswith("_"):  # how JSON is given a comment
                del self.rest[key]
                continue
            near = nearest_name(key, KNOWN)
            meant = f"Write `{near}`, if that is meant; else remove" if near else "Remove"
            self.refuse(
                key,
                f"`{key}` is no key of a ds_config.json: DeepSpeed would ignore it.",
                f"{meant} `{key}`.",
            )

    def read_old_names(self) -> None:
        """Gives keys their names of today, where DeepSpeed still reads the old ones."""
        if "bfloat16" in self.rest:
            old = self.rest.pop("bfloat16")
            if "bf16" in self.rest:
                self.note("bfloat16", LEFT_OUT, "DeepSpeed reads `bf16` where both are there")
            else:
                self.rest["bf16"] = old
        zero = self.rest.get("zero_optimization")
        if isinstance(zero, bool):
            self.rest["zero_optimization"] = {"stage": int(zero)}
        elif isinstance(zero, dict):
            if str(zero.get("stage")) in ("0", "1", "2", "3"):
                zero["stage"] = int(zero["stage"])  # DeepSpeed also takes it as text
            for name, old_name in OFFLOADS.items():
                if zero.pop(old_name, False):
                    zero.setdefault(name, {"device": "cpu"})

    def check_sections(self) -> None:
        for section in SECTIONS:
            here = _get(self.rest, section)
            if here is not None and not isinstance(here, dict):
                raise UsageError(
                    f"`{section}` must be {{...}}, found `{here}`.",
                    "Put the settings of this section in braces, or remove it.",
                    place=place_of(self.path, section),
                )

    def check_zero(self) -> None:
        zero = self.rest.get("zero_optimization") or {}
        for key in WHOLE & zero.keys():
            value = zero[key]
            if value != "auto" and (not isinstance(value, int | float) or value % 1):
                whole = int(value) if isinstance(value, float) else 50_000_000
                self.refuse(
                    key,
                    f"zero_optimization.{key} must be a whole number, found `{value}`: "
                    "DeepSpeed would refuse it in each rank.",
                    f'Write "{key}": {whole}, or "auto".',
                )

    def check_refused(self) -> None:
        """Refuses what DeepSpeed takes, and the loop or its optimizer does not go with."""
        for key, (harmless, why) in REFUSED.items():
            value = _get(self.rest, key)
            if str(value).lower() not in harmless:
                self.refuse(
                    key,
                    f"{key}: {_shown(value)}: {why}.",
                    f"Remove `{key.removesuffix('.enabled')}`; or run a script of your own that "
                    "uses it: runner exec --bundle BUNDLE -- python SCRIPT.",
                )
        self.rest.pop("sequence_parallel_size", None)
        autocast = self.rest.get("torch_autocast") or {}
        if _get(autocast, "enabled"):
            reason = "DeepSpeed computes in it; weights and memory are those of `precision`"
            self.note("torch_autocast", _get(autocast, "dtype") or True, reason)

    def read_optimizer(self) -> None:
        """Reads what remains of the optimizer after its numbers were taken."""
        optimizer = self.rest.pop("optimizer", None) or {}
        kind = optimizer.get("type", "auto")
        chosen = OPTIMIZERS.get(str(kind)) or OPTIMIZERS.get(str(kind).lower())
        if kind != "auto" and chosen is None:
            self.refuse(
                "optimizer",
                f"optimizer.type {kind} is not supported by `runner train`.",
                "Use AdamW, Lion or SGD; or remove `optimizer` and set optimizer.name in the run "
                "file.",
            )
        elif chosen is not None:
            self.found["optimizer.name"] = ("optimizer.type", chosen[0])
            params = optimizer.get("params") or {}
            # DeepSpeed then makes torch's AdamW, which has another default.
            torchs = {"weight_decay": 0.01} if params.get("torch_adam") else {}
            for name, value in (chosen[1] | torchs).items():
                self.default(f"optimizer.{name}", value, f"optimizer.params.{name}")
            decay = self.found.get("optimizer.weight_decay", ("", 0.01))[1]
            if params.get("adam_w_mode") is False and decay:
                self.refuse(
                    "adam_w_mode",
                    "adam_w_mode: false is Adam with the decay in its gradient (L2). `runner "
                    "train` has AdamW alone.",
                    "Write true, or a weight_decay of 0, with which both are the same.",
                )
        elif not optimizer:
            with_it = "" if "scheduler" in self.rest else ", with its schedule"
            reason = f"{self.path.name} has none, and DeepSpeed no default"
            self.note("optimizer", f"the run file's{with_it}", reason)
        for key, value in (optimizer.get("params") or {}).items():
            if value != "auto" and (key, value) != ("adam_w_mode", True):
                reason = "torch's optimizer is used, without this setting"
                self.note(f"optimizer.params.{key}", LEFT_OUT, reason)

    def read_offload(self) -> None:
        """Reads where optimizer and weights are. The settings themselves stay in `rest`."""
        zero = self.rest.get("zero_optimization") or {}
        stage, moved = self.found.get("engine.zero", ("", 3))[1], list[str]()
        for name in [name for name in OFFLOADS if zero.get(name) is not None]:
            if stage == 0 or (name == "offload_param" and stage in (1, 2)):
                del zero[name]
                self.note(f"zero_optimization.{name}", LEFT_OUT, f"stage {stage} keeps it there")
                continue
            device, path = zero[name].get("device", "none"), zero[name].get("nvme_path")
            key = f"zero_optimization.{name}"
            # Of two different halves, the run file names the one that leaves the GPU.
            if device != "none" and self.found.get("engine.offload", ("", ""))[1] == "none":
                del self.found["engine.offload"]
            self.found_or_auto(f"{key}.device", "engine.offload", device)
            if device == "nvme":
                self.found["engine.offload"] = (f"{key}.device", device)
                self.found_or_auto(f"{key}.nvme_path", "engine.nvme_path", path)
            if stage == 3 and device in ("cpu", "nvme"):
                moved.append(name)
            if device == "auto":
                del zero[name]
                self.note(key, "as engine.offload", 'its device is "auto"')
        if len(moved) == 1 and "engine.offload" in self.found:
            what = "the optimizer" if moved == ["offload_optimizer"] else "the weights"
            reason = f"{moved[0]} alone: {what}, and nothing else"
            self.note("engine.offload", self.found["engine.offload"][1], reason)

    def read_precision(self) -> tuple[str, ...]:
        """Reads which of bf16 and fp16 is on; returns what `precision: auto` may become."""
        enabled = {name: self.take_enabled(name) for name in HALF if name in self.rest}
        on = [name for name in HALF if enabled.get(name) is True]
        autos = tuple(name for name in HALF if enabled.get(name) == "auto")
        off = [name for name in HALF if enabled.get(name) is False]
        said = self.given("precision")
        if len(on) > 1:
            self.refuse("fp16", "bf16 and fp16 are both enabled.", "Disable one of them.")
        elif on:
            self.found["precision"] = (f"{on[0]}.enabled", on[0])
        elif said in off:
            self.found["precision"] = (f"{said}.enabled", False)  # a contradiction
        elif autos:
            self.autos["precision"] = None
        elif off and said is None:
            self.found["precision"] = (f"{'/'.join(off)}.enabled", "fp32")
        else:
            self.default("precision", "fp32", "section bf16 or fp16 that is enabled")
        return autos or tuple(name for name in HALF if name not in off)

    def take_enabled(self, name: str) -> object:
        """Takes `enabled` of a section, which DeepSpeed reads as pydantic does: also as text."""
        value = self.rest[name].pop("enabled", False)
        text = str(value).lower()
        if text in ("auto", *_TRUE, *_FALSE):
            return "auto" if text == "auto" else text in _TRUE
        self.refuse(name, f"{name}.enabled must be true or false, found `{value}`.", "Correct it.")
        return False

    def read_scheduler(self) -> None:
        """Reads the names and peak of a scheduler; the loop asks DeepSpeed's own for each rate."""
        scheduler = self.rest.pop("scheduler", {})
        name, params = scheduler.get("type"), dict(scheduler.get("params") or {})
        name = name if name is None else str(name)
        if name is None and _get(self.rest, "optimizer.type") is not None:
            self.default("schedule.name", "constant", "scheduler")
            self.default("schedule.warmup", 0.0, "scheduler")
        if name in (None, "auto"):
            return  # the run file's schedule
        if name not in SCHEDULES:
            self.refuse(
                "scheduler",
                f"scheduler.type {name} is not supported by `runner train`.",
                suggest(str(name), SCHEDULES, f"Use one of {', '.join(SCHEDULES)}."),
            )
            return
        self.found["schedule.name"] = ("scheduler.type", SCHEDULES[name])
        self.default("schedule.warmup", 1000, "scheduler.params.warmup_num_steps")
        warmup = self.found.get("schedule.warmup", ("", 1))[1]
        if type(warmup) is not int or warmup < 1:
            self.refuse(
                "warmup_num_steps",
                f"scheduler.params.warmup_num_steps must be a whole number from 1 on, found "
                f"`{warmup}`: DeepSpeed would refuse it in each rank.",
                "Write 1 for no warm-up.",
            )
        if name != "WarmupCosineLR":
            self.read_peak(name, params.pop("warmup_max_lr", None))
        if params.get("total_num_steps") == "auto":
            del params["total_num_steps"]
        elif "total_num_steps" in params and name != "WarmupLR":
            reason = "the rate falls until then, also in a run of another length"
            self.note("scheduler.total_num_steps", params["total_num_steps"], reason)
        self.rest["scheduler"] = {"type": name, "params": params}

    def read_peak(self, name: str, peak: Any) -> None:
        """Reads the rate to which WarmupLR and WarmupDecayLR go, whatever the optimizer says."""
        their_key = "scheduler.params.warmup_max_lr"
        before = self.found.get("optimizer.lr")
        if name == "WarmupDecayLR" and peak is None and self.given("optimizer.lr") is None:
            peak = 1e-3
            self.note("optimizer.lr", peak, f"{DEFAULT}: {self.path.name} has no {their_key}")
        if peak in (None, "auto"):
            self.found_or_auto(their_key, "optimizer.lr", peak)
            return
        self.found["optimizer.lr"] = (their_key, peak)
        if before is not None and before[1] != peak:
            self.notes = [note for note in self.notes if note.key != "optimizer.lr"]
            reason = f"DeepSpeed's {name} sets the rate: it goes to {their_key}, {peak}"
            self.note("optimizer.params.lr", LEFT_OUT, reason)

    def take_accumulation(self) -> int | None:
        """Their accumulation: DeepSpeed gets the number that follows from batch and ranks."""
        accumulation = self.rest.pop("gradient_accumulation_steps", None)
        if accumulation is None:
            said = [self.found.get(key, ("", self.given(key)))[1] for key in BATCH]
            if isinstance(said[0], int) and said[1] is None:
                reason = f"{DEFAULT}: {self.path.name} has no gradient_accumulation_steps"
                self.note("accumulation", 1, reason)
                return 1
            return None
        if accumulation == "auto":
            return None
        if type(accumulation) is not int or accumulation < 1:
            self.refuse(
                "gradient_accumulation_steps",
                "gradient_accumulation_steps must be a whole number from 1 on, "
                f"found `{accumulation}`.",
                'Correct it, or write "auto".',
            )
            return None
        return accumulation

    def without_auto(self, tree: dict[str, Any], where: str) -> dict[str, Any]:
        """Settings without the "auto"s that no key of the run file has: DeepSpeed's defaults."""
        kept: dict[str, Any] = {}
        for key, value in tree.items():
            if isinstance(value, dict):
                value = self.without_auto(value, f"{where}{key}.")
            elif value == "auto":
                reason = '"auto", and no key of the run file'
                self.note(f"{where}{key}", DEFAULT, reason)
            if value not in ("auto", {}) or (where, key) == ("", "scheduler"):
                kept[key] = value
        return kept

    def check_contradictions(self) -> None:
        clashes = [
            f"{self.path.name} says {their_key}: {_shown(value)}, "
            f"{self.lines.place(*key.split('.'))} says {key}: {given}"
            for key, (their_key, value) in self.found.items()
            if (given := self.given(key)) not in (None, "auto", value)
        ]
        if clashes:
            remedy = f'Make them equal, or write "auto" in {self.path}.'
            raise UsageError(f"{'; '.join(clashes)}.", remedy)


def _shown(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def _get(data: Any, dotted: str) -> Any:
    """A value in nested mappings; None: they have none."""
    for key in dotted.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    return data
