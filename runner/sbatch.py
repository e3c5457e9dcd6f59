"""A request for a job, turned into the text of an sbatch script. Pure; golden files hold the result.

`SbatchRequest` (already absolute, already decided) -> `sbatch_script` -> text. Whoever reads the script learns from
its comments why each line that nobody asked for is there. `runner.submit` fills in the request and submits.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner.devices import GPU_OPTIONS
from runner.errors import UsageError
from runner.sweep import Member

SAVE_BEFORE_END_S = 300
"""How long before the time limit the ranks are told to save."""

OWN_KEYS = {
    "partition": "partition",
    "nodes": "nodes",
    "ntasks-per-node": "tasks_per_node",
    "time": "time",
}
"""Options of sbatch that have a key of their own in the run file, so `options` may not contradict it."""


_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?)"
    r"|(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+))|(?P<only_minutes>\d+)"
)


@dataclass(frozen=True, kw_only=True)
class SbatchRequest:
    """What a job needs. Paths are absolute.

    Attributes:
        command: what the batch script becomes, argv.
        bin_folder: goes first on PATH: the submitting environment's programs.
        cpus_per_task: None leaves it to the site; `cpus_reason` says why it is what it is.
        options: further sbatch options, long names without dashes; True is a flag, False takes one of ours away.
        members: of a sweep: the job becomes an array of them, each with a run folder inside `run_folder`. The command
            is then without `--output`.
    """

    name: str
    run_folder: Path
    working_folder: Path
    command: tuple[str, ...]
    bin_folder: Path
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    partition: str | None = None
    cpus_per_task: int | None = None
    cpus_reason: str = ""
    time: str | None = None
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    members: tuple[Member, ...] = ()

    @property
    def script(self) -> Path:
        """Where the script is kept: one for each run folder."""
        return self.run_folder / "submit.sbatch"

    @property
    def log(self) -> Path:
        """The job's log, with Slurm's `%j` for the job's number (`%A_%a` in an array: job and member)."""
        return self.run_folder / "logs" / ("slurm-%A_%a.out" if self.members else "slurm-%j.out")


