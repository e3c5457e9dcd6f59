"""Slurm's jobs: read with squeue while they are in the queue, with sacct after it.

Slurm's texts -> `Job`, with explanations of pending reasons and of ends. A machine without Slurm,
or a Slurm without accounting, is no error.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.from_stage import IncompleteError, UsageError


def ask(
    *command: str, timeout_s: float = 120, without: Collection[str] = ()
) -> subprocess.CompletedProcess[str] | None:
    """Runs one of Slurm's commands and returns its output; None if it is not installed.

    Args:
        timeout_s: seconds that it may take.
        without: variables that it does not get.

    Raises:
        IncompleteError: it does not answer within `timeout_s` seconds.
    """
    try:
        return subprocess.run(
            list(command),
            env={n: v for n, v in clean(os.environ).items() if n not in without},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise IncompleteError(
            f"{command[0]} did not answer in {timeout_s:.0f} seconds", "Try again later."
        ) from None


def job_number(output: str) -> str:
    """The number that `sbatch --parsable` printed; a site's own sbatch may print a greeting before.

    Empty: there is none.
    """
    numbers = re.findall(r"^(\d+)(?:;\S+)?$", output, re.MULTILINE)
    return numbers[-1] if numbers else ""


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Removes the variables of the job around us: sbatch would pass them to the new job."""
    keep = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("SLURM_") or name in keep
    }


REASONS = {
    "Priority": "other jobs have a higher priority",
    "Resources": "it is next; the nodes it needs are busy",
    "None": "Slurm has not looked at it yet",
    "Dependency": "it waits for another job (--dependency)",
    "DependencyNeverSatisfied": "the job it waits for failed: it will never start; scancel it",
    "BeginTime": "its start was put off (--begin, or after a requeue)",
    "JobHeldUser": "you hold it; `scontrol release JOBID` releases it",
    "JobHeldAdmin": "an administrator holds it; ask them",
    "PartitionTimeLimit": (
        "its time limit is above the partition's: it will never start; lower slurm.time"
    ),
    "PartitionNodeLimit": (
        "it wants more nodes than the partition gives: it will never start; lower slurm.nodes"
    ),
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is closed",
    "ReqNodeNotAvail": (
        "nodes it needs are down, drained or reserved (maintenance?); `sinfo -R` says why"
    ),
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for a licence",
    "AssocGrpCpuLimit": "your group uses all CPUs it may use at once",
    "AssocGrpGRES": "your group uses all GPUs it may use at once",
    "AssocGrpNodeLimit": "your group uses all nodes it may use at once",
    "AssocMaxJobsLimit": "you run as many jobs as you may at once",
    "AssocGrpCPUMinutesLimit": "your group has used up its CPU hours",
    "AssocGrpBillingMinutes": "your group has used up its budget",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as this QOS allows at once",
    "QOSMaxGRESPerUser": "you use as many GPUs as this QOS allows at once",
    "QOSMaxCpuPerUserLimit": "you use as many CPUs as this QOS allows at once",
    "QOSGrpGRES": "all GPUs of this QOS are in use",
    "InvalidAccount": "its account is not valid: it will never start; set slurm.options.account",
    "InvalidQOS": "its QOS is not valid: it will never start; set slurm.options.qos",
    "BadConstraints": "no node has what it asks for: it will never start; see slurm.options",
    "launch failed requeued held": (
        "it could not be started on a node and is held; `scontrol release JOBID`"
    ),
    "JobLaunchFailure": "it could not be started on a node",
}
"""Slurm's reasons for a pending job (squeue(1), JOB REASON CODES) -> an explanation."""

ENDS = {
    "COMPLETED": "",
    "FAILED": "",
    "TIMEOUT": "its time limit was reached before the ranks had saved",
    "CANCELLED": "",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it needed more memory than it asked for (slurm.options: mem)",
    "PREEMPTED": "another job took its place",
    "BOOT_FAIL": "a node did not start",
    "DEADLINE": "its deadline passed",
}
"""Slurm's states of an ended job (squeue(1), JOB STATE CODES) -> an explanation, if needed."""


NO_LOG = "0:53"
"""The exit code of a job whose log slurmd could not open: it raised the real-time signal 53."""

_LAUNCH_FAILURES = {
    "JobLaunchFailure": "it could not be started on a node (JobLaunchFailure)",
    "BadConstraints": "no node has what it asks for (BadConstraints)",
}
"""Slurm's reasons for a job that ended before its script began -> an explanation."""


