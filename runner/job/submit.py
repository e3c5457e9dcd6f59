"""`runner submit`: a run file becomes a job.

`JobConfig` -> `request` (asks Slurm for the shape of a node) -> `sbatch_script` -> `submit` (writes
the script to the run folder, tries `--test-only`, submits). Problems that Slurm would report only
in the queue or in a log are found here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from runner.child import runner_command
from runner.config.job_config import JobConfig, SlurmConfig
from runner.errors import OTHER_RUN, say
from runner.from_stage import IncompleteError, UsageError, human_count, write_atomically
from runner.job import devices
from runner.job.findings import Finding, warning
from runner.job.installed import is_light
from runner.job.partition import NodeShape, Partition
from runner.run_folder.layout import RunFolder, write_json
from runner.run_folder.run_lock import age_s, hold_run_folder
from runner.slurm.environment import OF_MEMORY, overriding
from runner.slurm.jobs import Job as SlurmJob
from runner.slurm.jobs import ask, job_number, queued, submitted_since
from runner.slurm.script import (
    Member,
    SbatchRequest,
    save_before_end_s,
    sbatch_script,
    time_limit_s,
)

_CPUS = (
    "See `sinfo -N -o '%n %c'` for the CPUs of the nodes and `scontrol show partition` for a lower "
    "limit (MaxCPUsPerNode), and lower slurm.tasks_per_node or slurm.options cpus-per-task."
)
A_START_S = 120
"""Seconds; less is hardly meant."""
REMEDIES = {
    "invalid partition": "See `sinfo -s` for the partitions, and set slurm.partition.",
    "invalid account": "See `sacctmgr show assoc user=$USER`, and set slurm.options.account.",
    "accounting/qos policy": "`sacctmgr show assoc user=$USER` and `sacctmgr show qos` show your "
    "limits of jobs, nodes, GPUs and time. If `squeue --me` has as many jobs as you may submit, "
    "wait; else lower slurm.nodes, slurm.gpus_per_node or slurm.time, or set slurm.options.account "
    "or qos.",
    "invalid qos": "See `sacctmgr show qos`, and set slurm.options.qos.",
    "gres option unsupported": "Ask with slurm.gpus_per_node alone, which becomes --gres, and "
    "remove gpus, gpus-per-task and gpus-per-socket from slurm.options.",
    "gpu specification": "Set slurm.gpus_per_node (it becomes --gres), or a partition without "
    "GPUs in slurm.partition.",
    "mutually exclusive": "Keep one of mem, mem-per-cpu and mem-per-gpu in slurm.options; if only "
    "one is there, this shell sets another: env | grep -E 'SBATCH_MEM|SLURM_MEM'.",
    "generic resource": "See `sinfo -o '%P %G'` for the GPUs of each partition, and set "
    'slurm.gpus_per_node or slurm.options: {gres: "gpu:TYPE:N"}.',
    "memory": "See `sinfo -N -o '%n %m'` for the memory of the nodes and `scontrol show partition` "
    "for a lower limit (MaxMemPerNode, MaxMemPerCPU), and lower mem in slurm.options.",
    "cpu count": _CPUS,
    "more processors": _CPUS,
    "node configuration is not available": "See `sinfo -N -o '%P %n %c %m %G'`: no node has what "
    "was requested. Lower slurm.gpus_per_node, or slurm.options cpus-per-task or mem.",
    "time limit": "See `sinfo -o '%P %l'` for the limits, and lower slurm.time.",
    "node count": "See `sinfo -s`, and lower slurm.nodes.",
    "no partition specified": "This cluster has no default partition: see `sinfo -s`, and set "
    "slurm.partition.",
    "partition not available": "`sinfo -s` shows which partitions are up; set slurm.partition.",
    "partition configuration not available": "See `scontrol show partition` for its limits of "
    "nodes and time; lower slurm.nodes or slurm.time, or set another slurm.partition.",
    "group not permitted": "See `scontrol show partition` (AllowGroups, AllowAccounts): set "
    "another slurm.partition, or ask the site for access.",
    "feature specification": "See `sinfo -o '%P %f'` for the features of the nodes, and correct "
    "slurm.options.constraint.",
    "reservation": "See `scontrol show reservation`, and correct slurm.options.reservation.",
    "tres": "See `sinfo -o '%P %G'` for the GPUs of each partition, and set slurm.gpus_per_node.",
    "license": "See `scontrol show lic`, and correct slurm.options.licenses.",
    "wckey": "See `sacctmgr show wckey user=$USER`, and correct slurm.options.wckey.",
    "permission denied": "Slurm lets this account submit no such job: see `sacctmgr show assoc "
    "user=$USER`, and set slurm.options.account or slurm.partition.",
    "unrecognized option": "Correct slurm.options; `man sbatch` lists the names.",
    "unspecified error": "A filter of the site refuses the job; its own words come before `Batch "
    "job submission failed`. Correct `slurm:` as they say; where there are none, ask the site "
    "which options it requires (often slurm.options.account, or mem).",
    "invalid node name": "See `sinfo -N`, and correct nodelist or exclude in slurm.options.",
    "dependency": "See `squeue --me`: the job in slurm.options.dependency has ended or never was. "
    "Remove it.",
    "job array specification": "See `scontrol show config | grep MaxArraySize`, and sweep over "
    "fewer values.",
    "authentication": "Slurm's own keys (munge) fail on this machine: try another login node, or "
    "tell the site.",
    "incompatible versions": "This machine has another Slurm than its controller: try another "
    "login node, or tell the site.",
}
"""Parts of sbatch's error messages, in lower case -> the remedy."""

