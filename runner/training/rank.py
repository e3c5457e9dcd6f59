"""A rank, from the start of its process to its work. Every rank of every kind of work is this.

The run folder is ready before a rank starts: our launcher, or `runner prepare`, has written
`resolved.pickle` there. Each rank reads it; only the plan comes from rank 0.

`run_rank` is the frame around every kind of work. It sets limits and variables (`become_rank`)
before torch is imported, and records a failure in the run folder (`give_up`).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from runner import offline
from runner.disks import use_local_caches
from runner.errors import LostPeerError, NeverMetError, NoMemoryError
from runner.from_stage import IncompleteError, StageError, print_line, shortage
from runner.inputs import check_site
from runner.job import node_local
from runner.job.training_run import TrainingRun
from runner.launch import network
from runner.launch.outcome import STOPPED_AND_SAVED
from runner.launch.ranks import BY_HAND, TORCH_VARIABLES, Rank, RankInfo, Start, rank_numbers
from runner.launch.resolved import Resolved, check_ready, read_resolved
from runner.launch.train import check_all_installed, set_up, train
from runner.processes import raise_limits, threads_variable
from runner.run_folder.heartbeat import Heartbeat, flight_prefix
from runner.run_folder.layout import RunFolder
from runner.run_folder.run_lock import HeldError

Work = Callable[[], Callable[..., None]]
"""Imports what a rank does with its trainer and the options of the work; that imports torch."""


def be_rank(folder: RunFolder, work: Work, environ: Mapping[str, str]) -> NoReturn:
    """Does the work of a rank whose run folder is ready, and ends the process.

    Raises:
        StageError: this node does not see the run folder.
    """
    if not folder.resolved.is_file():  # before the heartbeat, which would make the folder
        raise StageError(
            f"{platform.node()} does not see {folder.root}.",
            "Choose an --output on a disk that all nodes share.",
            exit_code=1,
        )
    resolved = read_resolved(folder)
    run_rank(folder, environ, lambda rank: _work(rank, resolved, work))


def _work(rank: Rank, resolved: Resolved, work: Work) -> int:
    """Does the work; returns the exit code."""
    from runner.training.setup import run_work

    run_work(rank, resolved, work())
    # Our launcher looks for this file by itself; of another one, the exit code is all that it sees.
    if rank.info.is_ours or not resolved.run.folder.stopped.exists():
        return 0
    if rank.info.rank == 0:
        print_line(STOPPED_AND_SAVED)
    return IncompleteError.exit_code


def join(
    load: Callable[[], TrainingRun],
    work: Work,
    environ: MutableMapping[str, str],
    *,
    dry_run: bool,
    verbose: bool,
) -> NoReturn:
    """Does the work of a rank that srun, torchrun or mpirun started, and ends the process.

    Each rank looks by itself whether the run folder is ready for what it was called with. So all of
    them end at once where it is not, and none waits for another.

    Args:
        load: reads the run file and the bundle.
        environ: gets the variables of a rank.
        dry_run: rank 0 checks and explains, and nothing is started.
        verbose: whether a dry run prints all automatic choices, too.

    Raises:
        StageError: the rank cannot begin. One rank of each node raises it; the others end with its
            exit code.
    """
    numbers = rank_numbers(environ)
    set_up(environ, print_line if numbers.rank == 0 else lambda _line: None)
    if dry_run:
        if numbers.rank != 0:
            raise SystemExit(0)
        info = RankInfo.of(environ)
        num_nodes = info.world_size // info.local_world_size
        start = Start(info.local_world_size, num_nodes=num_nodes)
        raise SystemExit(train(load(), start, dry_run=True, environ=environ, verbose=verbose))
    try:
        run = load()
        finished = run.finished
        if not finished:
            _check_can_begin(run)
    except StageError as error:
        if numbers.local_rank != 0:
            raise SystemExit(error.exit_code) from None
        if note := note_on_inherited_rank_variables(RankInfo.of(environ)):
            print_line(note, err=True)
        raise
    if finished:
        if numbers.rank == 0:
            print_line("\n".join(finished))
        raise SystemExit(0)
    be_rank(run.folder, work, environ)


def _check_can_begin(run: TrainingRun) -> None:
    """Checks that this Python can train the run, and that the run folder is ready.

    Raises:
        UsageError: packages are missing, this Python is not of the environment that the run file
            names, or as for `check_ready`.
    """
    check_all_installed(run, None)
    if run.inputs.environment is not None:
        node_local.check_running(run.inputs.environment)
    check_ready(run)


RECORDED = 2000
"""How many collectives the flight recorder keeps; torch's own advice and newer default."""


