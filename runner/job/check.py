"""`runner check`: everything that would end a run, found before its job waits in the queue."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.disks import read_mounts
from runner.errors import UsageError, human_count, join_errors
from runner.job.devices import torch_without_gpus
from runner.job.findings import FAULTS, Finding, Findings, finding_of
from runner.job.installed import note_for_job
from runner.job.job import Job
from runner.job.places import check_own_name, check_places, hosts_file
from runner.job.rehearsed import offer, recall
from runner.job.submit import (
    check as check_request,
)
from runner.job.submit import (
    device_of_job,
    node_shapes,
    notes_of_job,
    partition_name,
    ranks_on_node,
    request,
)
from runner.job.surroundings import start
from runner.job.tools import check_tools, find_tools
from runner.processes import usable_cores
from runner.slurm.jobs import inside_job, over_job
from runner.slurm.script import sbatch_script
from runner.slurm.shell_variables import notes

FORMAT = 1  # of the JSON document


def examine(
    run: Job,
    processes: int | None,
    environ: Mapping[str, str],
    *,
    to_submit: bool = False,
    with_shell: bool = True,
) -> Findings:
    """Finds everything about a run and its job, without submitting it.

    Args:
        processes: the number of ranks to check for; None: as `slurm:` asks for.
        to_submit: `submit` lets Slurm look at the script by itself, and offers a rehearsal.
        with_shell: whether the job's shell and its Python are tried, too.
    """
    config = run.config
    early = Findings()
    attempt = early.attempt(start, run, environ) if processes is None and with_shell else None
    ranks = processes or config.slurm.nodes * ranks_on_node(config.slurm)
    device = early.attempt(device_of_job, config, processes, environ)
    found = run.examine(ranks, device, with_texts=True)
    found.errors[:0] = early.errors
    with found.keeping():
        found.lines += notes_of_job(config)
    found.others += python_of_job(run, is_tried=attempt is not None and attempt.is_under_way)
    if processes is not None and processes > (cores := usable_cores()):
        what = f"{processes} ranks share {human_count(cores, 'core')} of this machine"
        found.others.append(Finding("note", f"{what}: --processes {cores} is faster."))
    if processes is None:
        found.others += find_tools(config)
    elif config.environment is None:
        found.attempt(check_tools, config)
    if not to_submit:
        with found.keeping():
            wanted = request(config, run.bundle, run.folder.root, run.overrides)
            line, warning = check_request(wanted)
            found.lines.append(line)
            if warning:
                remedy = "Or choose another slurm.partition."
                found.others.append(Finding("warning", warning, remedy))
    if processes is None:
        found.others += surroundings(run, environ)
        known = known_of_partition(run, environ, offers=to_submit)
        found.others += known.others
        found.lines += known.lines
    if attempt is not None:
        attempt.add_to(found)
    found.lines += [] if to_submit else run.held(environ)
    return found


def python_of_job(run: Job, *, is_tried: bool) -> list[Finding]:
    """Returns what is to be known about the job's Python, if this one cannot train.

    Args:
        is_tried: whether `surroundings.start` tries that Python: then it examines its torch.
    """
    config = run.config
    is_own = config.environment is None and not config.slurm.container
    if is_own and not is_tried and (torch := torch_without_gpus(config.slurm)):
        return [
            Finding(
                "warning",
                f"torch {torch} is installed here, which is for CPUs: in a job with GPUs its ranks "
                "refuse to start.",
                "Install a torch with CUDA in this environment, or stage one for the cluster "
                "(`environment:` and `profile:` in the manifest).",
            )
        ]
    note = note_for_job(config, run.inputs)
    if not note:
        return []
    is_warning = note.startswith("warning: ")
    return [Finding("warning" if is_warning else "note", note.removeprefix("warning: "))]


def surroundings(run: Job, environ: Mapping[str, str]) -> list[Finding]:
    """Finds what this node has and the job's nodes may not have; nothing without a cluster."""
    slurm = run.config.slurm
    if inside_job(environ) or not node_shapes(slurm.partition):
        return []
    folders = {"the run folder": run.folder.root, "the bundle": run.inputs.bundle}
    if run.config.environment is None and not slurm.container:
        folders["this command's environment"] = Path(sys.prefix)
    return [
        *_left_in_shell(run, environ),
        *check_places(folders, read_mounts()),
        *check_own_name(platform.node(), hosts_file(), slurm.nodes),
    ]


def _left_in_shell(run: Job, environ: Mapping[str, str]) -> list[Finding]:
    """Finds variables of this shell that mean something to a job, and were meant for another."""
    found = []
    with suppress(UsageError):  # of the request itself: the others say so
        job = request(run.config, run.bundle, run.folder.root, run.overrides)
        found = [Finding("note", line) for line in notes(sbatch_script(job), environ)]
    if error := over_job(environ):
        found.append(Finding("warning", f"{error.message}.", error.remedy))
    return found


def known_of_partition(run: Job, environ: Mapping[str, str], *, offers: bool = False) -> Findings:
    """Returns what a rehearsal found on the job's partition; nothing without a cluster.

    Args:
        run: the run.
        environ: the environment variables.
        offers: whether a rehearsal is offered where there was none.
    """
    slurm = run.config.slurm
    if inside_job(environ) or not node_shapes(slurm.partition):
        return Findings()
    partition = partition_name(slurm.partition)
    found = recall(partition, environ)
    if offers:
        sets = "".join(f" --set {override}" for override in run.overrides)
        command = f"runner rehearse {run.config.path} --bundle {run.bundle}{sets} --job"
        found.others += offer(partition, environ, command)
    return found


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
        "facts": [*lines, *found.lines, *found.details],
    }