_WAITS = ("down, drained or reserved", "required node not available", "requested nodes are busy")
"""Parts of sbatch's messages, with --test-only, on a job that sbatch without it accepts."""

_NO_ANSWER = (
    "unable to contact",
    "timed out",
    "connection",
    "temporarily una",
    "send failure",
    "receive failure",
    "shutdown failure",
    "unexpected message",
    "broken pipe",
    "no route",
    "in standby",
    "header lengths",
    "insufficient data",
)
"""Parts of sbatch's messages where Slurm's controller may have taken the job all the same."""
_NOT_YOURS = ("i/o error writing script", "zero bytes were transmitted", "job credential")
"""Parts of sbatch's messages on what the site must repair."""

_SETTLED_AFTER_S = 30.0
"""A controller that did not answer sbatch has taken the job, or lost it, after this time."""

_SAME_COMMAND = "Run the same command again: it looks for the job first, and makes no second one."

_ADVICE_ELSEWHERE = (
    "Run it on the cluster's login node; `runner submit --print` shows the script anywhere. From a "
    "laptop: runner submit RUN --to CLUSTER"
)


class NoClusterError(UsageError):
    """sbatch is installed, but this machine belongs to no cluster."""


def request(
    config: JobConfig,
    folder: RunFolder,
    command: Sequence[str],
    partition: Partition,
    sweep: tuple[Member, ...] = (),
    **kind: bool,
) -> SbatchRequest:
    """Decides what a job requests of Slurm. Every path becomes absolute.

    Args:
        command: the words after `runner`, without the run folder.
        sweep: the members of a job array; empty: a single run.
        kind: `of_command` and `resumes` of the request.
    """
    slurm, run_folder = config.slurm, folder.root.absolute()
    if slurm.time is not None:
        time_limit_s(slurm.time, f"{config.place('slurm.time')}: slurm.time")
    ranks = ranks_on_node(slurm)
    cpus, reason = cpus_per_task(partition.nodes, ranks, slurm.gpus_per_node)
    output = [] if sweep else ["--output", str(run_folder)]
    return SbatchRequest(
        name=config.name,
        run_folder=run_folder,
        working_folder=Path.cwd(),
        command=(*_runner(slurm), *command, *output),
        srun=slurm.around_ranks if slurm.srun else (),
        bin_folder=Path(sys.executable).parent,
        nodes=slurm.nodes,
        tasks_per_node=ranks,
        gpus_per_node=slurm.gpus_per_node,
        partition=slurm.partition,
        cpus_per_task=cpus,
        cpus_reason=reason,
        time=slurm.time,
        modules=slurm.modules,
        setup=slurm.setup,
        options=slurm.options,
        members=sweep,
        **kind,
    )


