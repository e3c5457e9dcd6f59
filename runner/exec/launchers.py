"""Does a user's command start all ranks of its tasks and nodes, once? And the line that would.

The launcher is known by the command's own words. Only of a shell script its text is read, where a
launcher stands like any command. Nothing is started or changed here: a command that would train
several times over the same files, or on one node of several, is refused with the line to type.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from runner.from_stage import UsageError, read_start
from runner.launch.ranks import MPI_VARIABLES, LaunchedProcess, task_of
from runner.slurm.environment import SlurmJobEnvironment

MULTI_NODE_LAUNCHERS = frozenset(
    {"srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "pdsh", "clush"}
)
"""Commands that start processes on other nodes, which cannot reach this node's loopback."""
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "bash", "sh"})
"""Commands that set the variables of ranks themselves, or may."""
_MEETS = re.compile(r"--(rdzv|node|machine|master|main_process_ip)|PET_RDZV_ENDPOINT|NODE_RANK")
"""Words, and variables, with which the launchers of several nodes find each other."""
_ONE_PER_NODE = re.compile(r"SLURM_(JOB_)?(NNODES|NUM_NODES|NODEID)")
"""Variables with which a line for several nodes counts one launcher on each."""
_ONE_OF_TASKS = re.compile(
    "|".join(["SLURM_PROCID|SLURM_LOCALID", *(f"{n[1]}|{n[3]}" for n in MPI_VARIABLES)])
)
"""Variables with which a shell script starts something in one task, or counts the tasks."""
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
}
"""What `python -m` starts -> the launcher that it is."""
LLAMA_FACTORY = ("llamafactory-cli", "lmf")
_SUBCOMMANDS = {"accelerate": "launch", **dict.fromkeys(LLAMA_FACTORY, "train")}
_AT = (
    r"(?:^|[;&|{\n]|(?<!\$)\(|\b(?:exec|then|do|else|if|time|nohup)\s|\b\w+=[^\s(]*\s)\s*(?:\S*/)?"
)
"""Where a command stands in a shell script; not in `$(...)`, which asks for a name.

Only words at these places count: `echo torchrun` starts nothing. If this misreads a text, the cost
is a line of advice, or a refusal with its remedy: the user's own command is never changed.
"""
_IN_SHELL = re.compile(
    _AT + r"(torchrun|deepspeed|accelerate(?=\s+launch\b)|(?:llamafactory-cli|lmf)(?=\s+train\b))\s"
)
_OF_NODES = re.compile(rf"(?:{_AT}|\b\w+=[\"'])(srun|(?:mpi|orte|p)run|mpiexec(?:\.hydra)?)\s")
_STARTS_RANKS = re.compile("--(multi.gpu|use.deepspeed|use.fsdp|use.megatron.lm|tpu)")
_ON_CPU = re.compile(r"--cpu(?=\s|$)")
_COUNT = re.compile(r"--num[-_](?:gpus|processes)[ =](\d+)")
_CONFIG = re.compile(r"--config[-_]file[ =](\S+)")
_BY_MPI = {
    "Open MPI": "mpirun --map-by ppr:1:node --bind-to none",
    "Cray PALS": "mpiexec -ppn 1 --cpu-bind none",
}
"""MPI -> the words for one process on each node, with all its CPUs; MPICH, Intel: no binding."""


def check_all_nodes(
    command: Sequence[str], bundle: Path, environ: Mapping[str, str], script: bytes
) -> None:
    """Refuses a command that would not train once, on all nodes of its job.

    Args:
        script: what a shell would run of `command`.

    Raises:
        UsageError: it would start processes on nodes without the bundle, or train on one node of
            several, or several times; the remedy has the line that trains once.
    """
    job, task = SlurmJobEnvironment.from_environ(environ), task_of(environ)
    if task is not None:
        _check_one_launcher(command, bundle, environ, script, task)
    if job is None or job.num_nodes == 1:
        return
    name = Path(command[0]).name
    alone = "the bundle would be served on this one alone."
    if name in MULTI_NODE_LAUNCHERS:
        raise UsageError(
            f"`{name}` starts processes on {job.num_nodes} nodes; {alone}",
            f"The other way round, so that each node serves itself: {name} ... "
            f"{exec_words(bundle)} python ...",
        )
    text = _code(script)
    if inside := _OF_NODES.search(text):
        line = text.count("\n", 0, inside.start(1)) + 1
        raise UsageError(
            f"{shell_script(command)[0] or name}:{line}: `{inside[1]}` starts processes on "
            f"{job.num_nodes} nodes; {alone}",
            f"In that line, write after {inside[1]} and its options: {exec_words(bundle)}. "
            f"Then start it without: {shlex.join(command)}",
        )
    if task is None:
        line_of_all = on_each_node(command, bundle, job.num_nodes)
        raise UsageError(
            f"this job has {job.num_nodes} nodes, and outside srun `{name}` would run on this one "
            "alone.",
            f"Start it on each node: {line_of_all}{_note_on_cpu(line_of_all)} (a script that "
            "reads Slurm's own variables: srun and one task per GPU). For one node only: "
            f"srun --nodes=1 --ntasks=1 {exec_words(bundle)} {shlex.join(command)}",
        )


