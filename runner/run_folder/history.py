"""Reads a run folder without trust in it: the run may continue, may be killed, may be foreign.

`RunFolder` -> `History`: settings, environment, metrics, checkpoints, logs, and warnings on what
could not be read. Used by `status`, `logs`, `report` and `bench`; needs no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.config.fields import shown
from runner.config.run_config import RunConfig
from runner.from_stage import (
    REQUIRED,
    StageError,
    UsageError,
    human_count,
    keys_of,
    load_yaml_with_lines,
    plain,
    quoted,
    read_value,
    suggest_path,
)
from runner.run_folder.layout import (
    ENDED_EARLY,
    EXPORTED,
    PULLED,
    WEIGHTS_OF,
    RunFolder,
    metrics_line,
)
from runner.run_folder.results import ResultFile
from runner.slurm.script import elements_of

MISSING, NO_NUMBER = math.nan, math.inf


class Columns:
    """Measures, each a column with one entry per line.

    Attributes:
        steps: of the lines.
        last: the line of the highest step, as it was written; empty: there is none.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.last: Mapping[str, Any] = {}
        self._columns: dict[str, array[float]] = {}

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a line, which has a `step`."""
        for key, value in line.items():
            if (column := self._columns.get(key)) is None:
                column = self._columns[key] = array("d")
            if len(column) < len(self.steps):
                column.extend([MISSING] * (len(self.steps) - len(column)))
            if type(value) is not float or not -NO_NUMBER < value < NO_NUMBER:
                finite = number(line, key)
                value = NO_NUMBER if finite is None else finite
            column.append(value)
        self.steps.append(line["step"])
        if line["step"] >= self.last.get("step", line["step"]):
            self.last = line

    def by_step(self) -> Columns:
        """The last line of each step, in order of the steps."""
        if all(one < next_one for one, next_one in pairwise(self.steps)):
            return self
        last = {step: index for index, step in enumerate(self.steps)}
        order = [last[step] for step in sorted(last)]
        ordered = Columns()
        ordered.steps, ordered.last = array("q", (self.steps[i] for i in order)), self.last
        for key, column in self._columns.items():
            column.extend([MISSING] * (len(self.steps) - len(column)))
            ordered._columns[key] = array("d", (column[i] for i in order))
        return ordered

    def points(self, key: str) -> list[tuple[int, float | None]]:
        """(step, value) of the lines that have a measure; None where it was no finite number."""
        return [
            (step, None if value == NO_NUMBER else value)
            for step, value in zip(self.steps, self._columns.get(key, ()), strict=False)
            if value == value  # not MISSING
        ]

    def numbers(self, key: str) -> list[float]:
        """The finite numbers of one measure, in order."""
        return [value for _, value in self.points(key) if value is not None]

    @property
    def names(self) -> list[str]:
        """Of all measures."""
        return list(self._columns)


def number(line: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a metrics line; None if there is none (null stands for nan and inf)."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


SCRIPT = "submit.sbatch"
PHASES = ("load", "train", "evaluate")
END = 2 * 2**20  # bytes: some 10,000 lines
_RARE = (b'"validation_', b'_host_gib"')
"""What lines of measures have that are written seldom."""
_STEP = re.compile(r"step-(\d{1,18})")
_SLURM_LOG = re.compile(r"slurm-(\d{1,18})\.out")


@dataclass(frozen=True)
class History:
    """One run, as its folder records it.

    Attributes:
        settings: dotted key -> value of config.yaml.
        facts: environment.json.
        steps: lines of metrics.jsonl with a `loss`, in order; the last line of each step. Those at
            the end of the file, or all of them.
        validations: the same of lines with a `validation_...`; always all of them.
        memory: phase -> `device` and `host` -> the most of any rank, GiB.
        checkpoints: the steps of the whole checkpoints, in order.
        jobs: the numbers of the Slurm jobs that wrote logs here, oldest first.
        warnings: messages about what could not be read.
        table: of a command's run: its measures without a step (`runner.run_folder.curves`).
        results: of a command's run: what it wrote, the newest last.
    """

    folder: RunFolder
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    steps: Columns
    validations: Columns
    memory: Mapping[str, Mapping[str, float]]
    checkpoints: tuple[int, ...]
    jobs: tuple[int, ...]
    warnings: tuple[str, ...]
    table: Mapping[str, str | float] = field(default_factory=dict)
    results: tuple[ResultFile, ...] = ()

    @property
    def is_command(self) -> bool:
        """Whether it is the run of a command, not of a task of ours."""
        return "command" in self.settings and "task" not in self.settings

    @property
    def name(self) -> str:
        """The run's name, else its folder's."""
        return str(self.settings.get("name") or self.folder.root.name)

    @property
    def starts(self) -> tuple[Mapping[str, Any], ...]:
        """Of a command: what is recorded of each start, oldest first."""
        found = self.facts.get("starts")
        return (
            tuple(one for one in found if isinstance(one, dict)) if isinstance(found, list) else ()
        )

    @property
    def done(self) -> int:
        """The last step; 0: there is none."""
        return int(self.steps.last.get("step", 0))

    @property
    def num_steps(self) -> int | None:
        """How many steps the run asks for, or made before it ended early; None: not recorded."""
        if self.ended_early is not None:
            return self.ended_early
        steps = self.facts.get("num_steps", self.settings.get("steps"))
        return steps if type(steps) is int and steps > 0 else None

    @property
    def ended_early(self) -> int | None:
        """The step at which `evaluation.patience` ended the run; None if it did not."""
        step = self.facts.get(ENDED_EARLY)
        return step if type(step) is int and step == self.done > 0 else None

    @property
    def model(self) -> str:
        """`model/`, the step whose weights it has if that is not the last one, and whether it is
        an adapter alone.
        """
        step = self.facts.get(WEIGHTS_OF)
        which = f" (the weights of step {step}, the best)" if isinstance(step, int) else ""
        if "lora.rank" in self.settings and not self.settings.get("lora.merge"):
            which += f": an adapter; {self.folder.model / 'README.md'} says how to load it"
        return f"{self.folder.model}{which}"

    @property
    def last_job(self) -> int | None:
        """The number of the Slurm job that wrote here last, or should; None if there was none."""
        slurm = self.facts.get("slurm")
        texts = [str(slurm.get("SLURM_JOB_ID")) if isinstance(slurm, dict) else ""]
        with suppress(OSError, ValueError):
            texts.append(self.folder.submitted.read_text(encoding="utf-8").strip())
        found = [int(text) for text in texts if re.fullmatch(r"\d{1,18}", text)]
        return max((*self.jobs, *found), default=None)

    @property
    def is_exported(self) -> bool:
        """Whether `model/` was exported after the last step, and not before the run was extended.

        A run that was killed before its export has none, and resumes from its checkpoint.
        """
        return self.folder.model.is_dir() and self.facts.get(EXPORTED) == self.done

    @property
    def is_pulled(self) -> bool:
        """Whether these are results that `runner pull` brought: the run is elsewhere."""
        return (self.folder.root / PULLED).is_file()

    @staticmethod
    def read(root: Path, *, whole: bool = False) -> History:
        """Reads a run folder.

        Args:
            whole: all steps; else those at the end, which takes no time.

        Raises:
            UsageError: there is no such folder, or it is not a run folder.
        """
        folder = RunFolder(root)
        _check_is_run_folder(folder)
        warnings: list[str] = []
        steps, validations, rare = Columns(), Columns(), list[dict[str, Any]]()
        for line, is_rare in _metrics(folder.metrics, warnings, whole=whole):
            if "loss" in line:
                steps.append(line)
            if is_rare:
                rare.append(line)
        for line in rare:
            if any(key.startswith("validation_") for key in line):
                validations.append(line)
        return History(
            folder=folder,
            settings=dict(_flat(_document(folder.config, warnings))),
            facts=_document(folder.environment, warnings),
            steps=steps.by_step(),
            validations=validations.by_step(),
            memory=memory_by_phase(rare),
            checkpoints=tuple(
                step
                for step in numbers_in(folder.checkpoints, _STEP)
                if (folder.checkpoints / f"step-{step}" / "files.json").is_file()
            ),
            jobs=tuple(numbers_in(folder.logs, _SLURM_LOG)),
            warnings=tuple(warnings),
        )


def _check_is_run_folder(folder: RunFolder) -> None:
    hint = "Give a folder that `runner train` wrote: output/<name>."
    if not folder.root.is_dir():
        raise UsageError(f"{folder.root}: no such run folder.", suggest_path(folder.root, hint))
    if not is_run_folder(folder.root):
        inside = sorted(path.parent for path in folder.root.glob("*/config.yaml"))
        raise UsageError(
            f"{folder.root}: not a run folder: it has no config.yaml and no metrics.jsonl.",
            f"Runs are in it: {', '.join(path.name for path in inside[:8])}"
            f"{', ...' if len(inside) > 8 else ''}. Give one, such as {inside[0]}"
            if inside
            else hint,
        )


def is_run_folder(root: Path) -> bool:
    """Whether a folder has something that a run writes; while data are prepared, its lock alone."""
    folder = RunFolder(root)
    files = (folder.config, folder.metrics, folder.environment, folder.logs, folder.holder)
    return any(path.exists() for path in files)


def where_asked() -> str:
    """` --to CLUSTER` where another machine asks (`runner.remote.there.go`); else nothing."""
    to = os.environ.get("AIRLIFT_TO")
    return f" --to {quoted(to)}" if to else ""


def elements(sweep: Path) -> dict[str, int]:
    """The runs of a sweep, by its script: name -> index in the job array; empty: it is no sweep."""
    try:
        text = (sweep / SCRIPT).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return elements_of(text)


def history_of(folder: RunFolder) -> History | None:
    """What a run folder records of earlier starts; None: nothing, or it is none."""
    try:
        return History.read(folder.root)
    except UsageError:
        return None


def describe_finished(history: History | None, config: RunConfig) -> str | None:
    """A line if the run has done all that its run file asks for; None if not, or if unknown."""
    if history is None:
        return None
    asked = settings_of(config)
    # After `runner prepare`, config.yaml is of the next start, environment.json of the last one.
    is_of_next = _is_newer(history.folder.config, history.folder.environment)
    keys = ("steps", "epochs")
    same = not is_of_next and all(history.settings.get(key) == asked.get(key) for key in keys)
    wanted = config.steps or (history.num_steps if same else None)
    if history.ended_early is not None:
        patience = "evaluation.patience"
        if is_of_next or history.settings.get(patience) != asked.get(patience):
            return None
        wanted = history.ended_early
    if wanted is None or history.done < wanted or not history.is_exported:
        return None
    return f"finished already: {history.done} of {wanted} steps; its model: {history.model}"


def _is_newer(path: Path, other: Path) -> bool:
    """Whether a file was written after another one; not, if one of them is missing."""
    try:
        return path.stat().st_mtime > other.stat().st_mtime
    except OSError:
        return False


def changes(history: History | None, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> its value in the run that is in the folder, and another one now."""
    if history is None or not history.settings:
        return {}
    before = {**history.settings, **_defaults_of_absent_keys(history.settings)}
    after = settings_of(config)
    both = {key: (before.get(key), after.get(key)) for key in sorted(before.keys() | after.keys())}
    return {key: (old, new) for key, (old, new) in both.items() if old != new}


