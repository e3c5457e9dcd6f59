"""A task of the run of a command: what srun starts on a node becomes the user's program there.

`runner rank FOLDER command` is started once for each task. It works out which of them it is, serves
the bundle on its node and becomes the command, with the words by which the launchers of all nodes
meet. A shell script runs once; what it starts by its own srun finds the bundle by a task prolog.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import click

from runner.child import runner_command
from runner.exec.user_script import program_of, serve_bundle, tell
from runner.from_stage import quoted, write_atomically
from runner.inputs import check_site
from runner.job.launchers import Launch, Node, words_on_node
from runner.launch.network import free_port_here
from runner.launch.ranks import RankInfo
from runner.run_folder.layout import RunFolder
from runner.slurm.environment import SlurmJobEnvironment

SHELLS = ("bash", "sh", "dash", "zsh")
PROLOG = "prolog.sh"
"""The file in the run folder that Slurm runs before each task of the command's own srun."""


def become(folder: RunFolder, environ: Mapping[str, str]) -> NoReturn:
    """Becomes a task of the command of a run, in its working folder. Does not return.

    What it becomes is in `task.json` of the run folder; which task it is, in Slurm's variables.

    Raises:
        UsageError: as for `run`; or Slurm's variables contradict each other.
        DamageError: as for `run`.
    """
    task = json.loads(folder.task.read_text(encoding="utf-8"))
    launch = Launch(**task["launch"])
    work = folder.work / task["folder"]
    os.chdir(work)
    job = SlurmJobEnvironment.from_environ(environ)
    node = Node(number=0, nodes=1, processes=launch.processes, master="127.0.0.1", port=0, job="")
    own = {"PWD": str(work), "PATH": _path_of_environment(environ)}
    if job is not None and job.step is not None and launch.mode != "once":
        info = RankInfo.of(environ)
        own |= info.variables() if launch.mode == "rank" else {"MASTER_PORT": str(info.port)}
        node = replace(
            node, number=info.rank, nodes=job.num_nodes, master=info.master, port=info.port
        )
    node = replace(node, job=environ.get("SLURM_JOB_ID", ""), port=node.port or free_port_here())
    variables, words = words_on_node(task["words"], launch, node, folder.work)
    whole = {**environ, **own, **variables}
    bundle = Path(task["bundle"])
    program = program_of(words, "command:", whole)
    check_site()
    if launch.mode == "once" and job is not None:
        whole["SLURM_TASK_PROLOG"] = str(_write_prolog(folder))
    whole = serve_bundle(
        bundle,
        whole,
        program,
        say=partial(_missed, folder),
        between=partial(pass_on, folder.limit, os.getpid(), list[str]()),
    )
    os.execve(program, words, whole)


def _path_of_environment(environ: Mapping[str, str]) -> str:
    """PATH with the programs of the environment that runs this, which check has looked in.

    A container has the PATH of its image, whose `python` is another one.
    """
    own, path = str(Path(sys.executable).parent), environ.get("PATH", os.defpath)
    return path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"


def _write_prolog(folder: RunFolder) -> Path:
    path = folder.root / PROLOG
    words = " ".join(map(quoted, runner_command("rank", str(folder.root), "prolog")))
    write_atomically(path, f"#!/bin/sh\nexec {words}\n".encode())
    path.chmod(0o755)
    return path


def lend(folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Serves the bundle to a task that the command's own srun is about to start on this node.

    This is Slurm's task prolog (srun(1), --task-prolog): each line `export NAME=VALUE` that it
    prints sets a variable of the task, whose process is SLURM_TASK_PID.

    Raises:
        StageError: as for `serve_bundle`.
    """
    task = json.loads(folder.task.read_text(encoding="utf-8"))
    # stderr is the same pipe as stdout here, and slurmstepd waits until every process has closed
    # it; the server, which goes on, needs another one.
    log = folder.logs / f"hub-{socket.gethostname()}.log"
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 2)
    process = int(environ["SLURM_TASK_PID"])
    variables = serve_bundle(
        Path(task["bundle"]),
        environ,
        sys.executable,
        say=partial(_missed, folder),
        process=process,
        between=partial(pass_on, folder.limit, process, list[str]()),
    )
    for name, value in variables.items():
        if environ.get(name) != value and "\n" not in value:
            click.echo(f"export {name}={value}")


def _missed(folder: RunFolder, text: str) -> None:
    """Prints what the server says, and keeps the entry that the manifest lacks."""
    tell(text)
    if entry := text.partition("fetch again:\n")[2]:
        with folder.missing.open("a", encoding="utf-8") as file:
            file.write(f"{entry}\n")


def pass_on(limit: Path, program: int, sent: list[str]) -> None:
    """Sends the ranks below a program the signal that a file names, once.

    Args:
        limit: the file; it is there when the job's time is nearly over.
        program: its process number.
        sent: gets the name, and keeps it from being sent again.

    The ranks alone: a launcher that gets SIGTERM kills its ranks 30 s later (torchrun), and one
    that gets SIGUSR1 ends at once. Without ranks, what a shell script has started: the shell would
    end before it, and with the shell the job.
    """
    try:
        name = limit.read_text(encoding="ascii").strip()
    except OSError:
        return
    if not name or sent:
        return
    sent.append(name)
    for rank in topmost(program, _has_rank) or topmost(program, _is_no_shell):
        with suppress(ProcessLookupError):
            os.kill(rank, signal.Signals[f"SIG{name}"])


def topmost(program: int, is_wanted: Callable[[int], bool]) -> list[int]:
    """A program or the processes below it, without those below one that is wanted."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # proc_pid_stat(5): the name, in brackets, can have spaces; then the state, the parent.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, below = list[int](), [program]
    while below:
        process = below.pop()
        if is_wanted(process):
            found.append(process)
        else:
            below += children.get(process, [])
    return found


def _has_rank(process: int) -> bool:
    with suppress(OSError):
        return b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{process}/environ").read_bytes()
    return False


def _is_no_shell(process: int) -> bool:
    with suppress(OSError):
        # Also no srun: its tasks get the signal where `lend` serves them.
        return Path(f"/proc/{process}/comm").read_text().strip() not in (*SHELLS, "srun")
    return False