_NO_ACCOUNTS = ("storage is disabled", "invalid field")
"""Parts of sacct's messages where it has nothing to say of a job's script."""

_CLOCKS_DIFFER_S = 60.0  # that of this machine and that of the accounting


@dataclass(frozen=True)
class Job:
    """A job as Slurm reports it. Times are Slurm's texts; empty if it reports none.

    Attributes:
        tasks: of a job array, those that this is, as Slurm writes them: `0-2,5`.
    """

    id: int
    state: str
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    left: str = ""
    starts: str = ""
    script: str = ""
    exit_code: str = ""
    tasks: str = ""

    @property
    def is_over(self) -> bool:
        """Whether it has left the queue."""
        return self.state in ENDS

    def describe(self) -> str:
        """One line for people."""
        if self.is_over:
            ran = f" (ran {self.elapsed})" if self.elapsed else ""
            why = self._why_not_started() or ENDS[self.state]
            return f"job {self.id}: {self.state.lower()}{f', {why}' if why else ''}{ran}"
        if self.state == "PENDING":
            known = REASONS.get(self.reason, REASONS.get(self.reason.split(",")[0], ""))
            why = f"Slurm says {self.reason or 'no reason'}"
            if known:
                why = f"{known} ({self.reason})"
            expected = f"; expected start {self.starts}" if self.starts not in ("", "N/A") else ""
            return f"job {self.id}: pending: {why}{expected}"
        where = f" on {self.nodes}" if self.nodes else ""
        left = "" if self.state == "COMPLETING" else f", {self.left} left"
        return f"job {self.id}: {self.state.lower()}{where}, for {self.elapsed}{left}"

    def _why_not_started(self) -> str:
        """Why a job ended before its script began; empty: it began, or this is not known."""
        if self.exit_code == NO_LOG:
            return (
                f"on {self.nodes or 'its node'} Slurm could not open its log (exit code {NO_LOG}): "
                "the run folder is not there, or may not be written; take an --output on a disk "
                "that the nodes share"
            )
        return _LAUNCH_FAILURES.get(self.reason.partition(",")[0], "")


def queued(job_id: int | None = None, *, with_ended: bool = False) -> list[Job] | None:
    """This user's jobs in the queue, or the job with this number. None: there is no Slurm.

    Args:
        with_ended: also those that ended some minutes ago.

    Raises:
        IncompleteError: squeue does not answer, which does not say that there is no job.
    """
    which = [f"--jobs={job_id}"] if job_id is not None else ["--me"]
    which += ["--states=all"] if with_ended else []
    # %A, because %i of an array's task is `17_2`.
    lines = _squeue(*which, "--format=%A_%K|%T|%r|%N|%M|%L|%S|%o")
    if lines is None:
        return None
    return [job for line in lines if (job := _queued(line)) is not None]


def ended(job_id: int) -> Job | None:
    """A job that has ended, from the accounting; else what Slurm remembers of it for some minutes.

    None: it knows nothing of it.
    """
    return in_accounts([job_id]).get(job_id) or _remembered(job_id)


def in_accounts(job_ids: Collection[int]) -> dict[int, Job]:
    """Returns the jobs of these that the accounting knows, by id."""
    found, numbers = dict[int, Job](), ",".join(map(str, job_ids))
    asked = ("--jobs", numbers, "--format=JobIDRaw,State,Elapsed,NodeList,ExitCode")
    shown = ask("sacct", "--noheader", "--parsable2", "--allocations", *asked) if numbers else None
    for line in shown.stdout.splitlines() if shown is not None and shown.returncode == 0 else []:
        number, *fields = line.split("|")
        if len(fields) >= 3 and number.isdecimal() and int(number) in job_ids:
            state = (fields[0].split() or ["UNKNOWN"])[0]  # of "CANCELLED by 1000"
            code = "".join(fields[3:4])
            job = Job(int(number), state, nodes=fields[2], elapsed=fields[1], exit_code=code)
            found[job.id] = job
    return found


def submitted_since(since: float, script: Path) -> list[int]:
    """The jobs of a script that were submitted after a time, from the accounting.

    Empty: there is none, or no accounts are kept, or none of scripts (before Slurm 21.08).

    Raises:
        IncompleteError: the accounting does not answer.
    """
    begin = time.strftime("%FT%T", time.localtime(since - _CLOCKS_DIFFER_S))
    asked = (f"--starttime={begin}", "--format=JobID,Submit,SubmitLine")
    shown = ask("sacct", "--noheader", "--parsable2", "--allocations", *asked)
    if shown is None or any(words in shown.stderr.lower() for words in _NO_ACCOUNTS):
        return []
    if shown.returncode != 0:
        raise IncompleteError(f"sacct: {shown.stderr.strip()}", "Try again later.")
    rows = [line.split("|", 2) for line in shown.stdout.splitlines()]
    return [
        int(row[0].partition("_")[0])
        for row in rows
        if len(row) == 3 and row[1] >= begin and row[2].endswith(str(script))
    ]


