"""A workload: candidates that do the same work on the same bytes, in turns, round after round.

GNU time measures each run. Files have incompressible bytes, made quickly and equal in each run.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MIB = 2**20
TIMEOUT_S = 900.0
_HEADER = 4096  # bytes of a safetensors file before its tensor: whole blocks of a disk


class BenchError(Exception):
    """The benchmark cannot continue; the message gives the reason."""


@dataclass(frozen=True)
class Candidate:
    """One command.

    Attributes:
        answer: the file in which the command writes {"seconds": ...} of the work that counts, where
            that is not its wall time.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    answer: Path | None = None


@dataclass(frozen=True)
class Workload:
    """A measurement.

    Attributes:
        note: the facts that a reader needs to judge the numbers, the targets among them.
        size: what each candidate handles, in bytes, tokens or steps.
        candidates: the others are compared with the first.
        writes: the folder that candidates write to, emptied before each; None if they only read.
        seeds: file name -> text, written into that folder before each candidate.
        unit, per: the heading of the column of `size` per second, and what it is divided by.
    """

    title: str
    note: str
    size: int
    candidates: Sequence[Candidate]
    writes: Path | None = None
    seeds: Mapping[str, str] = field(default_factory=dict)
    unit: str = "MB/s"
    per: float = 1e6


@dataclass(frozen=True)
class Sample:
    """Wall seconds, CPU seconds of all processes, and KiB of the largest process."""

    seconds: float
    cpu_s: float
    peak: int


def measure(workload: Workload, rounds: int, cwd: Path) -> str:
    """Runs all candidates `rounds` times, each round beginning with another one; the table.

    Raises:
        BenchError: a command failed.
    """
    results: list[dict[str, Sample]] = []
    for number in range(rounds):
        first = number % len(workload.candidates)
        turns = [*workload.candidates[first:], *workload.candidates[:first]]
        results.append({one.name: _sample(one, workload, cwd) for one in turns})
        times = [f"{name} {sample.seconds:.2f}" for name, sample in results[-1].items()]
        print(f"  round {number + 1} of {rounds}, seconds: {', '.join(times)}", flush=True)
    base = workload.candidates[0].name
    lines = [
        f"|  | seconds | least to most | {workload.unit} | CPU seconds | peak MiB "
        f"| time / {base} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in workload.candidates:
        runs = [samples[one.name] for samples in results]
        seconds = [run.seconds for run in runs]
        ratios = [samples[one.name].seconds / samples[base].seconds for samples in results]
        middle = statistics.median(seconds)
        lines.append(
            f"| {one.name} | {middle:.3g} | {min(seconds):.3g} to {max(seconds):.3g} "
            f"| {workload.size / middle / workload.per:,.0f} "
            f"| {statistics.median(run.cpu_s for run in runs):.2f} "
            f"| {max(run.peak for run in runs) / 1024:.0f} | {statistics.median(ratios):.2f} |"
        )
    return "\n".join(lines)


def _sample(candidate: Candidate, workload: Workload, cwd: Path) -> Sample:
    """Runs a candidate in an empty folder, on a disk that has nothing left to write."""
    if workload.writes is not None:
        shutil.rmtree(workload.writes, ignore_errors=True)
        workload.writes.mkdir(parents=True)
        for name, text in workload.seeds.items():
            (workload.writes / name).write_text(text)
        os.sync()
    figures = cwd / "time.txt"
    timed = ("time", "-o", str(figures), "-f", "%e %U %S %M", *candidate.command)
    run(timed, candidate.environment, cwd)
    wall, user, system, peak = figures.read_text().split()
    sample = Sample(float(wall), float(user) + float(system), int(peak))
    if candidate.answer is not None:
        sample = replace(sample, **json.loads(candidate.answer.read_text()))
    return sample


def run(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
    """Runs a command with these variables and few others.

    Raises:
        BenchError: it did not exit with 0; has the last lines it wrote.
    """
    command = ("timeout", "-k", "5", str(TIMEOUT_S), *command)
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**plain_environment(), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        said = "\n  ".join(done.stdout.decode(errors="replace").strip().splitlines()[-8:])
        raise BenchError(f"`{shlex.join(command)}` ended with {done.returncode}:\n  {said}")


def plain_environment() -> dict[str, str]:
    """The variables of this process without those that change what the tools do."""
    return {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}


def tool(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).with_name(name))


def fetched(folder: Path, name: str, source: str) -> Path:
    """A bundle of a folder of files.

    Raises:
        BenchError: it could not be staged.
    """
    bundle, manifest = folder / "bundles" / name, folder / f"{name}.yaml"
    manifest.write_text(f"format: 1\nname: bench\nassets:\n  payload:\n    path: {source}\n")
    fetch = [sys.executable, "-m", "stage", "fetch", "-q", "--no-offline-check"]
    run(
        [*fetch, str(manifest), "-o", str(bundle)],
        {"PYTHONPATH": str(ROOT), "HOME": str(folder)},
        folder,
    )
    return bundle


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
