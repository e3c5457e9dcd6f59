"""What a run folder tells, read with no trust in it: the run may go on, may have been killed, may be somebody else's.

`RunFolder` -> `History`: settings, environment, metrics, checkpoints, logs, and what of it could not be read. Used by
`status`, `logs`, `report` and `bench`; needs no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config import RunConfig
from runner.errors import StageError, UsageError, load_yaml_with_lines, read_value
from runner.records import EXPORTED, RunFolder
from runner.resume import read_state

LARGEST_DOCUMENT = 16 * 2**20  # bytes; a config.yaml or environment.json above it is none of ours
LONGEST_LINE = 64 * 2**10  # bytes of metrics.jsonl
_STEP = re.compile(r"step-(\d{1,18})")
_SLURM_LOG = re.compile(r"slurm-(\d{1,18})\.out")


@dataclass(frozen=True)
class History:
    """One run, as its folder tells it.

    Attributes:
        settings: dotted key -> value of config.yaml.
        facts: environment.json.
        steps: lines of metrics.jsonl with a `loss`, by step, the last one told of each step.
        validations: those with a `validation_...`.
        checkpoints: steps of those that are complete.
        jobs: numbers of the Slurm jobs that wrote logs here, oldest first.
        warnings: what could not be read, in words.
    """

    folder: RunFolder
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    validations: tuple[Mapping[str, Any], ...]
    checkpoints: tuple[int, ...]
    jobs: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The run's name, else its folder's."""
        return str(self.settings.get("name") or self.folder.root.name)

    @property
    def num_steps(self) -> int | None:
        """How many steps it wants; None where nobody recorded it."""
        said = self.facts.get("num_steps", self.settings.get("steps"))
        return said if isinstance(said, int) and not isinstance(said, bool) and said > 0 else None

    @property
    def last_job(self) -> int | None:
        """The number of the Slurm job that wrote here last; None: there was none."""
        slurm = self.facts.get("slurm")
        recorded = slurm.get("SLURM_JOB_ID") if isinstance(slurm, dict) else None
        told = [int(recorded)] if isinstance(recorded, str) and re.fullmatch(r"\d{1,18}", recorded) else []
        return max([*self.jobs[-1:], *told], default=None)

    @property
    def has_exported_its_last_step(self) -> bool:
        """Whether `model/` is what its last step led to, and not what was exported before the run was extended.

        Versions that noted nothing of it leave their checkpoints as witnesses: a run that was killed before its export
        has one to go on from. Where nobody kept any, `model/` is believed: to train again would cut back the metrics.
        """
        done = self.steps[-1]["step"] if self.steps else 0
        if not self.folder.model.is_dir():
            return False
        if EXPORTED in self.facts:
            return bool(self.facts[EXPORTED] == done)
        newest = max(self.checkpoints, default=done)
        try:
            return newest >= done and not read_state(self.folder.checkpoints / f"step-{newest}").evaluation_due
        except (OSError, ValueError):
            return True

    @staticmethod
    def read(root: Path) -> History:
        """Reads a run folder.

        Raises:
            UsageError: there is no such folder, or it is none of a run.
        """
        folder = RunFolder(root)
        if not root.is_dir():
            raise UsageError(f"{root}: no such run folder.", "Give a folder that `runner train` wrote: output/<name>.")
        if not any(path.exists() for path in (folder.config, folder.metrics, folder.environment, folder.logs)):
            inside = sorted(path.parent for path in root.glob("*/config.yaml"))
            hint = f"Did you mean {inside[0]}?" if inside else "Give a folder that `runner train` wrote: output/<name>."
            raise UsageError(f"{root}: not a run folder: it has no config.yaml and no metrics.jsonl.", hint)
        warnings: list[str] = []
        lines = list(_metrics(folder.metrics, warnings))
        return History(
            folder=folder,
            settings=dict(_flat(_document(folder.config, warnings))),
            facts=_document(folder.environment, warnings),
            steps=_by_step(line for line in lines if "loss" in line),
            validations=_by_step(line for line in lines if any(key.startswith("validation_") for key in line)),
            checkpoints=tuple(sorted(_numbers(folder.checkpoints, _STEP, "files.json"))),
            jobs=tuple(sorted(_numbers(folder.logs, _SLURM_LOG, None))),
            warnings=tuple(warnings),
        )


def is_finished(folder: RunFolder, config: RunConfig) -> str | None:
    """That a run has done all that its run file asks for, in words; None: it has not, or nobody can tell."""
    try:
        history = History.read(folder.root)
    except UsageError:
        return None
    asked = settings_of(config)
    same = all(history.settings.get(key) == asked.get(key) for key in ("steps", "epochs"))
    wanted = config.steps or (history.num_steps if same else None)
    done = int(history.steps[-1]["step"]) if history.steps else 0
    if wanted is None or done < wanted or not history.has_exported_its_last_step:
        return None
    return f"finished already: {done} of {wanted} steps; its model: {folder.model}"


def earlier_settings(folder: RunFolder) -> dict[str, Any]:
    """Dotted key -> value of the config.yaml in a run folder; empty where there is none to be read."""
    return dict(_flat(_document(folder.config, [])))


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The same of a run file that was read."""
    return dict(_flat(read_value(config.to_yaml())))


def number(line: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a metrics line; None where there is none (null stands for nan and inf)."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _document(path: Path, warnings: list[str]) -> dict[str, Any]:
    """A YAML or JSON mapping; empty, with a warning, where it cannot be read."""
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
        warnings.append(f"{path.name} cannot be read: {str(error).splitlines()[0] if str(error) else 'damaged'}")
        return {}
    return found


def _metrics(path: Path, warnings: list[str]) -> Iterator[dict[str, Any]]:
    unread = 0
    try:
        with open(path, "rb") as file:
            while raw := file.readline(LONGEST_LINE):
                line = _line(raw)
                if line is not None:
                    yield line
                elif raw.strip() and (raw.endswith(b"\n") or file.peek(1)):  # else it is being written
                    unread += 1
    except FileNotFoundError:
        return
    except OSError as error:
        warnings.append(f"{path.name} cannot be read: {error.strerror}")
    if unread:
        warnings.append(f"{path.name}: {unread} lines are damaged and left out")


def _line(raw: bytes) -> dict[str, Any] | None:
    """A line of metrics; the last one may be half written."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("step"), int) or abs(found["step"]) > 2**53:
        return None
    return found


def _by_step(lines: Iterator[dict[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    told = {line["step"]: line for line in lines}
    return tuple(told[step] for step in sorted(told))


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