def _check_one_launcher(
    command: Sequence[str],
    bundle: Path,
    environ: Mapping[str, str],
    script: bytes,
    task: LaunchedProcess,
) -> None:
    """Refuses a launcher of ranks in each of several tasks: the whole training, several times.

    Raises:
        UsageError: there are several on a node, and they do not count themselves as nodes; or on
            several nodes, and they do not meet.
    """
    tasks = max(task.step.tasks_per_node) if task.step else task.local_world_size
    nodes = task.world_size // tasks
    launcher, text = _launcher_in(command, script)
    meets = _MEETS.search(" ".join([text, *environ])) or (
        launcher == "accelerate" and (_accelerate_file(text) or {}).get("main_process_ip")
    )
    counts_tasks = meets and not _ONE_PER_NODE.search(text)
    is_several = tasks > 1 and not counts_tasks
    is_apart = nodes > 1 and not meets and "SLURM_NODEID" not in text
    if not launcher or _ONE_OF_TASKS.search(text) or not (is_several or is_apart):
        return
    if task.rank:  # the first task prints the error for all
        time.sleep(1)  # srun -K and mpirun end all tasks with the first that ends
        sys.exit(UsageError.exit_code)
    once = _once_by(task, command, bundle, environ)
    if is_several:
        raise UsageError(
            f"{task.launcher} started {tasks} tasks on this node, and in each of them `{launcher}` "
            f"would start ranks of its own: the whole training {tasks} times, over the same files.",
            f"One task on each node: {once}{_note_on_cpu(once)}",
        )
    if not _launcher(command)[0]:
        is_other = launcher == "deepspeed"
        variables, words = _BY_SLURM.words(launcher, text, _BY_SLURM.each)
        name = " ".join(("torchrun" if is_other else launcher, _SUBCOMMANDS.get(launcher, "")))
        once = f"there write {variables}{name.strip()} {words}".strip()
    raise UsageError(
        f"{task.launcher} started `{launcher}` on each of {nodes} nodes without the address of the "
        "first: each would train alone, over the same files.",
        f"All nodes together: {once}{_note_on_cpu(once)}. One node only: srun --nodes=1 --ntasks=1 "
        f"{exec_words(bundle)} {shlex.join(command)}",
    )


def note_on_tasks(
    command: Sequence[str], bundle: Path, environ: Mapping[str, str], script: bytes
) -> str:
    """One line where srun started several tasks and nothing tells a script of the others.

    Trainer and accelerate then train the whole model once per task, without an error.

    Args:
        script: what a shell would run of `command`.
    """
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or 1)
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or 1)
    launcher, text = _launcher_in(command, script)
    starts_others = launcher or _is_shell(command)
    if tasks == 1 or "WORLD_SIZE" in environ or starts_others or _MEETS.search(text):
        return ""
    return (
        f"srun started {tasks} tasks, and RANK and WORLD_SIZE are not set: a script that does not "
        "read Slurm's own variables trains alone in each task "
        f"(if so: {on_each_node(command, bundle, nodes, tasks // nodes)})"
    )


def on_each_node(command: Sequence[str], bundle: Path, nodes: int, per_node: int = 1) -> str:
    """The line that trains once on all nodes of a job, from one that would not.

    Args:
        nodes: of the job or step.
        per_node: the tasks on each node, each of which would be a rank.
    """
    # Where the job has more tasks, srun ignores --ntasks-per-node without --ntasks.
    srun = f"srun --ntasks-per-node=1 --ntasks={nodes}"
    return f"{srun} {exec_words(bundle)} {shlex.join(_with_all_nodes([*command], nodes, per_node))}"


