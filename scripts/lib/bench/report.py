"""Results kept as data, and the page they become. A workload measured anew replaces its own results and no others.

`results.json` is what was measured, sample by sample; the page is made of it alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.lib.bench.arithmetic import Target, cost_table, table, target_table
from scripts.lib.bench.measure import Sample

ORDER = ("fetch-large", "fetch-many", "verify-four", "verify-one", "verify-small", "env-create", "env-import")
INTRODUCTION = """\
# Benchmarks

What `stage` costs beside the tools people use today, measured by `scripts/bench`; to repeat it:

    scripts/bench stage                  # all of it: about 12 minutes, 16 GB of disk, two cores
    scripts/bench stage fetch            # one part
    scripts/bench env                    # environments: made by each route, imported from slow folders; 6 GB of disk
    scripts/bench stage --record         # and write this page

How it measures. Candidates take turns, and each round begins with another one. Every number is a median over the
rounds; the last column is the median of the *ratios within each round*, since a machine is never equally fast twice.
Before a candidate that writes, its folder is emptied and the disk is synced, outside the time. CPU seconds are the
kernel's account of the process and its descendants. Memory is the proportional set size (PSS) added up over the
process tree, looked at every 20 ms. The Hub is our own, on loopback, on the same cores as its clients, and sends with
sendfile. Every sample lies in [benchmarks/results.json](benchmarks/results.json).
"""


@dataclass(frozen=True)
class Result:
    """What one workload gave. `machine` and `versions` are what it was measured on and with; `load`: before, after."""

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

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Result:
        """What `asdict` made of one."""
        rounds = [{name: Sample(**sample) for name, sample in samples.items()} for samples in document["rounds"]]
        targets = [Target(**target) for target in document["targets"]]
        before, after = document["load"]
        return Result(**{**document, "rounds": rounds, "targets": targets, "load": (before, after)})


def read_results(path: Path) -> dict[str, Result]:
    """What was measured before, by name; nothing if nothing was."""
    if not path.is_file():
        return {}
    return {name: Result.from_json(document) for name, document in json.loads(path.read_text()).items()}


def write_results(path: Path, results: Mapping[str, Result]) -> None:
    """Everything, sample by sample."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {name: asdict(results[name]) for name in sorted(results)}
    path.write_text(json.dumps(document, indent=1) + "\n")


def page(results: Mapping[str, Result]) -> str:
    """`docs/benchmarks.md`."""
    sections = [section(results[name]) for name in ORDER if name in results]
    return "\n".join([INTRODUCTION, *sections])


def section(result: Result) -> str:
    """One workload: targets, costs, what it was measured on and with."""
    rounds = len(result.rounds)
    parts = [
        f"## {result.title}\n",
        f"{result.note}\n",
        *([target_table(result.targets)] if result.targets else []),
        cost_table(result.rounds, result.base, result.size),
        f"![{result.title}](benchmarks/{result.name}.svg)\n",
        *(f"Left out: {reason}.\n" for reason in result.skipped),
        f"{rounds} round{'' if rounds == 1 else 's'}. {_sentence(result.machine)} Load before and after: "
        f"{result.load[0]:.1f}, {result.load[1]:.1f} (where that is above the number of cores, others were at work "
        "too).\n",
        f"Versions: {', '.join(f'{tool} {version}' for tool, version in result.versions.items())}.\n",
        "<details><summary>Commands</summary>\n",
        table(
            ["candidate", "command"],
            [[name, f"`{command}`"] for name, command in result.commands.items()],
            numbers=False,
        ),
        "</details>\n",
    ]
    return "\n".join(parts)


def _sentence(machine: Mapping[str, str]) -> str:
    return ". ".join(f"{name.capitalize()}: {value}" for name, value in machine.items()) + "."
