"""How a user's command is started in its job: by itself once, on each node, or as each rank.

A command is typed for one machine. `plan_launch` says what its job makes of it, or why it cannot;
`words_on_node` is the command of one node, with the words by which its launcher (torchrun,
accelerate, deepspeed, ...) meets those of the other nodes. Words that describe the user's machine
are replaced: the number of machines, the rank of this one, and where the first one listens.

These rules start nothing. They read three things: the config file of `accelerate launch`, a shell
script, and, for DeepSpeed, the GPUs that this process sees.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.from_stage import UsageError, WrongValueError, human_count, nearest_name, read_start


@dataclass(frozen=True, kw_only=True)
class Places:
    """What a job has.

    Attributes:
        nodes: their number.
        gpus: on each node; 0: the job asks for no GPU.
        tasks: slurm.tasks_per_node where the user set it, else None.
    """

    nodes: int
    gpus: int
    tasks: int | None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a command is started.

    Attributes:
        mode: `rank`: srun starts each rank. `node`: srun starts the command once on each node.
            `once`: on the first node alone.
        tasks_per_node: the tasks that srun starts on each node; `once`: 1, on the first node.
        processes: the ranks on each node that then compute; 0: not known, as of a shell script.
        launcher: what starts these ranks, such as `torchrun`; empty: no launcher that we know.
        notes: each choice that the user did not make, with its reason; one line each.
    """

    mode: Literal["rank", "node", "once"]
    tasks_per_node: int
    processes: int
    launcher: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Node:
    """What a task knows when it starts.

    Attributes:
        number: of its node, from 0.
        nodes: of the job.
        processes: `Launch.processes`.
        master: the address of node 0, at which rank 0 listens.
        port: a free port there.
        job: its number.
    """

    number: int
    nodes: int
    processes: int
    master: str
    port: int
    job: str


@dataclass(frozen=True, kw_only=True)
class _Launcher:
    """A launcher of ranks.

    Attributes:
        options: its names; `=` takes a value, `|` separates names of one option, `*` is any text.
            A test compares them with the installed parsers. Names of older versions are here, too.
        ours: the options that say how nodes meet.
        count: the option with the number of ranks.
    """

    options: str = ""
    ours: str = ""
    count: str = ""


