"""Submits the rehearsal of a partition, waits for it, and prints what its nodes found."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner import kept
from runner.errors import StageError, UsageError, human_count
from runner.job.findings import Finding, fact_line, raise_errors
from runner.job.submit import try_script
from runner.job.training_run import TrainingRun
from runner.run_folder.heartbeat import read_failures
from runner.run_folder.layout import RunFolder
from runner.slurm.environment import SlurmJobEnvironment, host_names, overriding
from runner.slurm.jobs import ask, clean, details, job_number
from runner.slurm.script import sbatch_script
from runner.trials.node_part import BANDWIDTH, FOLDER, RECORD, launch
from runner.trials.rehearse import Say, Stages, hidden_folder

TIME = "00:05:00"
LAST_LINES = 5


def rehearse_in_job(run: TrainingRun, environ: Mapping[str, str], stages: Stages) -> None:
    """Tries the nodes that the run asks for, in a job, or in the allocation around this process.

    Args:
        run: the user's.
        environ: the environment variables.
        stages: where the job and each node are noted.

    Raises:
        StageError: something would end a run there.
        UsageError: Slurm refuses the job, or there is no Slurm.
    """
    job = SlurmJobEnvironment.from_environ(environ)
    with hidden_folder(run.folder.root) as folder:
        hidden = replace(run, folder=RunFolder(folder))
        if job is not None:
            number, hosts = job.job_id, host_names(job.nodes)
            code, why = launch(hidden, environ), ""
        else:
            number, code = _submit(hidden, stages)
            hosts, why = _nodes_of(number)
        stages.end("job", f"{number} on {', '.join(hosts) or 'no node'}")
        found = _collect(folder, hosts)
        if found is None:
            raise _no_record(run, folder, number, code, why)
    for finding in sorted(found, key=lambda finding: not finding.is_line):
        stages.say(f"  {finding}" if finding.is_line else str(finding))
    raise_errors(found)


def _submit(run: TrainingRun, stages: Stages) -> tuple[int, int]:
    """Submits the job and waits for its end; returns its number and exit code.

    Raises:
        UsageError: `slurm.srun`: no Python of ours runs in the job outside of its ranks.
    """
    if run.config.slurm.srun:
        raise UsageError(
            f"{run.config.place('slurm.srun')}: with slurm.srun a rehearsal submits no job.",
            "In an allocation, start it by one srun with these words.",
        )
    wanted = run.request
    train = wanted.command.index("train")
    wanted = replace(
        wanted,
        name=f"{run.config.name}-rehearsal",
        command=(*wanted.command[:train], "rehearse", "--job", *wanted.command[train + 1 :]),
        time=TIME,
        setup=(*wanted.setup, f"export {FOLDER}={shlex.quote(str(run.folder.root))}"),
    )
    wanted.log.parent.mkdir(parents=True)
    wanted.script.write_text(sbatch_script(wanted), encoding="utf-8")
    try_script(wanted.script)
    return _wait_for_job(wanted.script, human_count(wanted.nodes, "node"), stages.say)


def _wait_for_job(script: Path, nodes: str, say: Say) -> tuple[int, int]:
    """Submits a job and waits for its end; Ctrl-C removes it from the queue.

    Args:
        script: on the disk.
        nodes: how many it asks for, in words.
        say: prints a line.

    Returns:
        Its number, and its exit code.

    Raises:
        UsageError: Slurm refuses it.
    """
    dropped = overriding(script.read_text(encoding="utf-8"), os.environ)
    with subprocess.Popen(
        ["sbatch", "--wait", "--parsable", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in clean(os.environ).items() if name not in dropped},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        number = next(filter(None, map(job_number, process.stdout)), "")
        if not number:
            raise UsageError(
                f"Slurm refuses the job: {process.stderr.read().strip()}",
                f"Correct `slurm:` in the run file ({script}).",
            )
        say(f"waiting for job {number}: {nodes}, five minutes at most; Ctrl-C cancels it")
        try:
            return int(number), process.wait()
        except BaseException:  # Ctrl-C, or a signal that ends this process
            ask("scancel", number)
            raise


def _nodes_of(number: int) -> tuple[list[str], str]:
    """The nodes of a job that has ended, and Slurm's reason for its end."""
    fields = details(str(number))
    nodes = fields.get("NodeList", "")
    state, reason = fields.get("JobState", ""), fields.get("Reason", "None")
    why = f"{state}{f', {reason}' if reason != 'None' else ''}"
    return host_names(nodes) if nodes and nodes != "(null)" else [], why


def _collect(folder: Path, hosts: Sequence[str]) -> list[Finding] | None:
    """Reads what the nodes wrote; None: nothing."""
    records = [json.loads(path.read_bytes()) for path in sorted(folder.glob(f"*.{RECORD}"))]
    if not records:
        return None
    findings = []
    for record in records:
        findings += [_of_node(record["host"], entry) for entry in record["findings"]]
    seen = [record["host"] for record in records]
    findings += [
        Finding(
            "error",
            f"{host} left no record: it does not see {folder.parent}, or its part was ended.",
            "Choose an --output on a disk that all nodes share.",
            1,
        )
        for host in hosts
        if host not in seen
    ]
    if measured := kept.read(folder / BANDWIDTH):
        findings.append(fact_line(_describe(measured)))
    else:
        findings += _why_no_bandwidth(folder, findings)
    return findings


def _of_node(host: str, entry: Mapping[str, Any]) -> Finding:
    found = Finding(**entry)
    if found.message.startswith(host) and not found.is_line:  # the message names the node already
        return found
    return replace(found, message=f"{host}: {found.message}")


def _describe(measured: Mapping[str, Any]) -> str:
    return (
        f"all-reduce of {measured['bytes'] / 1e6:.0f} MB over {measured['ranks']} ranks "
        f"({measured['backend']}): {measured['GB/s']:.2f} GB/s"
    )


def _why_no_bandwidth(folder: Path, known: Sequence[Finding]) -> list[Finding]:
    """What ended the all-reduce; nothing where a finding says already why it was not tried."""
    if any(finding.level == "error" for finding in known):
        return []
    failures = read_failures(folder / "logs")
    if not failures:
        return [Finding("error", "the ranks did not end their all-reduce in five minutes.", "", 1)]
    first = failures[0]
    text, remedy = first.message_and_remedy()
    return [Finding("error", f"{first.host}: {text.splitlines()[-1]}", remedy, first.code)]


def _no_record(run: TrainingRun, folder: Path, number: int, code: int, why: str) -> StageError:
    """The error of a job whose nodes wrote nothing: they do not see the folder, or the command."""
    log = folder / "logs" / f"slurm-{number}.out"
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return UsageError(
            f"job {number} ended with {code} ({why}) and wrote nothing here, not even its log: its "
            f"nodes do not see {run.folder.root.parent}.",
            "Choose an --output on a disk that the nodes share: `df -T` shows which disk it is on.",
        )
    said = " | ".join(lines[-LAST_LINES:])
    return StageError(
        f"job {number} ended with {code} ({why}) before a node looked around: {said}",
        "Correct slurm.modules and slurm.setup in the run file; `runner check` tries them here.",
        exit_code=1,
    )
