"""What `runner rehearse --job` found on a partition, kept for `check` and `submit`.

One JSON file for each partition, in the user's state folder.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner import kept
from runner.errors import write_atomically
from runner.inputs import state_folder
from runner.job.findings import Finding, Findings

FORMAT = 1


@dataclass(frozen=True)
class Rehearsed:
    """One rehearsal of a partition.

    Attributes:
        time: seconds since 1970.
        nodes: the names of the nodes that were tried.
        lines: what they are and can do; the last is on all of them together.
        findings: what would end a run there, or may.
    """

    partition: str
    time: float
    job: int
    nodes: Sequence[str]
    lines: Sequence[str]
    findings: Sequence[Finding]

    @property
    def passes(self) -> bool:
        """Whether nothing was found that would end a run."""
        return not any(finding.level == "error" for finding in self.findings)


def path_of(partition: str, environ: Mapping[str, str]) -> Path:
    """The file of a partition."""
    name = re.sub(r"[^\w.+-]", "_", partition)
    return state_folder(environ) / "rehearsals" / f"{name}.json"


def keep(found: Rehearsed, environ: Mapping[str, str]) -> Path:
    """Writes the result of a rehearsal; it replaces the one before.

    Raises:
        OSError: the state folder cannot be written.
    """
    path = path_of(found.partition, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"format": FORMAT, "passes": found.passes, **asdict(found)}
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())
    return path


def recall(partition: str, environ: Mapping[str, str], command: str = "") -> Findings:
    """Returns what is known of a partition, as facts and warnings of a check.

    Args:
        partition: its name.
        environ: the environment variables.
        command: what rehearses this run, to offer it where there was no rehearsal; empty: it is
            not offered.
    """
    found, known = Findings(), kept.read(path_of(partition, environ))
    if not isinstance(known, dict) or known.get("format") != FORMAT:
        if command:
            found.note(
                f"no job was rehearsed on partition {partition} yet; five minutes on its nodes "
                "show what this node cannot: the network, the disks, the GPUs.",
                command,
            )
        return found
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(known["time"]))
    if known["passes"]:
        last = "".join(f"; {line}" for line in known["lines"][-1:])
        nodes = ", ".join(known["nodes"])
        found.lines.append(f"rehearsed on partition {partition} at {date}: {nodes}{last}")
    again = "When that is corrected: runner rehearse RUN --bundle B --job"
    for one in (Finding(**entry) for entry in known["findings"]):
        message = f"partition {partition}, rehearsed at {date}: {one.message}"
        if one.level == "error":
            found.warn(message, f"{one.remedy} {again}".strip())
        else:
            found.others.append(Finding(one.level, message, one.remedy))
    return found