_TORCHRUN = _Launcher(
    options="""h|help nnodes= nproc-per-node= rdzv-backend= rdzv-endpoint= rdzv-id= rdzv-conf=
    standalone max-restarts= monitor-interval= start-method= event-log-handler= role= m|module
    no-python run-path log-dir= r|redirects= t|tee= local-ranks-filter= duplicate-stdout-filters=
    duplicate-stderr-filters= node-rank= master-addr= master-port= local-addr= logs-specs=
    numa-binding= signals-to-handle= shutdown-timeout= virtual-local-rank use-env""",
    ours="""nnodes node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id rdzv-conf
    standalone local-addr""",
    count="nproc-per-node",
)
_ACCELERATE = _Launcher(
    options="""h|help config-file= q|quiet cpu multi-gpu tpu mixed-precision= num-processes=
    num-machines= num-cpu-threads-per-process= enable-cpu-affinity dynamo-use-* dynamo-*=
    use-deepspeed use-fsdp use-parallelism-config use-megatron-lm gpu-ids= same-network
    machine-rank= main-process-ip= main-process-port= t|tee= log-dir= role= rdzv-backend=
    rdzv-conf= max-restarts= monitor-interval= m|module no-python tpu-cluster no-tpu-cluster
    tpu-use-sudo vm= env= main-training-function= downcast-bf16 deepspeed-*= zero-stage=
    offload-*= gradient-accumulation-steps= gradient-clipping= zero3-*= fsdp-*= megatron-lm-*=
    fp8-use-autocast-during-eval fp8-*= aws-*= debug mpirun-hostfile= parallelism-config-*=
    use-mps-device mps ipex use-xpu mpirun-ccl=""",
    ours="""num-machines machine-rank main-process-ip main-process-port num-processes multi-gpu
    same-network rdzv-backend rdzv-conf gpu-ids deepspeed-multinode-launcher deepspeed-hostfile
    mpirun-hostfile""",
    count="num-processes",
)
_DEEPSPEED = _Launcher(
    options="""h|help hostfile|H= include|i= exclude|e= num-nodes= num-gpus|num-accelerators=
    master-port= master-addr= node-rank= launcher= launcher-args= module no-python no-local-rank
    no-ssh no-ssh-check force-multi save-pid enable-each-rank-log= autotuning=
    bind-cores-to-rank bind-core-list= ssh-port= venv-script= log-level= q|quiet
    elastic-training min-elastic-nodes= max-elastic-nodes= detect-nvlink-pairs""",
    ours="""hostfile num-nodes master-port master-addr node-rank launcher launcher-args no-ssh
    no-ssh-check force-multi ssh-port venv-script elastic-training min-elastic-nodes
    max-elastic-nodes""",
    count="num-gpus",
)
_FABRIC = _Launcher(
    options="""help accelerator= strategy= devices= num-nodes= node-rank= main-address=
    main-port= precision=""",
    ours="num-nodes node-rank main-address main-port",
    count="devices",
)
_BY_VARIABLES = _Launcher()  # it reads NNODES, NODE_RANK, NPROC_PER_NODE and starts torchrun
LAUNCHERS = {
    "torchrun": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "fabric": _FABRIC,
    "trl": _ACCELERATE,  # it gives `accelerate launch` the options that its scripts do not know
    "llamafactory": _BY_VARIABLES,
    "swift": _BY_VARIABLES,
}
_FACTORY = "train sft dpo rm"  # the last three with USE_V1
_PROGRAMS = {
    "torchrun": ("torchrun", ""),
    "torch.distributed.run": ("torchrun", ""),
    "torch.distributed.launch": ("torchrun", ""),
    "accelerate": ("accelerate", "launch"),
    "accelerate-launch": ("accelerate", ""),
    "accelerate.commands.launch": ("accelerate", ""),
    "accelerate.commands.accelerate_cli": ("accelerate", "launch"),
    "deepspeed": ("deepspeed", ""),
    "ds": ("deepspeed", ""),
    "deepspeed.launcher.runner": ("deepspeed", ""),
    "fabric": ("fabric", "run"),
    "lightning": ("fabric", "run"),
    "lightning.fabric.cli": ("fabric", "run"),
    "llamafactory-cli": ("llamafactory", _FACTORY),
    "lmf": ("llamafactory", _FACTORY),
    "llamafactory.cli": ("llamafactory", _FACTORY),
    "swift": ("swift", "pt sft rlhf"),
    "swift.cli.main": ("swift", "pt sft rlhf"),
    "megatron": ("swift", "pt sft rlhf export"),
    "trl": (
        "trl",
        "sft dpo grpo kto reward rloo distillation bco cpo gkd nash_md online_dpo orpo ppo prm xpo",
    ),
}
"""A program, or a module of `python -m` -> its launcher, and the subcommands that start ranks."""

