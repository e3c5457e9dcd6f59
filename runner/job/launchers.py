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
from pathlib import Path
from typing import Any, Literal

import yaml

from runner.from_stage import UsageError, human_count
from runner.job.commands import (
    BY_VARIABLES,
    ENVIRONMENTS,
    LAUNCHERS,
    MEETING,
    STARTS_NODES,
    VISIBLE,
    Command,
    Option,
    inner_command,
    launcher_in,
    options_of,
    read_command,
    shell_code,
    shell_script,
    starter_in,
)
from runner.job.commands import as_words as as_words


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
    script, start = shell_script([*command.own, *command.rest], folder)
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
        line = with_torchrun(command)
        notes.append(
            f"`{name}` starts one process, which has all {places.gpus} GPUs"
            + (f"; one process per GPU: `command: {line}`" if line else "")
        )
    return _launch("once", 0 if places.gpus > 1 else 1, "", *notes)


def _by_launcher(command: Command, places: Places, folder: Path) -> Launch:
    if places.tasks is not None and places.tasks > 1:
        return _ranks(command, places)  # which says why it cannot
    options, script = options_of(command)
    if any(one.name == "autotuning" for one in options):  # it starts `deepspeed` many times
        return _once(command, places)
    file = accelerate_file(command, folder)
    processes, notes = _processes(command, places, file)
    if not script and command.launcher != "trl":
        raise UsageError(
            f"`{shlex.join(command.own)}` is given no script.", "Name it after the options."
        )
    if file and command.launcher == "accelerate" and "config-file" not in {o.name for o in options}:
        notes.append(
            f"{_default_file()} is of this machine: to send its settings with the run, copy it "
            "into the project and name it by --config_file"
        )
    ours = LAUNCHERS[command.launcher].ours.split()
    replaced = [one.words[0] for one in options if one.name in ours]
    replaced += [key for key in ("num_processes", "num_machines", "main_process_ip") if key in file]
    replaced += [one for one in command.front if one.partition("=")[0] in MEETING | {VISIBLE}]
    if replaced:
        notes.append(
            f"`{' '.join(replaced)}`: replaced, because the job has its own nodes and GPUs"
        )
    return _launch("node", processes, command.launcher, *notes)


def _idle(gpus: int, processes: int) -> str:
    return (
        f"idle on each node: {human_count(gpus, 'GPU')}, because the command starts {processes} "
        "there"
    )


def _check_not_for_nodes(command: Command, places: Places) -> None:
    """Refuses what starts processes on nodes, or in an environment, itself.

    Raises:
        UsageError: the remedy has the line without it.
    """
    name = Path(command.own[0]).name
    words = [*command.own, *command.rest]
    if name in STARTS_NODES:
        inner = inner_command(words)
        total = re.search(r"\s(?:-np?|--ntasks)[ =]?(\d+)", " ".join(words))
        tasks = int(total[1]) // places.nodes if total else places.gpus
        is_rank = not read_command(inner).launcher and shell_script(inner)[0] == ""
        several = f" and `slurm: {{tasks_per_node: {max(tasks, 1)}}}`" if is_rank else ""
        raise UsageError(
            f"`{name}` in `command`: the job itself starts the command on its nodes.",
            f"Write `command: {shlex.join(inner)}`{several}.",
        )
    if name in ENVIRONMENTS and "run" in words:
        inner = inner_command(words[words.index("run") :])
        raise UsageError(
            f"`{name} run` makes an environment on this machine; a job has the bundle's.",
            f"Write `command: {shlex.join(inner)}`",
        )