def _runner(slurm: SlurmConfig) -> list[str]:
    """The command of `runner` in the job: this one, unless it cannot train and `setup` has another.

    A light installation submits for an environment that `slurm.setup` activates.
    """
    return ["runner"] if slurm.setup and is_light() else runner_command()


def check_srun(config: JobConfig) -> None:
    """Refuses `slurm.srun` where this Python cannot be that of the ranks, which its path names.

    Raises:
        UsageError: it cannot train.
    """
    if config.slurm.srun and is_light():
        words = " ".join(config.slurm.srun)
        raise UsageError(
            f"{config.place('slurm.srun')}: slurm.srun: the job would start its ranks by the path "
            f"of this command's Python, {sys.executable}, which cannot train.",
            "Let the ranks' own write the script, and submit that: srun --ntasks=1 "
            f"{words} PREFIX/bin/runner submit {config.path} --bundle BUNDLE --print > job.sbatch",
        )


def memory_on_node(
    slurm: SlurmConfig, partition: Partition, environ: Mapping[str, str]
) -> tuple[int, str]:
    """Bytes that the job gets of each node, and why no more; 0: all of them, or not known."""
    theirs = {name.lstrip("-").replace("_", "-"): str(v) for name, v in slurm.options.items()}
    asked = [theirs.get(name) for name in ("mem", "mem-per-cpu", "mem-per-gpu")]
    if not any(asked):
        asked = [environ.get(f"SBATCH_{name}") for name in OF_MEMORY]
    total, per_cpu, per_gpu = asked
    if total:
        return _bytes_of(total), ""
    gpus = devices.gpus_on_node(slurm)
    if gpus is None or not partition.nodes or "SLURM_JOB_ID" in environ:  # salloc --mem
        return 0, ""
    cpus = _cpus_on_node(slurm, theirs, partition)
    if per_cpu or per_gpu:
        return _bytes_of(per_cpu or per_gpu or "") * (cpus if per_cpu else gpus), ""
    memory, why = partition.default_memory(gpus, cpus)
    return memory, f"{why}; slurm.options asks for no mem" if memory else ""


def _cpus_on_node(slurm: SlurmConfig, theirs: Mapping[str, str], partition: Partition) -> int:
    """CPUs that the job gets of each node; 0: not known. `theirs`: options of sbatch."""
    if "exclusive" in theirs or partition.gives_whole_nodes:
        return max(node.cpus for node in partition.nodes)
    if theirs.keys() & {"cpus-per-gpu", "mincpus"}:
        return 0
    ranks = ranks_on_node(slurm)
    share, _ = cpus_per_task(partition.nodes, ranks, slurm.gpus_per_node)
    each = theirs.get("cpus-per-task", str(share))
    return int(each) * ranks if each.isdecimal() else 0