def _once_by(
    task: LaunchedProcess, command: Sequence[str], bundle: Path, environ: Mapping[str, str]
) -> str:
    """The line of `on_each_node`, for whatever started `task`."""
    nodes, per_node = task.world_size // task.local_world_size, task.local_world_size
    if task.step is not None:
        nodes, per_node = len(task.step.tasks_per_node), max(task.step.tasks_per_node)
        return on_each_node(command, bundle, nodes, per_node)
    rank = next(names[1] for names in MPI_VARIABLES if names[0] == task.launcher)
    by = _Counted(str(nodes), f"${rank}", "1", str(per_node))
    line = shlex.join(_with_all_nodes([*command], nodes, per_node, by))
    mpi, first = _BY_MPI.get(task.launcher, "mpiexec -ppn 1"), ""
    if nodes > 1 and not task.hosts:
        first = f"export MASTER_ADDR={environ.get('MASTER_ADDR') or 'FIRST_HOST'}; "
        mpi += " -x MASTER_ADDR" if task.launcher == "Open MPI" else ""
    return f"{first}{mpi} -n {nodes} {exec_words(bundle)} {line}"


class _Counted(NamedTuple):
    """Words of a shell line, as its launcher knows them: nodes, this node, job, ranks per node."""

    nodes: str
    node: str
    job: str
    each: str

    def torchrun(self) -> str:
        """The options with which `torchrun` on each node meets the others."""
        return (
            f"--nnodes={self.nodes} --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:29500 "
            f"--rdzv-id={self.job}"
        )

    def words(self, launcher: str, options: str, each: str) -> tuple[str, str]:
        """What `launcher` is given to meet those of the other nodes: variables, and options.

        Args:
            options: its own; of accelerate, they name the file with the rest.
            each: ranks per node, where the launcher does not know it.
        """
        if launcher in LLAMA_FACTORY:  # it starts torchrun itself, which these variables reach
            of_node = f"NPROC_PER_NODE=${{NPROC_PER_NODE:-{each}}}"
            where = f"NNODES={self.nodes} NODE_RANK={self.node} MASTER_PORT=29500"
            return f"FORCE_TORCHRUN=1 {where} {of_node} ", ""
        if launcher != "accelerate":
            return "", self.torchrun()
        file = _accelerate_file(options)
        kind = "" if file is None else file.get("distributed_type", "NO") or "NO"  # YAML: NO is no
        is_alone = kind in ("NO", "MULTI_CPU") and not _STARTS_RANKS.search(options)
        uses_cpu = _ON_CPU.search(options) or kind == "MULTI_CPU" or (file or {}).get("use_cpu")
        count = f"$(({self.nodes.removeprefix('$')} * {_processes(options, file or {}) or each}))"
        return "ACCELERATE_USE_CPU=true " if is_alone and uses_cpu else "", (
            f"{'--multi_gpu ' if is_alone else ''}--num_machines {self.nodes} --machine_rank "
            f"{self.node} --num_processes {count} --main_process_ip $MASTER_ADDR "
            "--main_process_port 29500 --deepspeed_multinode_launcher standard"
        )


_BY_SLURM = _Counted("$SLURM_NNODES", "$SLURM_NODEID", "$SLURM_JOB_ID", "${SLURM_GPUS_ON_NODE:-1}")


def _with_all_nodes(
    command: list[str], nodes: int, per_node: int, by: _Counted = _BY_SLURM
) -> list[str]:
    """The command with the words by which the launchers of all nodes meet."""
    launcher, own = _launcher(command)
    is_shell = not launcher and _is_shell(command)
    script = next(
        (n for n in range(own, len(command)) if command[n] == "-m" or command[n].endswith(".py")),
        None,
    )
    knows = _MEETS.search(" ".join(command)) or (launcher == "deepspeed" and script is None)
    if is_shell or knows or (launcher and nodes == 1):
        return command
    variables, each = "", str(per_node) if per_node > 1 else by.each
    if launcher not in ("", "deepspeed"):
        end = own if script is None else script
        before = [word for word in command[:end] if word not in ("--standalone", "--cpu")]
        after = command[end:]
        variables, words = by.words(launcher, " ".join(command[own:end]), each)
    else:  # no launcher, or deepspeed, whose options are not torchrun's
        count = _COUNT.search(" ".join(command[own:script])) if launcher else None
        each = count[1] if count else each
        is_python = launcher or Path(command[0]).name.startswith("python")
        has_code = not is_python or script is None or "-c" in command[:script]
        before = [*command[: max(own - 1, 0)], "torchrun"]
        after = ["--no-python", *command] if has_code else command[script:]
        words = f"{by.torchrun()} --nproc-per-node={each}"
        if nodes == 1:
            return [*before, "--standalone", f"--nproc-per-node={each}", *after]
    line = " ".join(filter(None, (shlex.join(before), words, shlex.join(after))))
    return ["sh", "-c", f"{variables}{line}"]


