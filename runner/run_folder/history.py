"""Reads a run folder without trust in it: the run may continue, may be killed, may be foreign.

`RunFolder` -> `History`: settings, environment, metrics, checkpoints, logs, and warnings on what
could not be read. Used by `status`, `logs`, `report` and `bench`; needs no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from runner.config.run_config import RunConfig
from runner.errors import (
    StageError,
    UsageError,
    human_count,
    load_yaml_with_lines,
    read_value,
    suggest_path,
)
from runner.run_folder.checkpoints import read_state
from runner.run_folder.columns import Columns
from runner.run_folder.layout import ENDED_EARLY, EXPORTED, WEIGHTS_OF, RunFolder

LARGEST_DOCUMENT = 16 * 2**20  # bytes; a larger config.yaml or environment.json is not ours
PHASES = ("load", "train", "evaluate")
LONGEST_LINE = 64 * 2**10  # bytes of metrics.jsonl
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
        checkpoints: the steps of the complete checkpoints, in order.
        jobs: the numbers of the Slurm jobs that wrote logs here, oldest first.
        warnings: messages about what could not be read.
    """

    folder: RunFolder
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    validations: Sequence[Mapping[str, Any]]
    memory: Mapping[str, Mapping[str, float]]
    checkpoints: tuple[int, ...]
    jobs: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run's name, else its folder's."""
        return str(self.settings.get("name") or self.folder.root.name)

    @property
    def num_steps(self) -> int | None:
        """How many steps the run asks for, or made before it ended early; None: not recorded."""
        if self.ended_early is not None:
            return self.ended_early
        steps = self.facts.get("num_steps", self.settings.get("steps"))
        is_number = isinstance(steps, int) and not isinstance(steps, bool)
        return steps if is_number and steps > 0 else None

    @property
    def ended_early(self) -> int | None:
        """The step at which `evaluation.patience` ended the run; None if it did not."""
        step = self.facts.get(ENDED_EARLY)
        is_last = bool(self.steps) and step == self.steps[-1]["step"]
        return step if isinstance(step, int) and is_last else None

    @property
    def model(self) -> str:
        """`model/`, and the step whose weights it has if that is not the last one."""
        step = self.facts.get(WEIGHTS_OF)
        which = f" (the weights of step {step}, the best)" if isinstance(step, int) else ""
        return f"{self.folder.model}{which}"

    @property
    def last_job(self) -> int | None:
        """The number of the Slurm job that wrote here last, or should; None if there was none."""
        slurm = self.facts.get("slurm")
        recorded = slurm.get("SLURM_JOB_ID") if isinstance(slurm, dict) else None
        jobs = list(self.jobs[-1:])
        for text in (recorded, _submitted(self.folder)):
            if isinstance(text, str) and re.fullmatch(r"\d{1,18}", text):
                jobs.append(int(text))
        return max(jobs, default=None)

    @property
    def has_exported_its_last_step(self) -> bool:
        """Whether `model/` was exported after the last step, and not before the run was extended.

        Older versions did not record this; then the newest checkpoint decides: a run that was
        killed before its export has a checkpoint to resume from. Without a checkpoint `model/`
        counts, because training again would cut the metrics.
        """
        done = self.steps[-1]["step"] if self.steps else 0
        if not self.folder.model.is_dir():
            return False
        if EXPORTED in self.facts:
            return bool(self.facts[EXPORTED] == done)
        newest = max(self.checkpoints, default=done)
        checkpoint = self.folder.checkpoints / f"step-{newest}"
        try:
            return newest >= done and not read_state(checkpoint).evaluation_due
        except (OSError, ValueError):
            return True

    @staticmethod
    def read(root: Path, *, whole: bool = False) -> History:
        """Reads a run folder.

        Args:
            whole: all steps, as columns; else those at the end, which takes no time.

        Raises:
            UsageError: there is no such folder, or it is not a run folder.
        """
        folder = RunFolder(root)
        _check_is_run_folder(folder)
        warnings: list[str] = []
        steps = Columns()
        some, rare = list[dict[str, Any]](), list[dict[str, Any]]()
        for line, is_rare in _metrics(folder.metrics, warnings, whole=whole):
            if "loss" in line:
                (steps if whole else some).append(line)
            if is_rare:
                rare.append(line)
        return History(
            folder=folder,
            settings=dict(_flat(_document(folder.config, warnings))),
            facts=_document(folder.environment, warnings),
            steps=steps.by_step() if whole else _by_step(some),
            validations=_by_step(
                line for line in rare if any(key.startswith("validation_") for key in line)
            ),
            memory=memory_by_phase(rare),
            checkpoints=tuple(sorted(_numbers(folder.checkpoints, _STEP, "files.json"))),
            jobs=tuple(sorted(_numbers(folder.logs, _SLURM_LOG, None))),
            warnings=tuple(warnings),
        )


def _submitted(folder: RunFolder) -> str:
    try:
        return folder.submitted.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


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
    """Whether a folder has something that a run writes."""
    folder = RunFolder(root)
    files = (folder.config, folder.metrics, folder.environment, folder.logs)
    return any(path.exists() for path in files)


def describe_finished(folder: RunFolder, config: RunConfig) -> str | None:
    """A line if the run has done all that its run file asks for; None if not, or if unknown."""
    try:
        history = History.read(folder.root)
    except UsageError:
        return None
    asked = settings_of(config)
    same = all(history.settings.get(key) == asked.get(key) for key in ("steps", "epochs"))
    wanted = config.steps or (history.num_steps if same else None)
    if history.ended_early is not None:
        patience = "evaluation.patience"
        if history.settings.get(patience) != asked.get(patience):
            return None
        wanted = history.ended_early
    done = int(history.steps[-1]["step"]) if history.steps else 0
    if wanted is None or done < wanted or not history.has_exported_its_last_step:
        return None
    return f"finished already: {done} of {wanted} steps; its model: {history.model}"


_NOT_TRAINED_WITH = (
    *("name", "bundle", "slurm", "environment", "checkpoint", "hang_after"),
    *("steps", "epochs", "format"),
)
"""Keys of a run file that change nothing in a model that is trained; and its length."""


def changed_since(folder: RunFolder, config: RunConfig) -> list[str]:
    """Lists the settings that differ from those of the run that is in the folder, both values.

    A key that an older version did not know counts only if the user set it.
    """
    before, after = earlier_settings(folder), settings_of(config)
    return [
        f"{key} {in_yaml(before.get(key))} (now {in_yaml(after.get(key))})"
        for key in sorted(before.keys() | after.keys())
        if before
        and before.get(key) != after.get(key)
        and key.split(".")[0] not in _NOT_TRAINED_WITH
        and (key in before or key in config.given)
    ]


def in_yaml(value: Any) -> Any:
    """Python's words for a value as a run file has them."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


