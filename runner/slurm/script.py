"""Turns a request for a job into the text of an sbatch script. Pure; golden files hold the result.

`SbatchRequest` (all paths absolute, all values decided) -> `sbatch_script` -> text. Comments in the
script explain each line that the user did not ask for. `runner.job.submit` fills in the request
and submits.

A sweep is one run file, some keys with several values, one job array. `optimizer.lr=1e-4,3e-4` and
`seed=1,2` become four members, in that order. Each has its own run folder in one parent folder, so
that `runner report` compares them.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from runner.from_stage import UsageError, read_value
from runner.slurm.environment import OF_RANKS, WITHOUT_RANKS
from runner.slurm.requeue import MAX_REQUEUES, REQUEUE_FUNCTION, STEP, STOPPED

GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
"""Options of sbatch for GPUs, besides `gres`."""


_NAMES_YOUR_LINE = """\
# A line of yours that fails without a word would leave an empty log.
trap '__code=$?; [ -z "$__line" ] || echo "error: $__line
  ended the job on ${HOSTNAME:-its node}, with exit code $__code.
  -> Correct that line, in the run file or in clusters.yaml." >&2' EXIT"""


_OF_RANKS = (
    "# exec: Slurm's signals reach the runner itself, which starts the ranks with srun, passes",
    "# signals on to them, and requeues the job after they have saved.",
)
_OF_COMMAND = (
    "# exec: Slurm's signal reaches the runner itself, which starts the command of config.yaml in",
    "# work/, ends it in time, and requeues the job if it goes on from its own checkpoints.",
)


SAVE_BEFORE_END_S = 300
"""How many seconds before the time limit the ranks get the signal to save."""


OWN_KEYS = {
    "partition": "partition",
    "nodes": "nodes",
    "ntasks-per-node": "tasks_per_node",
    "ntasks": "tasks_per_node",
    "time": "time",
}
"""Options of sbatch with their own key in the run file; `options` must not contradict it."""


_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?)"
    r"|(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+))|(?P<only_minutes>\d+)"
)