def time_limit_s(text: str) -> int | None:
    """Slurm's time notation in seconds; None for no limit.

    Raises:
        UsageError: `sbatch --test-only` does not look at it, so it is refused here.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(text)
    if not match:
        raise UsageError(
            f"slurm.time: {text!r} is not a time limit",
            'Slurm reads "MINUTES", "HH:MM:SS", "DAYS-HH" or "DAYS-HH:MM:SS"; in YAML it needs the quotes.',
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    minutes = part["only_minutes"] + part["minutes"] + part["day_minutes"]
    hours = part["hours"] + part["day_hours"]
    return ((part["days"] * 24 + hours) * 60 + minutes) * 60 + part["seconds"] + part["day_seconds"]


def save_before_end_s(time: str | None) -> int:
    """Seconds before the time limit at which the ranks are told to save; a quarter of a short job."""
    limit = time_limit_s(time) if time else None
    return SAVE_BEFORE_END_S if limit is None else max(1, min(SAVE_BEFORE_END_S, limit // 4))


def sbatch_script(request: SbatchRequest) -> str:
    """The whole script.

    Raises:
        UsageError: an option that has its own key or is no long option's name, a line break inside a value, or a
            time that Slurm does not read.
    """
    lines = [
        "#!/bin/bash -l",
        "# -l: a login shell, because `module` is defined by the login profile.",
        "#",
        f"# Written by `runner submit`. To run it again, from its last checkpoint: sbatch {_word(request.script)}",
        "",
    ]
    for reason, name, value in _directives(request):
        lines += [f"# {line}" for line in reason.splitlines()]
        lines.append(f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={_word(value)}")
    lines += ["", "# A line that fails ends the job here, not later in the ranks.", "set -e"]
    lines += [
        "# Left over when this is submitted from inside another job: they would mislead srun and the ranks.",
        'unset SLURM_EXPORT_ENV SLURM_PTY_PORT "${!SLURM_STEP@}"',
    ]
    lines += [f"module load {_word(module)}" for module in request.modules]
    lines += [
        "# The environment it was submitted from: its ninja, compilers and python come first.",
        f'export PATH={_word(request.bin_folder)}:"$PATH"',
    ]
    lines += [_one_line("slurm.setup", line) for line in request.setup]
    lines += _choice_of_member(request)
    lines += [
        "",
        "# exec: what Slurm signals is then the runner itself, which starts the ranks with srun, hands signals on to",
        "# them, and requeues the job when they have saved.",
        f"exec {' '.join(_word(argument) for argument in request.command)}" + (' "$@"' if request.members else ""),
    ]
    return "\n".join(lines) + "\n"


def _choice_of_member(request: SbatchRequest) -> list[str]:
    if not request.members:
        return []
    lines = ["", "# Which run of the sweep this is.", 'case "$SLURM_ARRAY_TASK_ID" in']
    for number, member in enumerate(request.members):
        words = ["--output", str(request.run_folder / member.name)]
        words += [word for override in member.overrides for word in ("--set", override)]
        lines.append(f"{number}) set -- {' '.join(map(_word, words))} ;;")
    return [*lines, '*) echo "no run $SLURM_ARRAY_TASK_ID in this sweep" >&2; exit 2 ;;', "esac"]


def _directives(request: SbatchRequest) -> list[tuple[str, str, str | bool]]:
    """(reason, option, value) in the order of the script; what `options` says replaces ours."""
    lead = save_before_end_s(request.time)
    gpus = request.gpus_per_node
    ours: list[tuple[str, str, str | int | float | bool | None]] = [
        ("", "job-name", request.name),
        ("One run each.", "array", f"0-{len(request.members) - 1}" if request.members else None),
        ("", "partition", request.partition),
        ("", "nodes", request.nodes),
        (
            f"One rank for each of the {gpus} GPUs." if gpus == request.tasks_per_node else "Ranks on each node.",
            "ntasks-per-node",
            request.tasks_per_node,
        ),
        ("--gres is the spelling that every version and site understands.", "gres", f"gpu:{gpus}" if gpus else None),
        (request.cpus_reason, "cpus-per-task", request.cpus_per_task),
        ("", "time", request.time),
        (
            f"{lead} s before the time limit the ranks get SIGTERM, save a checkpoint and leave; then the job is\n"
            "requeued and resumes. No `B:`: that would signal only this script.",
            "signal",
            f"TERM@{lead}",
        ),
        ("After a preemption or the loss of a node Slurm may start the job again: it resumes.", "requeue", True),
        ("... and goes on in the same log.", "open-mode", "append"),
        ("", "output", str(request.log.parent).replace("%", "%%") + "/" + request.log.name),
        ("Relative paths mean the same as when it was submitted.", "chdir", str(request.working_folder)),
    ]
    theirs = {_option_name(name): value for name, value in request.options.items()}
    dropped = {"gres"} if any(name in theirs for name in GPU_OPTIONS) else set()
    directives: list[tuple[str, str, str | bool]] = []
    for reason, name, value in ours:
        given = theirs.pop(name, None)
        if given is not None:
            reason, value = "From slurm.options.", given
        if value is not None and value is not False and name not in dropped:
            directives.append((reason, name, True if value is True else str(value)))
    rest = [(name, value) for name, value in theirs.items() if value is not False]
    return directives + [
        ("From slurm.options." if index == 0 else "", name, True if value is True else str(value))
        for index, (name, value) in enumerate(rest)
    ]


def _option_name(given: str) -> str:
    name = given.lstrip("-").replace("_", "-")
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise UsageError(f"slurm.options: {given!r} is not the long name of an sbatch option", "See `man sbatch`.")
    if name == "array":
        raise UsageError(
            f"slurm.options: `{given}`: every member would write the same run folder.",
            "runner submit RUN --array KEY=VALUE,VALUE gives each its own.",
        )
    if name in OWN_KEYS:
        raise UsageError(f"slurm.options: `{given}` has a key of its own", f"Set slurm.{OWN_KEYS[name]} instead.")
    return name


def _word(value: str | Path | bool) -> str:
    """Quoted for bash, and for sbatch, which reads quotes the same way."""
    return shlex.quote(_one_line("the job", str(value)))


def _one_line(where: str, text: str) -> str:
    if re.search(r"[\n\r\0]", text):
        raise UsageError(f"{where}: a line break inside {text!r}", "Write one entry a line.")
    return text
