"""A workload: candidates that do the same work on the same bytes, in turns, round after round.

Its files have incompressible bytes, made quickly and equal in each run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.lib.bench.arithmetic import Rounds, Target
from scripts.lib.bench.measure import Sample, run

MIB = 2**20
_HEADER = 4096  # bytes of a safetensors file before its tensor: whole blocks of a disk


@dataclass(frozen=True)
class Step:
    """One command of a candidate.

    Attributes:
        command: its argv.
        ends: the name of the candidate that ends here; None: more steps follow.
        answer: the file in which the command writes {"seconds": ...} of the work that counts, where
            that is not its wall time.
    """

    command: tuple[str, ...]
    ends: str | None
    answer: Path | None = None


@dataclass(frozen=True)
class Candidate:
    """Commands in sequence; a candidate that ends after each named step is reported."""

    steps: tuple[Step, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def single(name: str, *command: str, **environment: str) -> Candidate:
        """One command."""
        return Candidate((Step(command, name),), environment)


@dataclass(frozen=True)
class Workload:
    """A measurement.

    Attributes:
        name: its key in the results, and the name of its plot.
        title: its heading.
        note: the facts that a reader needs to judge the numbers.
        size, files: bytes and number of files that each candidate handles.
        base: the candidate that the others are compared with.
        writes: the folder that candidates write to, emptied before each; None if they only read.
        targets: rounds -> targets.
        seeds: file name -> text, written into that folder before each candidate.
        skipped: candidates that could not take part, with the reason.
        afterwards: Markdown for the note, made after the measurement.
        unit, per: the heading of the column of `size` per second, and what it is divided by.
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
    unit: str = "MB/s"
    per: float = 1e6


def measure(
    workload: Workload, rounds: int, cwd: Path, say: Callable[[str], None]
) -> list[dict[str, Sample]]:
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
        sample = run(step.command, {**plain_environment(), **candidate.environment}, cwd)
        if step.answer is not None:
            sample = replace(sample, seconds=json.loads(step.answer.read_text())["seconds"])
        so_far += sample
        if step.ends:
            ended[step.ends] = so_far
    return ended


def _prepare(workload: Workload) -> None:
    """Empties the folder that is written to, and syncs, so that no candidate pays for another."""
    if workload.writes is None:
        return
    shutil.rmtree(workload.writes, ignore_errors=True)
    workload.writes.mkdir(parents=True)
    for name, text in workload.seeds.items():
        (workload.writes / name).write_text(text)
    os.sync()


def plain_environment() -> dict[str, str]:
    """The variables of this process without those that change what the tools do."""
    return {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}


def write_safetensors(path: Path, size: int) -> None:
    """A safetensors file of `size` bytes with one tensor in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensor = size - _HEADER
    text = json.dumps(
        {"weight": {"dtype": "U8", "shape": [tensor], "data_offsets": [0, tensor]}}
    ).encode()
    header = struct.pack("<Q", _HEADER - 8) + text.ljust(_HEADER - 8)
    noise = random.Random(size).randbytes(16 * MIB)
    with open(path, "wb", buffering=0) as file:
        file.write(header)
        for number in range(0, tensor, len(noise)):
            file.write((number.to_bytes(8, "little") + noise[8:])[: tensor - number])


def write_small_files(folder: Path, count: int, size: int) -> list[str]:
    """`count` text files of `size` bytes, a hundred to a folder; returns their paths."""
    noise = random.Random(count)
    paths = []
    for number in range(count):
        path = f"part-{number // 100:03d}/text-{number:05d}.txt"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(noise.randbytes(size // 2).hex())
        paths.append(path)
    return paths