@dataclass(frozen=True, kw_only=True)
class SbatchRequest:
    """What a job needs. Paths are absolute.

    Attributes:
        command: the argv that the batch script executes at its end.
        bin_folder: the programs of the submitting environment; first on PATH.
        cpus_per_task: None leaves it to the site; `cpus_reason` explains the number.
        options: more sbatch options, long names without dashes; True is a flag, False removes one
            of ours.
        srun: words for every srun. The script then starts the ranks itself, after `prepare`.
        members: the members of a sweep: the job becomes an array, each member with a run folder
            inside `run_folder`. The command then has no `--output`.
        of_command: a program of the user's own runs, not ranks of ours.
        resumes: whether a job that is started again goes on.
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
    srun: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()
    of_command: bool = False
    resumes: bool = True

    @property
    def script(self) -> Path:
        """The path of the script: one in each run folder."""
        return self.run_folder / "submit.sbatch"

    @property
    def log(self) -> Path:
        """The job's log, with Slurm's `%j` for its number (in an array `%A_%a`: job and member)."""
        return self.run_folder / "logs" / ("slurm-%A_%a.out" if self.members else "slurm-%j.out")


def time_limit_s(text: str, place: str = "slurm.time") -> int | None:
    """Converts Slurm's time notation (sbatch(1), `--time`) to seconds; None for no limit.

    Args:
        text: as Slurm reads it.
        place: where it is written, for the message.

    Raises:
        UsageError: the text is not a time. `sbatch --test-only` would not notice.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(text)
    if not match:
        raise UsageError(
            f"{place}: {text!r} is not a time limit",
            'Slurm reads "MINUTES", "HH:MM:SS", "DAYS-HH" or "DAYS-HH:MM:SS"; '
            "in YAML it needs the quotes.",
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    minutes = part["only_minutes"] + part["minutes"] + part["day_minutes"]
    hours = part["hours"] + part["day_hours"]
    seconds = part["seconds"] + part["day_seconds"]
    # "A time limit of zero requests that no time limit be imposed."
    return ((part["days"] * 24 + hours) * 60 + minutes) * 60 + seconds or None


def save_before_end_s(time: str | None) -> int:
    """Seconds before the time limit at which the ranks get the signal; a quarter of a short job."""
    limit = time_limit_s(time) if time else None
    return SAVE_BEFORE_END_S if limit is None else max(1, min(SAVE_BEFORE_END_S, limit // 4))


def sbatch_script(request: SbatchRequest) -> str:
    """Returns the whole script.

    Raises:
        UsageError: an option has its own key or is not a long option name, a value has a line break
            in it, or Slurm cannot read the time.
    """
    lines = [
        "#!/bin/bash -l",
        "# -l: a login shell, because `module` is defined by the login profile.",
        "#",
        f"# Written by `runner submit`. To {_again(request)}: sbatch {_quoted(request.script)}",
        "",
    ]
    for reason, name, value in _directives(request):
        lines += [f"# {line}" for line in reason.splitlines()]
        lines.append(f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={_quoted(value)}")
    lines += ["", "# A line that fails ends the job here, not later in the ranks.", "set -e"]
    lines += [
        "# Inherited if this was submitted inside another job, or from a shell in which a script",
        "# was tried by hand: they would mislead srun and ranks.",
        'unset SLURM_EXPORT_ENV SLURM_PTY_PORT "${!SLURM_STEP@}"',
        f"unset {' '.join(OF_RANKS)}",
    ]
    yours = request.modules or request.setup
    lines += [_NAMES_YOUR_LINE] if yours else []
    for key, line in shell_lines(request):
        lines += [f"__line={_quoted(f'{key}: {line}')}"] * bool(key)
        if not key:
            lines.append(
                "# The environment of the submission: its ninja, compilers and python come first."
            )
        lines.append(line)
    lines += ["__line="] if yours else []
    lines += _choice_of_member(request)
    more = ' "$@"' if request.members else ""
    command = " ".join(map(_quoted, request.command)) + more
    if request.srun:
        by_srun = _command_by_srun if request.of_command else _ranks_by_srun
        return "\n".join([*lines, *by_srun(request, command, more)]) + "\n"
    lines += [
        "",
        *(_OF_COMMAND if request.of_command else _OF_RANKS),
        f"exec {command}",
    ]
    return "\n".join(lines) + "\n"


def _again(request: SbatchRequest) -> str:
    if not request.of_command:
        return "run it again, from its last checkpoint"
    return "start it again, from its own results" if request.resumes else "start it anew"


def _ranks_by_srun(request: SbatchRequest, command: str, more: str) -> list[str]:
    """The lines that start the ranks without a launcher, whose Python may be in a container."""
    train, ranks = request.command.index("train"), request.tasks_per_node
    prepare = (*request.command[:train], "prepare", *request.command[train + 1 :])
    words = _words_of_srun(request)
    return [
        "",
        "# slurm.srun: its words may bring the Python of the ranks (a container), so no launcher",
        "# can run here. srun starts the ranks by their path; images may set variables of ranks.",
        f"{_ON_FIRST_NODE} {words} {' '.join(map(_quoted, prepare))}{more}",
        f"stopped={_folder(request)}/{STOPPED}",
        'rm -f "$stopped"',
        "trap : TERM # a signal for all processes of the job: the ranks save, and this waits",
        "code=0",
        f'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((SLURM_JOB_NUM_NODES * {ranks})) '
        f"--ntasks-per-node={ranks} "
        "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} --kill-on-bad-exit=1 --label "
        f"{words} {command} || code=$?",
        "",
        REQUEUE_FUNCTION,
        "",
        "# Rank 0 writes that file when all ranks have saved on a signal.",
        f'if [ -e "$stopped" ]; then requeue_stopped_job {MAX_REQUEUES}; fi',
        'exit "$code"',
    ]


_ON_FIRST_NODE = (
    "srun --nodes=1 --ntasks=1 --ntasks-per-node=1 "
    "${SLURM_CPUS_ON_NODE:+--cpus-per-task=$SLURM_CPUS_ON_NODE}"
)


def _folder(request: SbatchRequest) -> str:
    """The folder of the run, for bash: that of a run of a sweep is chosen in the script."""
    return '"$2"' if request.members else _quoted(request.run_folder)


def _words_of_srun(request: SbatchRequest) -> str:
    words = (*request.srun, *WITHOUT_RANKS)
    return f"--mpi=none --export=ALL --input=none {' '.join(map(_quoted, words))}"


def _command_by_srun(request: SbatchRequest, command: str, more: str) -> list[str]:
    """The lines around a launcher in a container: it says by files what srun is to start here."""
    return [
        "",
        "# slurm.srun: its words may bring the Python of the runner (a container), and no srun is",
        "# there. So the runner runs in a step of its own, beside that of the command, and leaves",
        "# files: start, the command for srun; stop, when it must end. This script leaves code.",
        f"step={_folder(request)}/{STEP}",
        'rm -rf "$step"',
        'mkdir "$step"',
        "# The step gets variables of its own. The runner needs those of the job.",
        "job=(-u SLURM_STEP_ID -u SLURM_CPUS_PER_TASK)",
        "for name in SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK; do",
        '    job+=(${!name:+"$name=${!name}"})',
        "done",
        "# Before Slurm 20.11 steps share their CPUs, and srun does not know this option.",
        "overlap=$(srun --help | grep -o -m 1 -e --overlap || true)",
        f'{_ON_FIRST_NODE} $overlap {_words_of_srun(request)} "${{job[@]}}" {command} &',
        "runner=$!",
        "# srun passes signals on to the runner, which ends the command in time.",
        """trap 'kill -USR1 "$runner" || :' USR1""",
        """trap 'kill -TERM "$runner" || :' TERM""",
        "second() { sleep 1 || :; } # a signal for all processes of the job ends sleep, too",
        'until [ -e "$step/start" ] || ! kill -0 "$runner" 2>/dev/null; do second; done',
        'if [ -e "$step/start" ]; then',
        '    sh "$step/start" &',
        "    srun=$!",
        '    while kill -0 "$srun" 2>/dev/null; do',
        '        if [ -e "$step/stop" ]; then kill -TERM "$srun" || :; rm "$step/stop"; fi',
        "        second",
        "    done",
        "    code=0",
        '    wait "$srun" || code=$?',
        '    echo "$code" >"$step/code.new"',
        '    mv "$step/code.new" "$step/code"',
        "fi",
        'while kill -0 "$runner" 2>/dev/null; do second; done',
        "code=0",
        'wait "$runner" || code=$?',
        "trap : USR1 TERM",
        "",
        REQUEUE_FUNCTION,
        "",
        f'if [ -e "$step/{STOPPED}" ]; then requeue_stopped_job {MAX_REQUEUES}; fi',
        'exit "$code"',
    ]


def shell_lines(request: SbatchRequest) -> list[tuple[str, str]]:
    """Returns the lines before the command, each with its key in the run file; empty: ours.

    `runner check` runs the same lines in a login shell (`runner.job.job_shell`).

    Raises:
        UsageError: a line break in one of them.
    """
    return [
        *(("slurm.modules", f"module load {_quoted(module)}") for module in request.modules),
        ("", f'export PATH={_quoted(request.bin_folder)}:"$PATH"'),
        *(("slurm.setup", _one_line("slurm.setup", line)) for line in request.setup),
    ]


def _choice_of_member(request: SbatchRequest) -> list[str]:
    if not request.members:
        return []
    lines = ["", "# Which run of the sweep this is.", 'case "$SLURM_ARRAY_TASK_ID" in']
    for number, member in enumerate(request.members):
        arguments = ["--output", str(request.run_folder / member.name)]
        arguments += [text for override in member.overrides for text in ("--set", override)]
        lines.append(f"{number}) set -- {' '.join(map(_quoted, arguments))} ;;")
    return [*lines, '*) echo "no run $SLURM_ARRAY_TASK_ID in this sweep" >&2; exit 2 ;;', "esac"]


def _directives(request: SbatchRequest) -> list[tuple[str, str, str | bool]]:
    """(reason, option, value) in the order of the script; `options` replace ours."""
    theirs = {_option_name(name): value for name, value in request.options.items()}
    dropped = {"gres"} if any(name in theirs for name in GPU_OPTIONS) else set()
    directives: list[tuple[str, str, str | bool]] = []
    for reason, name, value in _own_directives(request):
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


def _own_directives(
    request: SbatchRequest,
) -> list[tuple[str, str, str | int | float | bool | None]]:
    lead = save_before_end_s(request.time)
    gpus = request.gpus_per_node
    members = f"0-{len(request.members) - 1}" if request.members else None
    ranks = "Tasks on each node." if request.of_command else "Ranks on each node."
    if gpus == request.tasks_per_node:
        ranks = f"One rank for each of the {gpus} GPUs."
    gres = "--gres is the spelling that every version and site understands."
    signal = (
        f"{lead} s before the time limit the ranks get SIGTERM, save a checkpoint and exit; then\n"
        "the job is requeued and resumes. No `B:`: that would signal only this script."
    )
    if request.of_command:
        signal = (
            f"{lead} s before the time limit the launcher below gets SIGUSR1; it ends the command\n"
            "when nothing is being written. `B:`: the command itself may not know that signal."
        )
    requeue = "After a preemption or the loss of a node Slurm may start the job again: it resumes."
    if not request.resumes:
        requeue = "Another start would begin anew: the run file does not say `resumes: true`."
    output = str(request.log.parent).replace("%", "%%") + "/" + request.log.name
    chdir = "Relative paths mean the same as when it was submitted."
    return [
        ("", "job-name", request.name),
        ("One run each.", "array", members),
        ("", "partition", request.partition),
        ("", "nodes", request.nodes),
        (ranks, "ntasks-per-node", request.tasks_per_node),
        (gres, "gres", f"gpu:{gpus}" if gpus else None),
        (request.cpus_reason, "cpus-per-task", request.cpus_per_task),
        ("", "time", request.time),
        (signal, "signal", f"B:USR1@{lead}" if request.of_command else f"TERM@{lead}"),
        (requeue, "requeue" if request.resumes else "no-requeue", True),
        ("... and continues in the same log.", "open-mode", "append"),
        ("", "output", output),
        (chdir, "chdir", str(request.working_folder)),
    ]


def _option_name(given: str) -> str:
    name = given.lstrip("-").replace("_", "-")
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise UsageError(
            f"slurm.options: {given!r} is not the long name of an sbatch option",
            "See `man sbatch`.",
        )
    if name == "array":
        raise UsageError(
            f"slurm.options: `{given}`: every member would write the same run folder.",
            "runner submit RUN --array KEY=VALUE,VALUE gives each its own.",
        )
    if name in OWN_KEYS:
        raise UsageError(
            f"slurm.options: `{given}` has a key of its own", f"Set slurm.{OWN_KEYS[name]} instead."
        )
    return name


def _quoted(value: str | Path | bool) -> str:
    """Quotes a value for bash, and for sbatch, which reads quotes in the same way."""
    return shlex.quote(_one_line("the job", str(value)))


def _one_line(where: str, text: str) -> str:
    if re.search(r"[\n\r\0]", text):
        raise UsageError(f"{where}: a line break inside {text!r}", "Write one entry per line.")
    return text


MOST_MEMBERS = 1000  # Slurm's own default bound is 1001 (MaxArraySize, slurm.conf)


@dataclass(frozen=True)
class Member:
    """One run of a sweep: the name of its folder, and its `--set` texts."""

    name: str
    overrides: tuple[str, ...]


def members(axes: Sequence[str]) -> tuple[Member, ...]:
    """Every combination of the values of `KEY=VALUE,VALUE,...` texts; the last key changes fastest.

    Raises:
        UsageError: no values, a key or a value twice, or more members than Slurm accepts.
    """
    parsed = [_axis(text) for text in axes]
    keys = [key for key, _ in parsed]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise UsageError(
            f"--array {twice.pop()}: given twice.", "List all its values in one: --array KEY=A,B,C."
        )
    combinations = list(
        itertools.product(*([(key, value) for value in values] for key, values in parsed))
    )
    if len(combinations) > MOST_MEMBERS:
        raise UsageError(
            f"--array: {len(combinations)} runs; Slurm takes {MOST_MEMBERS} at most.",
            "Give fewer values, or submit in parts.",
        )
    found = tuple(
        Member(
            ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs),
            tuple(f"{k}={v}" for k, v in pairs),
        )
        for pairs in combinations
    )
    if longest := next((one.name for one in found if len(one.name.encode()) > 200), ""):
        raise UsageError(
            f"--array: the folder of a run would be called {longest[:60]}..., which is too long.",
            "Sweep over fewer keys, or shorter values.",
        )
    return found


@lru_cache(maxsize=8)
def elements_of(script: str) -> dict[str, int]:
    """The names of the runs in the sbatch script of a sweep -> their indices; empty: no sweep."""
    found = {}
    for index, words in re.findall(r"^(\d+)\) set -- --output (.*) ;;$", script, re.MULTILINE):
        found[shlex.split(words)[0].rpartition("/")[2]] = int(index)
    return found


def is_among(index: int, tasks: str) -> bool:
    """Whether Slurm's list of an array's tasks, such as `0-2,5%1`, has an index."""
    spans = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", tasks.partition("%")[0])
    return any(index in range(int(a), int(b or a) + 1, int(step or 1)) for a, b, step in spans)


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",")]
    if not key or not equals or not all(values):
        raise UsageError(
            f"--array {text}: expected KEY=VALUE,VALUE,...",
            "For instance: --array optimizer.lr=1e-4,3e-4",
        )
    if len(set(values)) != len(values):
        raise UsageError(
            f"--array {text}: a value is given twice, which would be the same run twice.",
            "Give each value once.",
        )
    for value in values:
        if not re.fullmatch(r"[\w.+-]+", value):
            raise UsageError(
                f"--array {text}: `{value}` becomes part of a folder's name: letters, digits, `.`, "
                "`_`, `-`, `+`",
                "Write lists and texts with other characters in separate run files.",
            )
        read_value(value)
    return key.strip(), values