def become_rank(folder: RunFolder, environ: Mapping[str, str]) -> Rank:
    """Does what each rank does before torch is imported.

    It starts the heartbeat, sets the rank's variables in `os.environ` and installs the tripwire.

    Args:
        folder: the run folder.

    Raises:
        UsageError: as for `rank_numbers`, `RankInfo.of` and `check_site`.
    """
    numbers = rank_numbers(environ)
    try:
        info = RankInfo.of(environ)
        check_site()
    except StageError as error:
        if numbers.rank == 0:  # the other ranks wait for it
            Heartbeat(folder.logs, 0).fail(f"error: {error}", error.exit_code, consequence=False)
        raise
    heartbeat = Heartbeat(folder.logs, info.rank)
    raise_limits()
    variables, notes = info.network_variables(environ)
    os.environ.update(info.variables())
    os.environ.update(variables)
    os.environ.update(flight_recorder(folder.logs, os.environ))
    threads, line = threads_variable(environ, 1)
    os.environ.update(threads)
    # Logs end in what a person should read, not in bars and in notes of libraries to developers.
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    caches = use_local_caches(os.environ)
    if info.rank == 0:
        said = (note_on_inherited_rank_variables(info), line, *info.notes, *notes, *caches)
        for note in filter(None, said):
            print(note, flush=True)
    offline.tripwire([info.master])
    return Rank(info, heartbeat)


def check_interfaces(info: RankInfo, environ: Mapping[str, str]) -> None:
    """Checks that this node has the interfaces that the user named for ranks on several nodes.

    Raises:
        NeverMetError: it has not; found before torch is imported.
    """
    if info.on_one_node:
        return
    names = [name for _, name in socket.if_nameindex()]
    for name, lacking in network.wrong_interfaces(environ, names).items():
        raise NeverMetError(
            f"node {network.this_host(environ)}: {name}={environ[name]}: there is no interface "
            f"{lacking}; it has {', '.join(names)}",
            f"Unset {name} (each node then takes the interface of its route to the others), or "
            "name one that all nodes have. Running it again unchanged will not help.",
        )


def note_on_inherited_rank_variables(info: RankInfo) -> str:
    """One line where neither our launcher nor torchrun nor srun says that this is a rank.

    Variables that a trial left in the shell let it wait for ranks that were never started.
    """
    if info.started_by != BY_HAND:
        return ""
    waits = f"; it waits for the others at {info.master}, port {info.port}"
    return (
        f"rank {info.rank} of {info.world_size}, as RANK and WORLD_SIZE of this shell say"
        f"{waits if info.world_size > 1 else ''} (not meant? unset {' '.join(TORCH_VARIABLES)})"
    )


def flight_recorder(logs: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which torch writes its last collectives to `logs` when NCCL fails. Pure.

    torch before 2.8 knows the old names only. Newer ones warn about an old name that they read, and
    they read that of the file only to write a dump, so it may always be set. A user's value wins.
    Sources: torch's FlightRecorder.hpp and ProcessGroupNCCL.hpp, 2.6 to 2.13.
    """
    prefix = str(flight_prefix(logs))
    names = {
        _size_name(): str(RECORDED),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
    }
    return {name: value for name, value in names.items() if name not in environ}


def _size_name() -> str:
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        is_old = (int(major), int(minor)) < (2, 8)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        is_old = False
    return "TORCH_NCCL_TRACE_BUFFER_SIZE" if is_old else "TORCH_FR_BUFFER_SIZE"


def end_rank(code: int) -> NoReturn:
    """Ends the process of a rank whose work is done.

    `os._exit`: while Python ends, threads of torch, gloo and NCCL may still be inside its code, and
    that has ended finished ranks with SIGABRT ("terminate called without an active exception").
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run_rank(
    folder: RunFolder, environ: Mapping[str, str], work: Callable[[Rank], int | None]
) -> NoReturn:
    """Does the work of a rank, and ends the process. Every rank of every command is started so.

    Args:
        folder: the run folder.
        work: returns the exit code; None: 0. It imports torch itself; this module does not.
    """
    rank = become_rank(folder, environ)
    try:
        check_interfaces(rank.info, environ)
        code = work(rank)
    except Exception as error:  # noqa: BLE001 - recorded, and the end of this process
        text = f"error: {error}" if isinstance(error, StageError) else traceback.format_exc()
        give_up(rank, text, error)
    end_rank(code or 0)


def give_up(rank: Rank, text: str, error: Exception) -> NoReturn:
    """Records why this rank fails, and ends the process.

    Our launcher prints the first failure once. Without our launcher the reason is printed here.
    `os._exit`, because with other ranks waiting or gone the teardown of C++ threads can hang or
    abort, and lose the exit code.
    """
    fault = error if isinstance(error, StageError) else shortage(error)
    code = fault.exit_code if fault else 1
    # A thread that cannot start has no memory for its stack.
    is_short = fault is not None and not isinstance(error, StageError | RecursionError)
    launched = rank.info.is_ours
    number = rank.info.rank
    try:
        # Where another launcher works in the run folder, its ranks record their failures there.
        if not isinstance(error, HeldError):
            rank.heartbeat.fail(
                text,
                code,
                consequence=isinstance(error, LostPeerError | NeverMetError),
                no_memory=isinstance(error, NoMemoryError) or is_short,
            )
    except OSError:  # often because this disk is full: then the reason is in our output
        launched = False
    with suppress(OSError):
        sys.stdout.flush()
    if launched:
        path = rank.heartbeat.logs / f"rank-{number}.log"
        with suppress(OSError), path.open("a", encoding="utf-8") as log:
            print(text, file=log)
    else:
        print(f"rank {number}: {text}", file=sys.stderr, flush=True)
    os._exit(code)
