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
from typing import Any

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

    def to_json(self) -> dict[str, Any]:
        """As it is on the disk."""
        return {"format": FORMAT, "passes": self.passes, **asdict(self)}


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
    write_atomically(path, (json.dumps(found.to_json(), indent=1) + "\n").encode())
    return path


def read(partition: str, environ: Mapping[str, str]) -> Rehearsed | None:
    """Reads the result of the last rehearsal; None: there is none that this version reads."""
    try:
        document = json.loads(path_of(partition, environ).read_bytes())
        if document.pop("format") != FORMAT:
            return None
        document.pop("passes")
        findings = tuple(Finding(**entry) for entry in document.pop("findings"))
        return Rehearsed(**document, findings=findings)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def recall(partition: str, environ: Mapping[str, str]) -> Findings:
    """Returns what is known of a partition, as facts and warnings of a check.

    Args:
        partition: its name.
        environ: the environment variables.
    """
    found, known = Findings(), read(partition, environ)
    if known is None:
        return found
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(known.time))
    if known.passes:
        last = "".join(f"; {line}" for line in known.lines[-1:])
        nodes = ", ".join(known.nodes)
        found.lines.append(f"rehearsed on partition {partition} at {date}: {nodes}{last}")
    again = "When that is corrected: runner rehearse RUN --bundle B --job"
    for one in known.findings:
        found.others.append(
            Finding(
                "warning" if one.level == "error" else one.level,
                f"partition {partition}, rehearsed at {date}: {one.message}",
                f"{one.remedy} {again}".strip() if one.level == "error" else one.remedy,
            )
        )
    return found


def offer(partition: str, environ: Mapping[str, str], command: str) -> list[Finding]:
    """Offers a rehearsal where a partition was never tried.

    Args:
        partition: its name.
        environ: the environment variables.
        command: what rehearses this run.
    """
    if read(partition, environ) is not None:
        return []
    return [
        Finding(
            "note",
            f"no job was rehearsed on partition {partition} yet; five minutes on its nodes show "
            "what this node cannot: the network, the disks, the GPUs.",
            command,
        )
    ]