def _bytes_of(text: str) -> int:
    """What Slurm reads in `--mem`: a number of MB, or with a unit; 0: all memory of the node."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text, re.IGNORECASE)
    return int(match[1]) * 1024 ** ("KMGT".index(match[2].upper() or "M") + 1) if match else 0


def ranks_on_node(slurm: SlurmConfig) -> int:
    """Ranks on each node: `slurm.tasks_per_node`, else one for each GPU, else one."""
    if isinstance(slurm.tasks_per_node, int):
        return slurm.tasks_per_node
    return slurm.gpus_per_node or 1


def cpus_per_task(shapes: Sequence[NodeShape], ranks: int, gpus: int) -> tuple[int | None, str]:
    """A rank's share of the CPUs of the smallest node that fits, and a reason for the script.

    Returns:
        The CPUs of one rank, or None if no node fits; the reason.
    """
    fitting = [shape for shape in shapes if shape.gpus >= gpus and shape.cpus >= ranks]
    if not fitting:
        return None, ""
    if gpus:
        # A share in proportion to the GPUs: a job with one GPU of four leaves the CPUs of the
        # other three to other jobs.
        smallest = min(fitting, key=lambda shape: shape.cpus / shape.gpus)
        share = smallest.cpus * gpus // (smallest.gpus * ranks)
        node = f"{human_count(smallest.cpus, 'CPU')} and {human_count(smallest.gpus, 'GPU')}"
        return max(1, share), f"A rank's share: the smallest node has {node}."
    cpus = min(shape.cpus for shape in fitting)
    return cpus // ranks, f"A rank's share: the smallest node has {human_count(cpus, 'CPU')}."


def submit(
    wanted: SbatchRequest, partition: Partition, before: Callable[[], None] = lambda: None
) -> int:
    """Writes the script to the run folder and submits it: exactly one job, whatever fails.

    One process at a time does this for a run folder. What is in the queue is written down before
    sbatch, so that a job whose number never came is found: now, or by the next `submit`.

    Args:
        before: writes what the job reads, when no other job of the run folder is in the queue.

    Returns:
        The job's number.

    Raises:
        UsageError: there is no sbatch, Slurm would refuse the job, a job for this run folder is in
            the queue already, or another process submits one.
        IncompleteError: Slurm does not answer.
    """
    script = sbatch_script(wanted)
    _check_time(wanted, partition)
    folder = RunFolder(wanted.run_folder)
    folder.root.mkdir(parents=True, exist_ok=True)
    try:
        with hold_run_folder(folder, os.environ, to_submit=True):
            return _submit_alone(wanted, script, folder, partition, before)
    finally:
        with suppress(OSError):  # it is not empty
            folder.root.rmdir()


def _submit_alone(
    wanted: SbatchRequest,
    script: str,
    folder: RunFolder,
    partition: Partition,
    before: Callable[[], None],
) -> int:
    try:
        jobs = _jobs_of(wanted.script)
    except IncompleteError:
        _test(script, wanted, partition)  # it may know why
        raise
    if folder.intent.exists() and (job := _find_job(folder, wanted.script)):
        _note_job(folder, job)
        if wanted.script.is_file() and wanted.script.read_text(encoding="utf-8") == script:
            say(f"Slurm took job {job} when its answer to an earlier `runner submit` was lost")
            return job
    if other := next((job for job in jobs if not job.is_over), None):
        raise UsageError(
            f"job {other.id} ({other.state.lower()}) already writes {folder.root}",
            f"Let it finish, or `scancel {other.id}` first; or give the run {OTHER_RUN}.",
        )
    if away := _test(script, wanted, partition):
        say(f"warning: {away}")
    # Slurm does not create the log's folder: without it a job fails without a message.
    wanted.log.parent.mkdir(parents=True, exist_ok=True)
    before()
    write_atomically(wanted.script, script.encode())
    write_json(folder.intent, {"since": time.time(), "known": [job.id for job in jobs]})
    try:
        output = _sbatch("--parsable", str(wanted.script)).stdout
        job = int(job_number(output) or 0)
        if not job:
            raise IncompleteError(f"sbatch printed no job number: {output!r}", _SAME_COMMAND)
    except IncompleteError as error:
        os.utime(folder.intent)
        job = _find_job(folder, wanted.script, error)
        if not job:
            raise
    except UsageError:
        _leave_nothing(wanted, folder)
        raise
    _note_job(folder, job)
    return job


def _note_job(folder: RunFolder, job: int) -> None:
    write_atomically(folder.submitted, f"{job}\n".encode())
    folder.intent.unlink(missing_ok=True)


def _leave_nothing(wanted: SbatchRequest, folder: RunFolder) -> None:
    """Removes what `submit` wrote for a job that Slurm refused."""
    for path in (wanted.script, folder.intent):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # it is not empty
        wanted.log.parent.rmdir()


def _find_job(folder: RunFolder, script: Path, error: IncompleteError | None = None) -> int:
    """The job that an sbatch made, whose answer never came; 0: there is none.

    A controller too busy to answer may take a job later: for a while after the intent, squeue and
    the accounts are asked again.

    Args:
        error: of that sbatch.

    Raises:
        IncompleteError: they do not answer, so that nobody knows.
    """
    intent = json.loads(folder.intent.read_text(encoding="utf-8"))
    while True:
        settled = age_s(folder.intent) >= _SETTLED_AFTER_S
        try:
            found = {job.id for job in _jobs_of(script)} - {*intent["known"]}
            if found := found or {*submitted_since(intent["since"], script)}:
                return min(found)  # of a job array the array's own
            if settled:
                return 0
        except IncompleteError as silent:
            if settled:
                said = f"{error.message}; then {silent.message}" if error else silent.message
                raise IncompleteError(said, _SAME_COMMAND) from None
        time.sleep(1)  # its controller is busy already: no more than one question in a second


def try_script(script: Path) -> None:
    """Lets Slurm check a script that is on the disk.

    Raises:
        NoClusterError: this machine belongs to no cluster.
        UsageError: Slurm would refuse the job.
        IncompleteError: Slurm's controller does not answer.
    """
    _sbatch("--test-only", str(script))


class SlurmAnswer(NamedTuple):
    """What Slurm says of a job that it is not given.

    Attributes:
        line: what to print.
        warning: about nodes that are away: sbatch takes the job, and it waits for them; else empty.
        has_cluster: False: this machine belongs to no cluster.
    """

    line: str
    warning: str = ""
    has_cluster: bool = True


def ask_slurm(wanted: SbatchRequest, partition: Partition) -> SlurmAnswer:
    """Lets Slurm check the job without submitting it.

    Raises:
        UsageError: Slurm would refuse it, or its time is more than the partition allows.
        IncompleteError: Slurm does not answer.
    """
    text = sbatch_script(wanted)  # finds a time or an option that no Slurm would read
    minutes = ""
    if short := re.fullmatch(r"(\d+)(?::(\d+))?", wanted.time or ""):  # 8:00: hours, to them?
        more = f" and {human_count(int(short[2]), 'second')}" if int(short[2] or 0) else ""
        minutes = f" ({human_count(int(short[1]), 'minute')}{more})"
    if shutil.which("sbatch") is None:
        return SlurmAnswer(f"Slurm request{minutes}: not checked, there is no sbatch here")
    _check_time(wanted, partition)
    try:
        away = _test(text, wanted, partition)
    except NoClusterError as error:
        return SlurmAnswer(f"Slurm request: not checked: {error.message}", has_cluster=False)
    each = "task" if wanted.of_command else "rank"
    shape = f"{human_count(wanted.nodes, 'node')} x {human_count(wanted.tasks_per_node, each)}"
    accepts = "accepted, to wait" if away else "sbatch --test-only accepts it"
    return SlurmAnswer(f"Slurm request: {shape}{minutes}: {accepts}", away)


def find_short_time(config: JobConfig, wanted: SbatchRequest) -> Iterator[Finding]:
    """Warns of a time limit in which a start alone may not end."""
    limit = time_limit_s(wanted.time) if wanted.time else None
    if limit is not None and limit < A_START_S:
        yield warning(
            f"{config.place('slurm.time')}: slurm.time {wanted.time}: to import torch and load "
            "the weights can take a minute or more on a cluster's disk. The ranks are told to save "
            f"{save_before_end_s(wanted.time)} s before the limit; a job that has no first step "
            "by then goes back to the queue and begins again.",
            'Set slurm.time: "00:10:00", or more.',
        )


def _test(text: str, wanted: SbatchRequest, partition: Partition) -> str:
    """Lets Slurm check a script. Leaves nothing on the disk.

    Returns:
        A warning about nodes that are down or drained: sbatch itself accepts such a job, which then
        waits for them. Empty: there is none.

    Raises:
        UsageError: Slurm would refuse the job.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, wanted.script.name)
            script.write_text(text, encoding="utf-8")
            try_script(script)
    except UsageError as error:
        if any(words in error.message.lower() for words in _WAITS):
            return (
                f"{error.message.partition(': ')[2]}. sbatch accepts the job, and it waits until "
                "they are back: `sinfo -R` says since when and why"
            )
        have = len(partition.nodes)
        if 0 < have < wanted.nodes:
            where = f"partition {wanted.partition}" if wanted.partition else "the partition"
            raise UsageError(
                error.message,
                f"Lower slurm.nodes: it is {wanted.nodes}, and {where} has "
                f"{human_count(have, 'node')}.",
            ) from None
        raise
    return ""