STARTS_NODES = frozenset(
    ("srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "horovodrun")
    + ("sbatch", "salloc", "pdsh", "clush")
)
"""Programs that start processes on the nodes of a job, which is what the job itself does."""
_ENVIRONMENTS = frozenset(
    ["uv", "poetry", "conda", "mamba", "micromamba", "pipenv", "pdm", "hatch", "pixi", "rye"]
)
"""Programs whose `run` starts a command in an environment of this machine."""
_AROUND = frozenset(("time", "nohup", "exec", "command"))
_SHELLS = frozenset(("bash", "sh", "dash", "zsh"))
_TYPED_MEETING = frozenset(
    ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
)
_VISIBLE = "CUDA_VISIBLE_DEVICES"

_QUOTED = r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\""""
_ARITHMETIC = r"\$\(\([^()]*\)\)"
_WORD = re.compile(rf"(?:{_QUOTED}|{_ARITHMETIC}|\$\{{[^}}]*\}}|[^\s'\"\\])+", re.DOTALL)
_OPERATOR = re.compile(r"[|&;<>()`\n]|(?:^|\s)#")
_EXPANDED = re.compile(r"\$[\w{@*#?]|[*?]|(?:^|[\s=])~(?=[/\s]|$)")
_AT = (
    r"(?:^|[;&|{\n]|(?<!\$)\(|\b(?:exec|then|do|else|if|time|nohup)\s|\b\w+=[^\s(]*\s)\s*(?:\S*/)?"
)
"""Where a command stands in a shell script; not in `$(...)`, which asks for a name.

Only words at these places count: `echo torchrun` starts nothing.
"""
_LAUNCHER_IN_SHELL = re.compile(
    rf"{_AT}((?:python[\d.]*\s+-m\s+torch\.distributed\.(?:run|launch)|torchrun|deepspeed|"
    r"accelerate\s+launch|(?:llamafactory-cli|lmf)\s+train|trl\s+(?:sft|dpo|grpo|kto|reward|rloo)|"
    r"(?:swift|megatron)\s+(?:pt|sft|rlhf)|fabric\s+run)\s[^\n;|&<>]*)"
)
_NODES_IN_SHELL = re.compile(
    rf"(?:{_AT}|\b\w+=[\"'])(srun|(?:mpi|orte|p)run|mpiexec(?:\.hydra)?|pdsh|clush|ssh)\s"
)
_COUNTS_ITSELF = re.compile(r"SLURM_(?:PROCID|NODEID)|\bNODE_RANK")


@dataclass(frozen=True, kw_only=True)
class Command:
    """The parts of a command.

    Attributes:
        is_line: the words are of a line for a shell, in their quotes.
        front: `env` and its words.
        launcher: a key of `LAUNCHERS`; empty: none.
        own: the words that start the launcher, such as `accelerate launch`, or the program alone.
        rest: what follows.
    """

    is_line: bool
    front: tuple[str, ...]
    launcher: str
    own: tuple[str, ...]
    rest: tuple[str, ...]

    def variable(self, name: str) -> str | None:
        """What the command sets a variable to; None: it does not."""
        typed = [word for word in self.front if word.startswith(f"{name}=")]
        return typed[-1].partition("=")[2].strip("'\"") if typed else None

    def argv(self, words: Sequence[str], without: frozenset[str] = frozenset()) -> list[str]:
        """The words to execute, after `front` without some variables."""
        front = [word for word in self.front if word.partition("=")[0] not in without]
        if front == ["env"]:
            front = []
        if self.is_line:
            return ["bash", "-c", " ".join(["exec", *front, *words])]
        return [*front, *words]


@dataclass(frozen=True, kw_only=True)
class _Option:
    """An option of a launcher: its first name in `_Launcher.options`, its value, its words."""

    name: str
    value: str
    words: tuple[str, ...]


def as_words(command: str | Sequence[str]) -> tuple[str, ...]:
    r"""The words of a command, as a shell reads them.

    What only a shell can do (`|`, `&&`, `$NAME`, `*.txt`) becomes `bash -c`. Variables before the
    program become `env`. A backslash at a line's end joins lines, also where YAML joined them.

    Raises:
        WrongValueError: there is no word, or a quote is not closed.
    """
    if isinstance(command, str):
        text = re.sub(r"(?:(?<=\s)|^)\\(?=\s)", "", command.replace("\\\n", "")).strip()
        bare = _bare(text)
        if re.search("['\"]", bare):
            raise WrongValueError("has a quote that is not closed", "Close it, or omit it.")
        if _OPERATOR.search(bare) or _EXPANDED.search(bare):
            return ("bash", "-c", text)
        words = tuple(shlex.split(text))
    else:
        words = tuple(command)
    if not words:
        raise WrongValueError("is empty", "Write what you type on the laptop.")
    return ("env", *words) if re.match(r"[A-Za-z_]\w*=", words[0]) else words


def _bare(text: str) -> str:
    """The text without what its quotes protect from the shell; `$NAME` acts in double quotes."""

    def left(quoted: re.Match[str]) -> str:
        inside = re.sub(r"\\.", "", quoted[0]) if quoted[0].startswith('"') else ""
        acts = re.search(r"`|\$\((?!\()|\$[\w{(@*#?]", inside)
        return acts[0] if acts else "_"

    return re.sub(_ARITHMETIC, "$_", re.sub(_QUOTED, left, text, flags=re.DOTALL))


def read_command(words: Sequence[str]) -> Command:
    """Finds the launcher in a command, behind `env`, `nohup`, `time` and `python -m`.

    Raises:
        UsageError: there is no program in it.
    """
    is_line = [*words[:2]] == ["bash", "-c"] and len(words) == 3
    is_line = is_line and not _OPERATOR.search(_bare(words[-1]))
    rest = [word[0] for word in _WORD.finditer(words[2])] if is_line else [*words]
    if rest and re.match(r"[A-Za-z_]\w*=", rest[0]):
        rest.insert(0, "env")
    front: list[str] = []
    while rest and (rest[0] in _AROUND or Path(rest[0]).name == "env"):
        end = 1
        while rest[0] not in _AROUND and re.match(r"-|\w+=", "".join(rest[end : end + 1])):
            end += 2 if rest[end] in ("-u", "-C") else 1
        front += rest[:end] if end > 1 else []
        rest = rest[end:]
    if not rest:
        raise UsageError(f"`{shlex.join(words)}` starts nothing.", "Name a program after it.")
    end = 1
    if re.fullmatch(r"python[\d.]*", Path(rest[0]).name):
        while end < len(rest) and rest[end].startswith("-") and rest[end] != "-m":
            end += 1
        end = end + 2 if rest[end : end + 1] == ["-m"] and rest[end + 1 :] else 1
    launcher, subcommands = _PROGRAMS.get(Path(rest[end - 1]).name, ("", ""))
    if subcommands and rest[end : end + 1]:
        launcher = launcher if rest[end] in subcommands.split() else ""
        end += 2 if rest[end : end + 2] == ["run", "model"] else 1  # its name before lightning 2.3
    elif subcommands:
        launcher = ""
    end = end if launcher else 1
    return Command(
        is_line=is_line,
        front=tuple(front),
        launcher=launcher,
        own=tuple(rest[:end]),
        rest=tuple(rest[end:]),
    )


def _options(command: Command) -> tuple[list[_Option], list[str]]:
    """The options of a command's launcher, and the script with its own words.

    Raises:
        UsageError: the launcher has no such option.
    """
    options: list[_Option] = []
    script: list[str] = []
    left = [*command.rest]
    while left and LAUNCHERS[command.launcher].options:
        option = _option(command.launcher, left)
        if option is not None:
            options.append(option)
            del left[: len(option.words)]
        elif command.launcher == "trl":  # its options may stand after those of its script
            script.append(left.pop(0))
        else:
            break
    return options, script + left


def _option(name: str, words: Sequence[str]) -> _Option | None:
    """The option that the first words are; None: they are the script, or its words."""
    launcher, word = LAUNCHERS[name], words[0]
    if not word.startswith("-") or word in ("-", "--"):
        return None
    typed, equals, value = word.partition("=")
    key = typed.lstrip("-").replace("_", "-")
    if name == "trl" and key not in launcher.ours.split():
        return None
    if not typed.startswith("--") and len(key) > 1 and not equals:  # such as -r3
        key, equals, value = key[0], "=", key[1:]
    rows = {row: row.rstrip("=").split("|") for row in launcher.options.split()}
    found = [row for row, names in rows.items() if any(fnmatchcase(key, one) for one in names)]
    if not found and name != "accelerate":  # argparse takes the beginning of a name for it
        found = [row for row, names in rows.items() if any(one.startswith(key) for one in names)]
        found = found if len(found) == 1 else []
    if not found:
        known = [f"--{one}" for names in rows.values() for one in names if "*" not in one]
        near = nearest_name(typed.replace("_", "-"), known) or ""
        question = f"Did you mean `{near.replace('-', '_').replace('__', '--', 1)}`? "
        raise UsageError(
            f"`{name}` has no option `{typed}`.",
            f"{question if near else ''}Options of the script come after its name. If your version "
            "has this option: `launch: node`, and the command says itself how the nodes meet.",
        )
    takes_next = found[0].endswith("=") and not equals
    first = rows[found[0]][0]
    return _Option(
        name=key if "*" in first else first,
        value=(" ".join(words[1:2]) if takes_next else value).strip("'\""),
        words=tuple(words[: 2 if takes_next else 1]),
    )


def plan_launch(
    words: Sequence[str],
    places: Places,
    asked: Literal["auto", "rank", "node", "once"],
    folder: Path,
) -> Launch:
    """How the job starts a command.

    Args:
        words: from `as_words`.
        asked: `launch:` of the run file; `auto`: as the command's words say.
        folder: of the project.

    Raises:
        UsageError: the command cannot be started so; the remedy has the line that can.
    """
    command = read_command(words)
    if asked == "node":  # also a launcher: the user says how its nodes meet
        each = max(places.gpus, 1)
        return _launch("node", each, "", f"`launch: node`: NPROC_PER_NODE is {each}")
    if asked == "rank":
        return _ranks(command, places)
    if asked == "once":
        return _once(command, places)
    if command.launcher:
        return _by_launcher(command, places, folder)
    _check_not_for_nodes(command, places)
    script, start = shell_script(command.argv([*command.own, *command.rest]), folder)
    if script:
        return _shell(script, shell_code(start), places)
    if places.tasks is not None and places.tasks * places.nodes > 1:
        return _ranks(command, places)
    if places.nodes > 1:
        raise _one_of_several(command, places)
    return _once(command, places)


def _launch(
    mode: Literal["rank", "node", "once"], processes: int, launcher: str, *notes: str
) -> Launch:
    return Launch(
        mode=mode,
        tasks_per_node=processes if mode == "rank" else 1,
        processes=processes,
        launcher=launcher,
        notes=notes,
    )


def _ranks(command: Command, places: Places) -> Launch:
    tasks = places.tasks or max(places.gpus, 1)
    if command.launcher and tasks > 1:
        raise UsageError(
            f"srun would start `{command.launcher}` {tasks} times on each node, and each would "
            "start all ranks: the whole training several times, over the same files.",
            f"Omit `tasks_per_node` and `launch`: `{command.launcher}` starts the ranks of its "
            "node.",
        )
    notes = [f"{human_count(tasks, 'task')} on each node, each with a RANK of its own"]
    if places.gpus and tasks > places.gpus:
        notes.append(f"{tasks} tasks share the {human_count(places.gpus, 'GPU')} of their node")
    elif tasks < places.gpus:
        notes.append(_idle(places.gpus - tasks, tasks))
    return _launch("rank", tasks, "", *notes)


def _once(command: Command, places: Places) -> Launch:
    name = Path(command.own[0]).name
    notes = []
    if places.nodes > 1:
        notes.append(f"`{name}` starts on the first of {places.nodes} nodes alone")
    if places.gpus > 1:
        line = _with_torchrun(command)
        notes.append(
            f"`{name}` starts one process, which has all {places.gpus} GPUs"
            + (f"; one process per GPU: `command: {line}`" if line else "")
        )
    return _launch("once", 0 if places.gpus > 1 else 1, "", *notes)


def _by_launcher(command: Command, places: Places, folder: Path) -> Launch:
    if places.tasks is not None and places.tasks > 1:
        return _ranks(command, places)  # which says why it cannot
    processes, notes = _processes(command, places, folder)
    options, script = _options(command)
    if not script and command.launcher != "trl":
        raise UsageError(
            f"`{shlex.join(command.own)}` is given no script.", "Name it after the options."
        )
    ours = LAUNCHERS[command.launcher].ours.split()
    replaced = [one.words[0] for one in options if one.name in ours]
    replaced += [one for one in command.front if one.partition("=")[0] in _TYPED_MEETING]
    if replaced:
        notes.append(f"`{' '.join(replaced)}`: replaced, because the job says how its nodes meet")
    return _launch("node", processes, command.launcher, *notes)


def _idle(gpus: int, processes: int) -> str:
    return (
        f"{human_count(gpus, 'GPU')} of each node stays idle: the command starts "
        f"{processes or 'no'} of its processes there"
    )


def _check_not_for_nodes(command: Command, places: Places) -> None:
    """Refuses what starts processes on nodes, or in an environment, itself.

    Raises:
        UsageError: the remedy has the line without it.
    """
    name = Path(command.own[0]).name
    words = [*command.own, *command.rest]
    inner = _inner(words)
    if name in STARTS_NODES:
        total = re.search(r"\s(?:-np?|--ntasks)[ =]?(\d+)", " ".join(words))
        tasks = int(total[1]) // places.nodes if total else places.gpus
        is_rank = not read_command(inner).launcher and shell_script(inner)[0] == ""
        several = f" and `slurm: {{tasks_per_node: {max(tasks, 1)}}}`" if is_rank else ""
        raise UsageError(
            f"`{name}` in `command`: the job itself starts the command on its nodes.",
            f"Write `command: {shlex.join(inner)}`{several}.",
        )
    if name in _ENVIRONMENTS and "run" in command.rest:
        raise UsageError(
            f"`{name} run` makes an environment on this machine; a job has the bundle's.",
            f"Write `command: {shlex.join(inner)}`",
        )


def _inner(words: Sequence[str]) -> list[str]:
    """The command that another program starts: from the first word that is a program's."""
    for n, word in enumerate(words[1:], 1):
        name = Path(word).name
        if re.search(r"\.py$|\.sh$", name):
            return ["python" if name.endswith(".py") else "bash", *words[n:]]
        if re.fullmatch(r"python[\d.]*", name) or name in _PROGRAMS or name in _SHELLS:
            return [*words[n:]]
    return [*words[-1:]]


def _with_torchrun(command: Command) -> str:
    """The line that starts a Python script by torchrun; empty: it is none."""
    words = [*command.own, *command.rest]
    starts = [n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")]
    if not Path(words[0]).name.startswith("python") or not starts or "-c" in words[: starts[0]]:
        return ""
    return shlex.join(["torchrun", *words[starts[0] :]])


def _one_of_several(command: Command, places: Places) -> UsageError:
    name = Path(command.own[0]).name
    line = _with_torchrun(command)
    tasks = f"`slurm: {{tasks_per_node: {max(places.gpus, 1)}}}`"
    return UsageError(
        f"`{name}` is one process, and the job has {places.nodes} nodes: it would run on the first "
        "alone.",
        (f"One process per GPU: `command: {line}`. " if line else "")
        + f"A script that reads SLURM_PROCID or RANK itself: {tasks}. A program that starts the "
        "processes of its node, and reads NNODES and NODE_RANK: `launch: node`. Else: "
        "`slurm: {nodes: 1}`.",
    )


def shell_script(words: Sequence[str], folder: Path = Path()) -> tuple[str, bytes]:
    """What bash or sh would read: its name, and the beginning of its text; empty: no script.

    Args:
        words: a command without `env`.
        folder: that a relative path starts from.
    """
    name = Path(words[0]).name
    if name not in _SHELLS:
        start = _beginning(folder / words[0])
        return (words[0], start) if re.match(rb"#!.*\b(ba|da|z)?sh\b", start) else ("", b"")
    n = 1
    while n < len(words) and words[n].startswith("-"):
        if re.fullmatch("-[a-z]*c", words[n]):
            return name, os.fsencode("".join(words[n + 1 : n + 2]))
        n += 2 if words[n] in ("-o", "-O") else 1
    script = "".join(words[n : n + 1])
    return script or name, _beginning(folder / script)


def _beginning(path: Path) -> bytes:
    try:
        return read_start(path, 2**16)
    except OSError:  # also a pipe, as in `bash <(...)`: what we read, bash would not
        return b""


def shell_code(script: bytes) -> str:
    """The text of a shell script without its comments."""
    return re.sub(r"(?m)(^|\s)#.*", r"\1", script.decode(errors="replace"))


def launcher_in(code: str) -> str:
    """The line in a shell script that starts a launcher of ranks; empty: there is none."""
    found = _LAUNCHER_IN_SHELL.search(code.replace("\\\n", " ") + " ")
    return " ".join(found[1].split()) if found else ""


def starter_in(code: str) -> re.Match[str] | None:
    """The program in a shell script that starts processes on other nodes, as group 1."""
    return _NODES_IN_SHELL.search(code)


def _shell(script: str, code: str, places: Places) -> Launch:
    """A shell script runs as it is, on the first node; `srun` in it reaches the others.

    Raises:
        UsageError: there is a launcher in it that would train on one of several nodes, or in each
            of several tasks.
    """
    line = launcher_in(code)
    tasks = places.tasks or 1
    if starter_in(code) is None and line and (places.nodes > 1 or tasks > 1):
        where = f"on the first of {places.nodes} nodes alone" if tasks == 1 else f"{tasks} times"
        raise UsageError(
            f"`{' '.join(line.split()[:2])}` in {script} would start ranks {where}.",
            f"Write that line in the run file: `command: {line}`. A script that reads NNODES and "
            "NODE_RANK, and is meant for each node: `launch: node`.",
        )
    if starter_in(code) is None and not line and tasks > 1:
        return _launch("rank", tasks, "", f"{script} starts {tasks} times on each node")
    notes = []
    if places.nodes > 1 and starter_in(code) is None:
        notes.append(f"no `srun` is in {script}: it runs on the first of {places.nodes} nodes")
    return _launch("once", 0, "", *notes)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[1-9]\d*", text) else None


def _processes(command: Command, places: Places, folder: Path) -> tuple[int, list[str]]:
    """The ranks on each node, and why so many.

    Raises:
        UsageError: the command says more than there are GPUs.
    """
    options, _ = _options(command)
    typed = {one.name: one.value for one in options}
    count = LAUNCHERS[command.launcher].count
    text = typed.get(count) if count else command.variable("NPROC_PER_NODE")
    number, notes = _number(text), []
    gpus = places.gpus
    if command.launcher in ("accelerate", "trl"):
        if number is not None:  # that of all machines
            number //= _number(typed.get("num-machines")) or 1
            number = gpus if gpus and number == gpus * places.nodes else max(number, 1)
        file = accelerate_file(command, folder)
        if not gpus and number is None and file.get("num_processes"):
            number = max(file["num_processes"] // int(file.get("num_machines") or 1), 1)
        notes += _notes_on_file(command, file, typed.get("config-file"))
    if count == "devices" and text and "," in text:
        number = text.count(",") + 1
    if number is None and (chosen := typed.get("include") or typed.get("gpu-ids")):
        number = None if chosen == "all" else len(chosen.split("@")[0].split(","))
    visible = command.variable(_VISIBLE) or ""
    if number is None and 0 < visible.count(",") + 1 < gpus and re.search(r"\d", visible):
        number = visible.count(",") + 1
    if number is None:
        if gpus > 1:
            notes.append(f"{gpus} processes on each node, one per GPU of `slurm:`")
        return gpus or (0 if text else 1), notes
    if gpus and number > gpus and "cpu" not in typed:
        raise UsageError(
            f"the command starts {number} processes on each node, and `slurm:` asks for "
            f"{human_count(gpus, 'GPU')} there.",
            f"Write `slurm: {{gpus_per_node: {number}}}`, or {gpus} in the command.",
        )
    if number < gpus:
        notes.append(_idle(gpus - number, number))
    return number, notes


def accelerate_file(command: Command, folder: Path) -> dict[str, Any]:
    """The config file of `accelerate launch`; empty: there is none, or it cannot be read."""
    options, _ = _options(command)
    named = "".join([one.value for one in options if one.name == "config-file"][-1:])
    if command.launcher == "trl" and "--accelerate_config" in command.rest[:-1]:
        named = command.rest[command.rest.index("--accelerate_config") + 1]
        if not (folder / named).is_file():  # a name of a file in trl
            return {"distributed_type": "NO" if named == "single_gpu" else named}
    try:
        config = yaml.safe_load((folder / named if named else _default_file()).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # accelerate itself says what is wrong with it
        return {}
    return config if isinstance(config, dict) else {}


def _default_file() -> Path:
    """What `accelerate config` writes, and `accelerate launch` reads where no file is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface")
    return home / "accelerate" / "default_config.yaml"


def _notes_on_file(command: Command, file: Mapping[str, Any], named: str | None) -> list[str]:
    if not file:
        return []
    if named is None and command.launcher == "accelerate":
        return [
            f"{_default_file()} is of this machine: to send its settings with the run, copy it "
            "into the project and name it by --config_file"
        ]
    own = [key for key in ("num_processes", "num_machines", "main_process_ip") if file.get(key)]
    if not own:
        return []
    return [f"{', '.join(own)} of {named or 'the config file'}: replaced, as `slurm:` says"]


def words_on_node(
    words: Sequence[str], launch: Launch, node: Node, folder: Path
) -> tuple[dict[str, str], list[str]]:
    """The variables to set on one node, and the words to execute there.

    Args:
        words: from `as_words`.
        launch: from `plan_launch`.
        folder: of the project, as in `plan_launch`.

    Raises:
        UsageError: as `plan_launch`.
    """
    command = read_command(words)
    if launch.mode != "node":
        return {}, command.argv([*command.own, *command.rest])
    meeting = {
        "NNODES": str(node.nodes),
        "NODE_RANK": str(node.number),
        "MASTER_ADDR": node.master,
        "MASTER_PORT": str(node.port),
        "NPROC_PER_NODE": str(node.processes),
    }
    if not launch.launcher:
        return meeting, command.argv([*command.own, *command.rest], _TYPED_MEETING)
    write = {
        "torchrun": _torchrun,
        "accelerate": _accelerate,
        "trl": _accelerate,
        "deepspeed": _deepspeed,
        "fabric": _fabric,
    }
    variables: dict[str, str] = {}
    if launch.launcher in write:
        variables, line = write[launch.launcher](command, node, folder)
    else:
        line = [*command.own, *command.rest]
        if node.nodes * node.processes > 1:  # else they start no torchrun, as on the laptop
            variables = meeting
        if launch.launcher == "llamafactory" and variables:
            variables |= {"FORCE_TORCHRUN": "1"}
    # Slurm gives a job its GPUs, whatever their numbers are on the user's machine.
    return variables, command.argv(line, _TYPED_MEETING | {"NPROC_PER_NODE", _VISIBLE})


def _kept(options: Sequence[_Option], without: Sequence[str]) -> list[str]:
    return [word for one in options if one.name not in without for word in one.words]


def _torchrun(command: Command, node: Node, folder: Path) -> tuple[dict[str, str], list[str]]:
    options, script = _options(command)
    ours = [
        f"--nnodes={node.nodes}",
        f"--node_rank={node.number}",
        f"--master_addr={node.master}",
        f"--master_port={node.port}",
    ]
    without = _TORCHRUN.ours.split()
    if node.processes:  # else the command says it in a word, such as `cpu`
        ours.append(f"--nproc_per_node={node.processes}")
        without.append(_TORCHRUN.count)
    return {}, [*command.own, *_kept(options, without), *ours, *script]


def _accelerate(command: Command, node: Node, folder: Path) -> tuple[dict[str, str], list[str]]:
    options, script = _options(command)
    names = {one.name for one in options}
    file = accelerate_file(command, folder)
    kind = file.get("distributed_type") or "NO"  # YAML: NO is no
    ranks = node.nodes * node.processes
    # It would start one process on each node, each alone; with one rank in all it refuses the word.
    starts_ranks = names & {"use-deepspeed", "use-fsdp", "use-megatron-lm", "tpu"}
    is_alone = kind in ("NO", "MULTI_CPU") and not starts_ranks and ranks > 1
    uses_cpu = bool("cpu" in names or kind == "MULTI_CPU" or file.get("use_cpu"))
    ours = [
        f"--num_machines={node.nodes}",
        f"--machine_rank={node.number}",
        f"--num_processes={ranks}",
        f"--main_process_port={node.port}",
    ]
    if is_alone:
        ours.append("--multi_gpu")
    if file.get("gpu_ids", "all") != "all":
        ours.append("--gpu_ids=all")
    if node.nodes > 1:
        # `standard`: else it starts DeepSpeed's launcher, which wants a hostfile and ssh.
        ours += [
            f"--main_process_ip={node.master}",
            "--rdzv_backend=static",
            "--deepspeed_multinode_launcher=standard",
        ]
    without = _ACCELERATE.ours.split()
    variables = {}
    if is_alone and uses_cpu:
        # For CPUs it has no launcher of several nodes: its launcher of GPUs does it.
        without.append("cpu")
        variables = {"ACCELERATE_USE_CPU": "true"}
    return variables, [*command.own, *ours, *_kept(options, without), *script]


def _deepspeed(command: Command, node: Node, folder: Path) -> tuple[dict[str, str], list[str]]:
    options, script = _options(command)
    without = _DEEPSPEED.ours.split()
    if node.nodes == 1:
        return {}, [*command.own, f"--master_port={node.port}", *_kept(options, without), *script]
    # `deepspeed` reaches other nodes by ssh. This module is what it starts on each of them.
    seen = os.environ.get(_VISIBLE, "").split(",")
    gpus = seen if len(seen) >= node.processes and seen[0] else [*map(str, range(node.processes))]
    world = {str(number): gpus[: node.processes] for number in range(node.nodes)}
    own = command.own[0]
    if not Path(own).name.startswith("python"):
        own = str(Path(own).with_name("python")) if "/" in own else "python"
    return {}, [
        *(own, "-u", "-m", "deepspeed.launcher.launch"),
        f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
        f"--node_rank={node.number}",
        f"--master_addr={node.master}",
        f"--master_port={node.port}",
        *_kept(options, [*without, "num-gpus", "include", "exclude", "save-pid", "autotuning"]),
        *script,
    ]


def _fabric(command: Command, node: Node, folder: Path) -> tuple[dict[str, str], list[str]]:
    options, script = _options(command)
    ours = [
        f"--num-nodes={node.nodes}",
        f"--node-rank={node.number}",
        f"--main-address={node.master}",
        f"--main-port={node.port}",
        f"--devices={node.processes}",
    ]
    return {}, [*command.own, *ours, *_kept(options, [*_FABRIC.ours.split(), "devices"]), *script]