def _defaults_of_absent_keys(
    before: Mapping[str, Any], component: Any = RunConfig, prefix: str = ""
) -> dict[str, Any]:
    """Dotted key -> default of the keys that a config.yaml lacks: an older version wrote it.

    That run behaved as these defaults say, so they are no changes.

    Args:
        before: dotted key -> value, of the whole config.yaml.
        component: the dataclass whose keys are looked for.
        prefix: where it is in the file: empty, or `lora.`.
    """
    found: dict[str, Any] = {}
    for key in keys_of(component).values():
        name = f"{prefix}{key.name}"
        value = before.get(name)
        has_keys_inside = any(other.startswith(f"{name}.") for other in before)
        if isinstance(value, list) and key.component:  # `datasets`
            of_item = _defaults_of_absent_keys({}, key.component)
            found[name] = [{**of_item, **item} for item in value if isinstance(item, dict)]
        elif has_keys_inside and key.component:
            found |= _defaults_of_absent_keys(before, key.component, f"{name}.")
        elif name not in before and not has_keys_inside and key.default is not REQUIRED:
            found |= _flat({name: plain(key.default)})
    return found


def changed_since(history: History | None, config: RunConfig) -> list[str]:
    """Lists the settings that decide the result and differ from those of the run that is in the
    folder, both values.
    """
    others = {key.name for key in keys_of(RunConfig).values() if key.decides != "result"}
    return [
        f"{key} {shown(old)} (now {shown(new)})"
        for key, (old, new) in changes(history, config).items()
        if key.split(".")[0] not in others
    ]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> value of a run file."""
    return dict(_flat(read_value(config.to_yaml())))


def _document(path: Path, warnings: list[str]) -> dict[str, Any]:
    """Reads a YAML or JSON mapping; empty, with a warning, if that fails."""
    try:
        if not path.exists():
            return {}
        if path.suffix == ".yaml":
            return load_yaml_with_lines(path)[0]
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError, StageError, RecursionError) as error:
        warnings.append(f"{path.name} cannot be read: {(str(error) or 'damaged').splitlines()[0]}")
        return {}
    return found


def _metrics(
    path: Path, warnings: list[str], *, whole: bool
) -> Iterator[tuple[dict[str, Any], bool]]:
    """The lines of a metrics.jsonl: all, or the rare ones and those at the end; if it is rare."""
    unread = 0
    try:
        with open(path, "rb") as file:
            end = 0 if whole else file.seek(0, 2) - END
            file.seek(0)
            while lines := file.readlines(2**20):
                is_read = file.tell() > end
                if not is_read and not _is_rare(b"".join(lines)):
                    continue
                for raw in lines:
                    is_rare = _is_rare(raw)
                    line = metrics_line(raw) if is_read or is_rare else {}
                    if line:
                        yield line, is_rare
                    # A last line without a line break is still being written.
                    elif line is None and raw.strip() and raw.endswith(b"\n"):
                        unread += 1
    except FileNotFoundError:
        return
    except OSError as error:
        warnings.append(f"{path.name} cannot be read: {error.strerror}")
    if unread:
        warnings.append(f"{path.name}: {human_count(unread, 'damaged line')} omitted")


def _is_rare(raw: bytes) -> bool:
    return any(word in raw for word in _RARE)


def memory_by_phase(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The most memory of each phase, from the lines of a `metrics.jsonl`."""
    most: dict[str, dict[str, float]] = {}
    for line in lines:
        for phase in PHASES:
            for where in ("device", "host"):
                if (gib := number(line, f"{phase}_{where}_gib")) is not None:
                    of_phase = most.setdefault(phase, {})
                    of_phase[where] = max(gib, of_phase.get(where, gib))
    return {phase: most[phase] for phase in PHASES if phase in most}


def _flat(value: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict) and inner and depth < 8:
            yield from _flat(inner, f"{name}.", depth + 1)
        else:
            yield name, inner


def numbers_in(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    """The numbers in the names of a folder's files, in order; none where it cannot be read."""
    names = (path.name for path in folder.glob("*"))
    return sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name)))