def _check_time(wanted: SbatchRequest, partition: Partition) -> None:
    """Checks the time limit against the partition's.

    `--test-only` does not, and the job would stay in the queue forever.
    """
    if not wanted.time or not partition.time_limit:
        return
    asked, allowed = time_limit_s(wanted.time), time_limit_s(partition.time_limit)
    if allowed is not None and (asked is None or asked > allowed):
        raise UsageError(
            f"slurm.time: {wanted.time} is more than partition {partition.name} allows, "
            f"{partition.time_limit}",
            "Lower it: the job saves, is requeued and resumes as often as it takes.",
        )


def _jobs_of(script: Path) -> list[SlurmJob]:
    """The jobs of a run folder, also those that ended some minutes ago.

    Raises:
        IncompleteError: squeue does not answer.
    """
    jobs = queued(with_ended=True)
    if jobs is None:
        raise IncompleteError("there is no squeue on this machine", _ADVICE_ELSEWHERE)
    return [job for job in jobs if job.script == str(script)]


def _sbatch(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(arguments[-1])
    text = script.read_text(encoding="utf-8") if script.is_file() else ""
    done = ask("sbatch", *arguments, without=overriding(text, os.environ))
    if done is None:
        raise UsageError("there is no sbatch on this machine", _ADVICE_ELSEWHERE)
    if done.returncode == 0:
        return done
    lines = [line.partition("error: ")[2] or line for line in done.stderr.splitlines()]
    message = " ".join(lines).strip()
    lowered = message.lower()
    if not message or any(text in lowered for text in _NO_ANSWER):
        raise IncompleteError(
            f"Slurm does not answer: {message or f'sbatch ended with {done.returncode}'}",
            "Try again: no second job is made. `scontrol ping` shows when Slurm is back.",
        )
    if any(text in lowered for text in _NOT_YOURS):
        raise IncompleteError(
            f"Slurm itself cannot take the job: {message}",
            "No setting of yours helps: often the disk of Slurm's controller is full (not yours, "
            "whatever df shows here). Tell the site; then run the same command again.",
        )
    if "configuration source" in lowered:
        raise NoClusterError(
            "sbatch is here, but this machine belongs to no Slurm cluster", _ADVICE_ELSEWHERE
        )
    remedy = next((advice for text, advice in REMEDIES.items() if text in lowered), "")
    if "sinfo -s" in remedy and (shown := ask("sinfo", "--noheader", "--format=%R")):
        names = [*dict.fromkeys(shown.stdout.split())][:20]
        remedy += f" There are: {', '.join(names)}." if names else ""
    raise UsageError(
        f"Slurm refuses the job: {message}",
        remedy or "Correct `slurm:` in the run file; `runner submit --print` shows the script.",
    )