def earlier_settings(folder: RunFolder) -> dict[str, Any]:
    """Dotted key -> value of the config.yaml in a run folder; empty if it cannot be read."""
    return dict(_flat(_document(folder.config, [])))


def earlier_facts(folder: RunFolder) -> dict[str, Any]:
    """The environment.json in a run folder; empty if it cannot be read."""
    return _document(folder.environment, [])


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> value of a run file."""
    return dict(_flat(read_value(config.to_yaml())))


def number(line: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a metrics line; None if there is none (null stands for nan and inf)."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The finite numbers of one measure, in order."""
    return [value for _, value in points(lines, key) if value is not None]


def points(lines: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float | None]]:
    """(step, value) of the lines that have a measure; None where it was no finite number."""
    if isinstance(lines, Columns):
        return lines.points(key)
    return [(line["step"], number(line, key)) for line in lines if key in line]


def _document(path: Path, warnings: list[str]) -> dict[str, Any]:
    """Reads a YAML or JSON mapping; empty, with a warning, if that fails."""
    try:
        if not path.exists():
            return {}
        if not path.is_file() or path.stat().st_size > LARGEST_DOCUMENT:
            raise ValueError("not a file that a run writes")
        if path.suffix == ".yaml":
            return load_yaml_with_lines(path)[0]
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not a mapping")
    except (OSError, ValueError, StageError, RecursionError) as error:
        warnings.append(
            f"{path.name} cannot be read: {str(error).splitlines()[0] if str(error) else 'damaged'}"
        )
        return {}
    return found


def _metrics(
    path: Path, warnings: list[str], *, whole: bool
) -> Iterator[tuple[dict[str, Any], bool]]:
    """The lines of a metrics.jsonl: all, or the rare ones and those at the end; if it is rare."""
    unread = 0
    try:
        with open(path, "rb") as file:
            if not whole:
                for raw in _rare_lines(file):
                    if (line := _line(raw)) is not None:
                        yield line, True
            while raw := file.readline(LONGEST_LINE):
                line = _line(raw)
                if line is not None:
                    yield line, _RARE[0] in raw or _RARE[1] in raw
                # A last line without a line break is still being written.
                elif raw.strip() and (raw.endswith(b"\n") or file.peek(1)):
                    unread += 1
    except FileNotFoundError:
        return
    except OSError as error:
        warnings.append(f"{path.name} cannot be read: {error.strerror}")
    if unread:
        warnings.append(f"{path.name}: {human_count(unread, 'damaged line')} omitted")


def _line(raw: bytes) -> dict[str, Any] | None:
    """Reads one line of metrics; None if it is damaged or incomplete."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return found if isinstance(step, int) and abs(step) <= 2**53 else None


def _rare_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines before the end of a file that have a rare measure; leaves it at its end."""
    end = file.seek(0, 2) - END
    file.seek(0)
    while file.tell() < end:
        lines = file.readlines(2**20)
        if any(word in b"".join(lines) for word in _RARE):
            yield from (line for line in lines if any(word in line for word in _RARE))


def _by_step(lines: Iterable[dict[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    last = {line["step"]: line for line in lines}
    return tuple(last[step] for step in sorted(last))


def memory_by_phase(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The most memory of each phase, from the lines of a `metrics.jsonl`."""
    most: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        for where in ("device", "host"):
            values = [number(line, f"{phase}_{where}_gib") for line in lines]
            if known := [value for value in values if value is not None]:
                most.setdefault(phase, {})[where] = max(known)
    return most


def _flat(value: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict) and inner and depth < 8:
            yield from _flat(inner, f"{name}.", depth + 1)
        else:
            yield name, inner


def _numbers(folder: Path, pattern: re.Pattern[str], must_have: str | None) -> Iterator[int]:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return
    for name in names:
        match = pattern.fullmatch(name)
        if match and (must_have is None or (folder / name / must_have).is_file()):
            yield int(match[1])
