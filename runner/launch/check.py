"""`runner check`: everything that would end a run, found before its job waits in the queue."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.disks import read_mounts
from runner.errors import join_errors
from runner.installed import note_for_job
from runner.launch.submit import (
    check as check_request,
)
from runner.launch.submit import (
    device_of_job,
    node_shapes,
    notes_of_job,
    ranks_on_node,
    request,
)
from runner.launch.train import Run
from runner.preflight.findings import FAULTS, Finding, Findings, finding_of
from runner.preflight.places import check_own_name, check_places, hosts_file

FORMAT = 1  # of the JSON document


def examine(run: Run, processes: int | None, environ: Mapping[str, str]) -> Findings:
    """Finds everything about a run and its job, without submitting it.

    Args:
        processes: the number of ranks to check for; None: as `slurm:` asks for.
    """
    config = run.config
    ranks = processes or config.slurm.nodes * ranks_on_node(config.slurm)
    early = Findings()
    device = early.attempt(device_of_job, config, processes, environ)
    found = run.examine(ranks, device, with_texts=True)
    found.errors[:0] = early.errors
    with found.keeping():
        found.lines += notes_of_job(config, environ)
    found.others += python_of_job(run)
    with found.keeping():
        found.lines.append(
            check_request(request(config, run.bundle, run.folder.root, run.overrides))
        )
    if processes is None:
        found.others += surroundings(run, environ)
    found.lines += run.held(environ)
    return found


def python_of_job(run: Run) -> list[Finding]:
    """Returns what is to be known about the job's Python, if this one cannot train."""
    note = note_for_job(run.config, run.inputs)
    if not note:
        return []
    is_warning = note.startswith("warning: ")
    return [Finding("warning" if is_warning else "note", note.removeprefix("warning: "))]


def surroundings(run: Run, environ: Mapping[str, str]) -> list[Finding]:
    """Finds what this node has and the job's nodes may not have; nothing without a cluster."""
    slurm = run.config.slurm
    if "SLURM_JOB_ID" in environ or not node_shapes(slurm.partition):
        return []
    folders = {"the run folder": run.folder.root, "the bundle": run.inputs.bundle}
    if run.config.environment is None and not slurm.container:
        folders["this command's environment"] = Path(sys.prefix)
    return [
        *check_places(folders, read_mounts()),
        *check_own_name(platform.node(), hosts_file(), slurm.nodes),
    ]


def document(found: Findings, lines: Sequence[str] = (), **facts: Any) -> dict[str, Any]:
    """Returns what was found as `runner check --json` prints it.

    Args:
        lines: facts that were found before.
        facts: more keys, such as the run file's path.
    """
    error = join_errors(found.errors, FAULTS) if found.errors else None
    return {
        "format": FORMAT,
        "passes": error is None,
        "exit_code": error.exit_code if error else 0,
        **facts,
        "findings": [
            finding.to_json() for finding in (*map(finding_of, found.errors), *found.others)
        ],
        "facts": [*lines, *found.lines],
    }