def _remembered(job_id: int) -> Job | None:
    """A job that has ended, as the controller remembers it; None: it has forgotten it."""
    fields = details(str(job_id))
    job = Job(
        job_id,
        fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        nodes=fields.get("NodeList", "").replace("(null)", ""),
        elapsed=fields.get("RunTime", ""),
        exit_code=fields.get("ExitCode", ""),
    )
    return job if job.is_over else None


def step_name(host: str, pid: int) -> str:
    """The name of the step of a launcher's ranks; with it one can ask whether they still run."""
    return f"runner-{host}-{pid}"


def running_step(job_id: int, name: str) -> str | None:
    """The id of the running step of this name, such as `17.3`; empty: none. None: unknown."""
    shown = _of_job(job_id, "--steps", "--format=%i|%j")
    if shown is None:
        return None
    steps = (line.partition("|") for line in shown)
    return next((number for number, _, called in steps if called == name), "")


def states(job_id: int) -> frozenset[str] | None:
    """The states of a job in the queue; empty: it has ended. None: unknown."""
    shown = _of_job(job_id, "--format=%T")
    return None if shown is None else frozenset(shown) - ENDS.keys()


def is_preempted(job_id: int) -> bool:
    """Whether Slurm has begun to take the nodes of a job, which runs on for its grace time.

    It has sent SIGTERM to the steps of the job, and none to its batch script.
    """
    return details(str(job_id), timeout_s=20).get("PreemptTime", "None") not in (
        "None",
        "Unknown",
        "",
    )


def over_job(environ: Mapping[str, str]) -> UsageError | None:
    """The error of a shell whose job is over, such as one of tmux after salloc; None: it is not.

    Slurm's variables stay there. Only a Slurm that knows the job no more says that it is over.
    """
    number = environ.get("SLURM_JOB_ID", "")
    if not number.isdecimal() or states(int(number)) != frozenset():
        return None
    return UsageError(
        f"SLURM_JOB_ID={number} of this shell is a job that is over",
        "Open a new shell; or, in bash: unset ${!SLURM_@}",
    )


def details(name: str, kind: str = "job", timeout_s: float = 120) -> dict[str, str]:
    """What the controller knows of a job, `17` or `17_2`, by Slurm's names (`Command`, `StdOut`).

    Empty: it has forgotten it (some minutes after its end). Of an array, its first line.

    Args:
        kind: `node`: the same of a node.
        timeout_s: as for `ask`.
    """
    shown = ask("scontrol", "show", kind, name, "--oneliner", timeout_s=timeout_s)
    text = shown.stdout if shown is not None and shown.returncode == 0 else ""
    fields = re.split(r" (?=[A-Z]\w*=)", text.partition("\n")[0].strip())
    return dict(field.partition("=")[::2] for field in fields if field)


def _of_job(job_id: int, *options: str) -> list[str] | None:
    """The lines of squeue for one job; empty if Slurm has forgotten it. None: squeue failed."""
    try:
        return _squeue(f"--jobs={job_id}", *options)
    except IncompleteError:
        return None


def _squeue(*options: str) -> list[str] | None:
    """The lines of squeue; none of a job that Slurm has forgotten. None: there is no Slurm here.

    Raises:
        IncompleteError: it does not answer.
    """
    shown = ask("squeue", "--noheader", *options)
    said = shown.stderr.lower() if shown else ""
    if shown is None or "configuration source" in said:
        return None
    if shown.returncode != 0 and "invalid job id" not in said:
        raise IncompleteError(
            f"squeue does not show the jobs: {shown.stderr.strip() or 'it says nothing'}",
            "Try again; `scontrol ping` shows when Slurm is back.",
        )
    return [line.strip() for line in shown.stdout.splitlines() if line.strip()]


def _queued(line: str) -> Job | None:
    fields = line.split("|", 7)
    number, _, tasks = fields[0].partition("_")
    if len(fields) != 8 or not number.isdigit():
        return None
    _, state, reason, nodes, elapsed, left, starts, script = (field.strip() for field in fields)
    reason = reason.strip("()")
    return Job(int(number), state, reason, nodes, elapsed, left, starts, script, tasks=tasks)
