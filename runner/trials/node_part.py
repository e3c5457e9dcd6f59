"""The job of a rehearsal, on its nodes: the launcher in the batch script, and its ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from runner import isolation, offline
from runner.errors import StageError, UsageError, write_atomically
from runner.job.findings import Finding, errors_in, errors_of, fact_line
from runner.job.training_run import TrainingRun
from runner.launch.network import other_hosts, own_address_on_shared_network, this_host
from runner.launch.rank_process import Rank, end_rank, run_rank
from runner.launch.ranks import RankInfo, Start
from runner.launch.reach import HOW_TO_CHOOSE
from runner.launch.resolved import Resolved, read_resolved
from runner.launch.supervise import start_work
from runner.run_folder.layout import RunFolder
from runner.slurm.environment import SlurmJobEnvironment, host_names
from runner.trials.node_look import DONE, WAIT_S, leave, look_at_node, try_ports, wait_for_all

FOLDER = "AIRLIFT_REHEARSAL"
"""The folder of the rehearsal, in the environment of its job."""

BLOCKED, RECORD, BANDWIDTH = "blocked", "node.json", "all-reduce.json"
MEASURES_S = 240.0
"""How long a rank waits until its node's devices are tried."""


def is_part(environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to the job of a rehearsal."""
    return FOLDER in environ


def be_its_launcher(load: Callable[[], TrainingRun], environ: Mapping[str, str]) -> int:
    """Does the work of the job's launcher, in the batch script.

    Args:
        load: reads the run file and the bundle.
        environ: the environment variables.

    Returns:
        The exit code.
    """
    folder, host = Path(environ[FOLDER]), this_host(environ)
    offline.set_variables(os.environ)
    isolation.isolate(os.environ, lambda _line: None)
    if not folder.is_dir():
        raise _not_seen(host, folder)
    try:
        return launch(load(), environ)
    except StageError as error:  # what this node does not see
        _write(folder, host, errors_of(error))
        raise


def launch(run: TrainingRun, environ: Mapping[str, str]) -> int:
    """Starts the ranks of the rehearsal on all nodes of this job; returns the exit code.

    Args:
        run: the run; its folder is the rehearsal's.
    """
    run.folder.make()
    return start_work(Resolved.of(run), "nodes", Start.in_job(environ), environ).exit_code


def be_a_rank(rehearsal: RunFolder, environ: Mapping[str, str]) -> NoReturn:
    """Does the work of a rank: one rank per node looks at its node, then all add up once.

    Raises:
        UsageError: this node does not see the folder.
    """
    folder, host, info = rehearsal.root, this_host(environ), RankInfo.of(environ)
    if not rehearsal.resolved.is_file():
        raise _not_seen(host, folder)
    run = read_resolved(rehearsal).run
    job = SlurmJobEnvironment.from_environ(environ)
    hosts = host_names(job.nodes) if job else [host]
    if info.local_rank == 0:
        _look_at_node(run, folder, host, hosts, info, environ)
    wait_for_all(folder, RECORD, hosts, MEASURES_S)
    if any(folder.glob(f"*.{BLOCKED}")):
        end_rank(0)  # the ranks could only wait for each other

    def work(rank: Rank) -> None:
        from runner.trials.bandwidth import all_reduce

        result = all_reduce(run.config, rank)
        if info.rank == 0:
            write_atomically(folder / BANDWIDTH, json.dumps(result).encode())

    run_rank(rehearsal, os.environ, work)


def _not_seen(host: str, folder: Path) -> UsageError:
    return UsageError(
        f"{host} does not see {folder.parent}.",
        "Choose an --output on a disk that all nodes share.",
    )


def _look_at_node(
    run: TrainingRun,
    folder: Path,
    host: str,
    hosts: Sequence[str],
    info: RankInfo,
    environ: Mapping[str, str],
) -> None:
    """Looks at this node and the ways to the others, and writes what is found."""
    found = list[Finding]()
    try:
        if len(hosts) > 1:
            found += _try_ways(folder, host, hosts, environ)
        found += look_at_node(run, info, environ)
    except Exception as error:  # noqa: BLE001 - the other nodes wait for the record of this one
        found += errors_of(StageError(f"{type(error).__name__}: {error}", exit_code=1))
    if errors_in(found):
        (folder / f"{host}.{BLOCKED}").touch()
    _write(folder, host, found)


def _try_ways(
    folder: Path, host: str, hosts: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Connects this node and the others, both ways, and yields what is found."""
    others = other_hosts(hosts, environ)
    own = own_address_on_shared_network(others)
    if own is not None:
        ways, line = try_ports(folder, host, own[0], hosts)
        yield from [*ways, fact_line(line)]
    else:
        leave(folder, host)
        what = f"no route leads from {host} to {', '.join(others)}."
        yield Finding("error", what, HOW_TO_CHOOSE, 1)
    wait_for_all(folder, DONE, hosts, WAIT_S)


def _write(folder: Path, host: str, found: Iterable[Finding]) -> None:
    document = {"host": host, "findings": [finding.to_json() for finding in found]}
    write_atomically(folder / f"{host}.{RECORD}", json.dumps(document).encode())
