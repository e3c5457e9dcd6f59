"""Results as data, and the page that is made from them.

`results.json` has each sample; the page is made from it only. A workload that is measured again
replaces its own results and no others.
"""

from __future__ import annotations

import json
import os
import platform
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scripts.lib.bench.arithmetic import Target, cost_table, target_table
from scripts.lib.bench.measure import Sample

_STAGE = ("fetch-large", "fetch-many", "verify-four", "verify-small")
_RUNNER = ("train-fp32", "train-bf16", "train-loop", "prepare")
ORDER = (*_STAGE, "env-create", "env-import", *_RUNNER)
INTRODUCTION = """\
# Benchmarks

`stage` and `runner` beside other tools, measured by `scripts/bench`. To repeat it:

    scripts/bench stage                  # all parts: about 12 minutes, 16 GB of disk, two cores
    scripts/bench stage fetch            # one part
    scripts/bench env                    # environments, and slow folders; 6 GB of disk
    scripts/bench runner                 # training and preparing on CPUs: about 15 minutes
    scripts/bench stage --record         # and write this page

How it measures. Candidates take turns, and each round begins with another one. Each number is a
median over the rounds; the last column is the median of the *ratios within each round*, because the
speed of a machine varies. Before a candidate that writes, its folder is emptied and the disk is
synced, outside the time. CPU seconds are those of the process and its descendants. Memory is the
proportional set size (PSS) of the process tree. The Hub is on loopback, on the same cores as its
clients. All samples, and the version and command of each candidate, are in
[benchmarks/results.json](benchmarks/results.json). A load above the number of cores means that
other processes ran too.
"""


@dataclass(frozen=True)
class Result:
    """The result of one workload. `load` is the load average before and after it."""

    name: str
    title: str
    note: str
    size: int
    base: str
    rounds: Sequence[Mapping[str, Sample]]
    targets: Sequence[Target]
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    commands: Mapping[str, str]
    load: tuple[float, float]
    skipped: Sequence[str]
    unit: str = "MB/s"
    per: float = 1e6

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Result:
        """The inverse of `asdict`."""
        rounds = [
            {name: Sample(**sample) for name, sample in samples.items()}
            for samples in document["rounds"]
        ]
        targets = [Target(**target) for target in document["targets"]]
        before, after = document["load"]
        return Result(**{**document, "rounds": rounds, "targets": targets, "load": (before, after)})


def read_results(path: Path) -> dict[str, Result]:
    """Earlier results, by name; empty without a file."""
    documents = json.loads(path.read_text()) if path.is_file() else {}
    return {name: Result.from_json(document) for name, document in documents.items()}


def write_results(path: Path, results: Mapping[str, Result]) -> None:
    """Writes all samples as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {name: asdict(results[name]) for name in sorted(results)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def page(results: Mapping[str, Result]) -> str:
    """`docs/benchmarks.md`."""
    sections = [section(results[name]) for name in ORDER if name in results]
    return "\n".join([INTRODUCTION, *sections])


def section(result: Result) -> str:
    """One workload: targets, costs, date and machine."""
    rounds, (before, after) = len(result.rounds), result.load
    parts = [
        f"## {result.title}\n",
        f"{result.note}\n",
        *([target_table(result.targets)] if result.targets else []),
        cost_table(result.rounds, result.base, result.size, result.unit, result.per),
        f"![{result.title}](benchmarks/{result.name}.svg)\n",
        *(f"Left out: {reason}.\n" for reason in result.skipped),
        f"{rounds} round{'' if rounds == 1 else 's'}. {_sentence(result.machine)} "
        f"Load before and after: {before:.1f}, {after:.1f}.\n",
    ]
    return "\n".join(parts)


def _sentence(machine: Mapping[str, str]) -> str:
    return ". ".join(f"{name.capitalize()}: {value}" for name, value in machine.items()) + "."


def describe_machine(folder: Path) -> dict[str, str]:
    """The facts that a reader needs to judge the numbers.

    Args:
        folder: the folder of the measured files.
    """
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    cores, model = len(os.sched_getaffinity(0)), cpu[1] if cpu else platform.machine()
    openssl = ssl.OPENSSL_VERSION.rpartition(" ")[0].rsplit(" ", 2)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": f"{cores} cores, {model}",
        "memory": f"{memory:.0f} GiB",
        "file system": _file_system(folder),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": f"{platform.python_version()}, {openssl}",
    }


def load() -> float:
    """The load average of the last minute, with the processes of this benchmark."""
    return os.getloadavg()[0]


def _file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    path = folder.resolve()
    below = [(point, kind) for point, kind in mounts if path.is_relative_to(point)]
    return max(below, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]
