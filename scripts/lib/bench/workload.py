"""A workload: candidates that do the same work on the same bytes, taking turns, round after round."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.bench.arithmetic import Rounds, Target
from scripts.lib.bench.measure import Sample, run


@dataclass(frozen=True)
class Step:
    """One command of a candidate, and the name of the candidate that ends here (None: it goes on)."""

    command: tuple[str, ...]
    ends: str | None


@dataclass(frozen=True)
class Candidate:
    """Commands that follow each other; what ends after the first and what ends after the second are both reported."""

    steps: tuple[Step, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def single(name: str, *command: str, **environment: str) -> Candidate:
        """One command."""
        return Candidate((Step(command, name),), environment)


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        name: its key in the results, and the name of its plot.
        title: in words.
        note: what a reader must know to judge the numbers.
        size, files: bytes and number of files that every candidate handles.
        base: the candidate that the others are compared with.
        writes: the folder that candidates write to, emptied before each; None if they only read.
        targets: from the rounds, what was to be reached.
        seeds: file name -> text, put into that folder before each candidate.
        skipped: candidates that could not take part, with the reason.
        afterwards: what can be said only when all has been measured; Markdown.
    """

    name: str
    title: str
    note: str
    size: int
    files: int
    base: str
    candidates: Sequence[Candidate]
    targets: Callable[[Rounds], Sequence[Target]]
    writes: Path | None = None
    seeds: Mapping[str, str] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    afterwards: Callable[[], str] = str


def measure(workload: Workload, rounds: int, cwd: Path, say: Callable[[str], None]) -> list[dict[str, Sample]]:
    """Runs all candidates of a workload `rounds` times, each round beginning with another one.

    Raises:
        BenchError: a command failed.
    """
    results: list[dict[str, Sample]] = []
    for number in range(rounds):
        first = number % len(workload.candidates)
        samples: dict[str, Sample] = {}
        for candidate in [*workload.candidates[first:], *workload.candidates[:first]]:
            samples |= _run(candidate, workload, cwd)
        names = [step.ends for one in workload.candidates for step in one.steps if step.ends]
        results.append({name: samples[name] for name in names})
        line = ", ".join(f"{name} {samples[name].seconds:.2f}" for name in names)
        say(f"  round {number + 1} of {rounds}, seconds: {line}")
    return results


def _run(candidate: Candidate, workload: Workload, cwd: Path) -> dict[str, Sample]:
    _prepare(workload)
    so_far = Sample(0.0, 0.0, 0)
    ended: dict[str, Sample] = {}
    for step in candidate.steps:
        so_far += run(step.command, {**plain_environment(), **candidate.environment}, cwd)
        if step.ends:
            ended[step.ends] = so_far
    return ended


def _prepare(workload: Workload) -> None:
    """Empties the folder that is written to; and nobody pays for what the one before left to be written."""
    if workload.writes is None:
        return
    shutil.rmtree(workload.writes, ignore_errors=True)
    workload.writes.mkdir(parents=True)
    for name, text in workload.seeds.items():
        (workload.writes / name).write_text(text)
    os.sync()


def plain_environment() -> dict[str, str]:
    """A person's environment without anything that changes what these tools do."""
    return {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