def with_torchrun(command: Command) -> str:
    """The line that starts a Python script by torchrun; empty: it is none."""
    words = [*command.own, *command.rest]
    starts = [n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")]
    if not Path(words[0]).name.startswith("python") or not starts or "-c" in words[: starts[0]]:
        return ""
    return shlex.join(["torchrun", *words[starts[0] :]])


def _one_of_several(command: Command, places: Places) -> UsageError:
    name = Path(command.own[0]).name
    line = with_torchrun(command)
    tasks = f"`slurm: {{tasks_per_node: {max(places.gpus, 1)}}}`"
    return UsageError(
        f"`{name}` is one process, and the job has {places.nodes} nodes: it would run on the first "
        "alone.",
        (f"One process per GPU: `command: {line}`. " if line else "")
        + f"A script that reads SLURM_PROCID or RANK itself: {tasks}. A program that starts the "
        "processes of its node, and reads NNODES and NODE_RANK: `launch: node`. Else: "
        "`slurm: {nodes: 1}`.",
    )


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
    if line:
        notes.append(f"in {script} `{line}` runs as it is: `slurm:` does not change its processes")
    if places.nodes > 1 and starter_in(code) is None:
        notes.append(f"no `srun` is in {script}: it runs on the first of {places.nodes} nodes")
    return _launch("once", 0, "", *notes)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[1-9]\d*", text) else None


def _processes(command: Command, places: Places, file: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The ranks on each node, and why so many.

    Args:
        file: from `accelerate_file`.

    Raises:
        UsageError: the command says more than there are GPUs.
    """
    options, _ = options_of(command)
    typed = {one.name: one.value for one in options}
    count = LAUNCHERS[command.launcher].count
    text = typed.get(count) if count else command.variable("NPROC_PER_NODE")
    number, notes = _number(text), []
    gpus = places.gpus
    if command.launcher in ("accelerate", "trl"):
        if number is not None:  # that of all machines
            number //= _number(typed.get("num-machines")) or 1
            number = gpus if gpus and number == gpus * places.nodes else max(number, 1)
        in_file = _number(str(file.get("num_processes")))
        if not gpus and number is None and in_file is not None:
            number = max(in_file // (_number(str(file.get("num_machines"))) or 1), 1)
    if count == "devices" and text and "," in text:
        number = text.count(",") + 1
    if number is None and (chosen := typed.get("include") or typed.get("gpu-ids")):
        number = None if chosen == "all" else len(chosen.split("@")[0].split(","))
    visible = command.variable(VISIBLE) or ""
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
    """The config file of `accelerate launch`; empty: there is none.

    Of a file that cannot be read here, `distributed_type` is not known, and not `NO`.
    """
    if command.launcher not in ("accelerate", "trl"):
        return {}
    options, _ = options_of(command)
    named = "".join([one.value for one in options if one.name == "config-file"][-1:])
    named = os.path.expandvars(named)
    if command.launcher == "trl" and "--accelerate_config" in command.rest[:-1]:
        named = command.rest[command.rest.index("--accelerate_config") + 1]
        if not (folder / named).is_file():  # a name of a file in trl
            return {"distributed_type": "NO" if named == "single_gpu" else named}
    try:
        config = yaml.safe_load((folder / named if named else _default_file()).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # accelerate itself says what is wrong with it
        return {"distributed_type": "unknown"} if named else {}
    return config if isinstance(config, dict) else {}


def _default_file() -> Path:
    """What `accelerate config` writes, and `accelerate launch` reads where no file is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface")
    return home / "accelerate" / "default_config.yaml"


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
    itself = [*words] if command.is_line else [*command.front, *command.own, *command.rest]
    if launch.mode != "node":
        return {}, itself
    meeting = {
        "NNODES": str(node.nodes),
        "NODE_RANK": str(node.number),
        "MASTER_ADDR": node.master,
        "MASTER_PORT": str(node.port),
        "NPROC_PER_NODE": str(node.processes),
    }
    if not launch.launcher:
        return meeting, itself
    options, script = options_of(command)
    launcher = LAUNCHERS[launch.launcher]
    ours = launcher.words + (f" {launcher.each}" if node.processes else "")
    values = {**vars(node), "ranks": node.nodes * node.processes}
    own, added = [*command.own], ours.format(**values).split()
    without = [*launcher.ours.split(), *([launcher.count] if node.processes else [])]
    variables: dict[str, str] = {}
    if launch.launcher in ("accelerate", "trl"):
        variables, more = _accelerate(command, options, values["ranks"], folder)
        added += more
        without += ["cpu"] if variables else []
    elif launch.launcher == "deepspeed":
        own = _deepspeed(own[0], node)
    elif launcher is BY_VARIABLES and values["ranks"] > 1:  # else it starts no torchrun
        variables = {**meeting, "FORCE_TORCHRUN": "1"}
    kept = [word for one in options if one.name not in without for word in one.words]
    # Slurm gives a job its GPUs, whatever their numbers are on the user's machine.
    typed = MEETING | {"NPROC_PER_NODE", VISIBLE}
    return variables, command.argv([*own, *added, *kept, *script], typed)


def _accelerate(
    command: Command, options: Sequence[Option], ranks: int, folder: Path
) -> tuple[dict[str, str], list[str]]:
    """The variables and words with which its launcher of several ranks starts, where it would not.

    Without them it starts one process on each node, and each trains alone.
    """
    names = {one.name for one in options}
    file = accelerate_file(command, folder)
    kind = file.get("distributed_type") or "NO"  # YAML: NO is no
    words = ["--gpu_ids=all"] if file.get("gpu_ids", "all") != "all" else []
    has_kind = names & {"use-deepspeed", "use-fsdp", "use-megatron-lm", "tpu"}
    if kind not in ("NO", "MULTI_CPU") or has_kind or ranks == 1:
        return {}, words
    uses_cpu = "cpu" in names or kind == "MULTI_CPU" or file.get("use_cpu")
    # For CPUs it has no launcher of several nodes: its launcher of GPUs does it.
    return {"ACCELERATE_USE_CPU": "true"} if uses_cpu else {}, [*words, "--multi_gpu"]


def _deepspeed(own: str, node: Node) -> list[str]:
    """What `deepspeed` itself starts on each node, over ssh: the launcher of its ranks."""
    seen = os.environ.get(VISIBLE, "").split(",")
    ranks = max(node.processes, 1)
    gpus = seen if len(seen) >= ranks and seen[0] else [*map(str, range(ranks))]
    world = {str(number): gpus[:ranks] for number in range(node.nodes)}
    if not Path(own).name.startswith("python"):
        own = str(Path(own).with_name("python"))
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    return [own, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={encoded}"]