def _launcher(command: Sequence[str]) -> tuple[str, int]:
    """The launcher of ranks that a command starts, and the number of its own words; "": none."""
    command, start = [*command], 0
    if command[0] == "env":
        start = next((n for n, word in enumerate(command) if n and "=" not in word), 0)
    name = Path(command[start]).name
    if name in ("torchrun", "deepspeed", "accelerate-launch"):
        return name.partition("-")[0], start + 1
    if name in _SUBCOMMANDS and command[start + 1 : start + 2] == [_SUBCOMMANDS[name]]:
        return name, start + 2
    if name.startswith("python") and "-m" in command[:-1]:
        module = command.index("-m") + 1
        if command[module] in _MODULES:
            return _MODULES[command[module]], module + 1
    return "", 0


def _launcher_in(command: Sequence[str], script: bytes) -> tuple[str, str]:
    """The launcher that a command or its shell script starts, and the text of both."""
    text = _code(script)
    in_shell = _IN_SHELL.search(f"{text} ")
    launcher = _launcher(command)[0] or (in_shell[1] if in_shell else "")
    return launcher, f"{' '.join(command)}\n{text}"


def _is_shell(command: Sequence[str]) -> bool:
    return Path(command[0]).name in LAUNCHERS or shell_script(command)[1] != b""


def shell_script(command: Sequence[str]) -> tuple[str, bytes]:
    """The file that bash or sh would read, if any, and the beginning of what it would run."""
    if _launcher(command)[0]:  # perhaps started by a line for sh, as pip writes it
        return "", b""
    if Path(command[0]).name not in ("bash", "sh"):
        try:
            start = read_start(Path(command[0]), 2**16)
        except OSError:
            start = b""
        return (command[0], start) if re.match(rb"#!.*\b(ba)?sh\b", start) else ("", b"")
    if "-c" in command[1:2]:
        return "", os.fsencode("".join(command[2:3]))
    script = next((word for word in command[1:] if not word.startswith("-")), "")
    try:
        return script, read_start(Path(script), 2**16)
    except OSError:  # also a pipe, as in `bash <(...)`: what we read, bash would not
        return script, b""


def _code(script: bytes) -> str:
    """The text of a shell script without its comments."""
    return re.sub(r"(?m)(^|\s)#.*", r"\1", script.decode(errors="replace"))


def _accelerate_file(options: str) -> dict[str, Any] | None:
    """The config file of `accelerate launch`; empty: there is none; None: it cannot be read."""
    named = _CONFIG.search(options)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface")
    path = Path(named[1]) if named else home / "accelerate" / "default_config.yaml"
    try:
        config = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        return None if named else {}
    except (OSError, ValueError, yaml.YAMLError):  # accelerate itself says what is wrong with it
        return None
    return config if isinstance(config, dict) else None


def _processes(options: str, file: Mapping[str, Any]) -> int | None:
    """The processes of one node, as the options of `accelerate launch` or its config say it."""
    if given := _COUNT.search(options):
        return int(given[1])
    try:
        return int(file["num_processes"]) // int(file.get("num_machines", 1)) or None
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def _note_on_cpu(line: str) -> str:
    if "ACCELERATE_USE_CPU=" not in line:
        return ""
    return (
        " (for CPUs `accelerate launch` cannot start processes on several nodes: these words let "
        "its launcher of GPUs do it)"
    )


def exec_words(bundle: Path) -> str:
    """The words of a shell before a command of the user's."""
    return f"runner exec --bundle {shlex.quote(str(bundle))} --"
