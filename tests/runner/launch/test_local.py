"""Ranks on one machine are real processes here; Slurm is given by its environment variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from runner.from_stage import UsageError
from runner.launch import supervise as ranks_module
from runner.launch.ranks import RankInfo, Start, as_launcher
from runner.launch.supervise import start_ranks
from runner.run_folder.layout import RunFolder
from tests.remedies.obeyed import in_it, obeys
from tests.support.waiting import wait_for

ENVIRONMENT = "runner/launch/ranks.py"
STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
BATCH = {name: value for name, value in STEP.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
SALLOC = {n: value for n, value in BATCH.items() if n not in ("SLURM_PROCID", "SLURM_LOCALID")}
ONE_TASK_STEP = STEP | {
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def found(environ: Mapping[str, str], processes: int | None = None) -> str:
    """Whether a process is a rank, or starts ranks itself or by srun ("batch")."""
    start = Start.of(environ, processes)
    if start is None:
        return "rank"
    return "local" if start.job is None else "batch"


ONE_NODE = BATCH | {"SLURM_JOB_NUM_NODES": "1"}
LEFT_BY_THE_SHELL = {"SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("environ", "processes", "verdict"),
    [
        ({}, None, "local"),
        ({"AIRLIFT_RANK": "1"}, 2, "rank"),
        (STEP, None, "rank"),
        (BATCH, None, "batch"),
        (SALLOC, None, "batch"),
        (ONE_NODE, 2, "local"),
        # Newer Slurms have reserved numbers for steps that start no ranks.
        (STEP | {"SLURM_STEP_ID": "4294967291"}, None, "batch"),
        (STEP | {"SLURM_STEP_ID": "4294967290"}, None, "batch"),
        (STEP | LEFT_BY_THE_SHELL, None, "batch"),
        (ONE_TASK_STEP, None, "local"),
        (ONE_TASK_STEP | {"SLURM_PTY_PORT": "4000"}, None, "local"),
    ],
)
def test_a_process_is_a_rank_or_starts_ranks(
    environ: Mapping[str, str], processes: int | None, verdict: str
) -> None:
    assert found(environ, processes) == verdict
    if verdict == "rank":  # `runner bench` would start ranks of its own in each
        with pytest.raises(UsageError, match="starts its ranks itself"):
            as_launcher(Start.of(environ, processes), "bench")


@obeys(ENVIRONMENT, "Use `salloc` with the same options instead of `srun --pty`")
def test_a_pty_shell_that_holds_one_of_two_nodes_is_refused() -> None:
    with pytest.raises(UsageError, match="only this node") as refused:
        found(STEP | {"SLURM_PTY_PORT": "4000"})
    assert "Use `salloc`" in refused.value.remedy
    assert found(SALLOC) == "batch"


@obeys(ENVIRONMENT, "Omit --processes: inside a job, srun starts the ranks on all nodes.")
def test_processes_are_refused_where_they_would_waste_nodes_or_multiply_ranks() -> None:
    with pytest.raises(UsageError, match="2 nodes") as refused:
        found(BATCH, processes=2)
    assert "Omit --processes" in refused.value.remedy
    assert found(BATCH) == "batch"
    with pytest.raises(UsageError, match="already started 4 tasks"):
        found(STEP, processes=2)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (STEP | {"MASTER_ADDR": "localhost"}, "each node would train alone"),
        (STEP | {"MASTER_ADDR": "127.0.0.1"}, "each node would train alone"),
        (STEP | {"MASTER_ADDR": "::1"}, "each node would train alone"),
        (STEP | {"SLURM_STEP_NODELIST": "no-such-host.invalid,n2"}, "has no address"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "unevenly"),
        (STEP | {"SLURM_PROCID": "0"}, "rank 0 is not on the first node"),
        (MPICH | {"MASTER_PORT": "65536"}, "MASTER_PORT='65536' is not a port number"),
        (MPICH | {"MASTER_PORT": "0"}, "MASTER_PORT='0' is not a port number"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT='70000' is not a port number"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({"AIRLIFT_RANK": "1"}, "RANK, WORLD_SIZE.* not set"),
    ],
)
def test_a_place_that_cannot_be_is_refused_and_never_guessed(
    environ: Mapping[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        RankInfo.of(environ)


@obeys(ENVIRONMENT, "Start the ranks with srun, mpirun or torchrun, in a shell without these")
@pytest.mark.parametrize("wrong", [{"RANK": "2"}, {"LOCAL_RANK": "5"}, {"LOCAL_WORLD_SIZE": "4"}])
def test_rank_variables_that_contradict_each_other_are_refused(wrong: Mapping[str, str]) -> None:
    with pytest.raises(UsageError, match="contradict each other") as refused:
        RankInfo.of(TORCHRUN | dict(wrong))
    assert "torchrun, in a shell without these variables" in refused.value.remedy
    assert RankInfo.of(TORCHRUN).rank == 1


def run_local(
    argv: list[str], processes: int, folder: Path, environ: Mapping[str, str] = os.environ
) -> int:
    """Runs ranks on this machine; returns the exit code."""
    return start_ranks(argv, Start(processes), RunFolder(folder), environ).exit_code


def python(script: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + script,
    ]


def test_a_rank_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "KILL_AFTER_S", 0.5)
    ready = tmp_path / "ready"
    script = f"""
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN); open('{ready}', 'w'); time.sleep(600)
while not os.path.exists('{ready}'): time.sleep(0.01)
sys.exit(2)"""
    assert run_local(python(script), 2, tmp_path) == 2


RANK_THAT_WAITS = """
def stop(number, frame):
    open(f'{folder}/got-{rank}', 'a').write(signal.Signals(number).name + '\\n')
    if rank == 0: open(f'{folder}/stopped', 'w').write('signal')
    sys.exit(0)
folder = sys.argv[1]
for name in ('SIGTERM', 'SIGINT', 'SIGUSR1'): signal.signal(getattr(signal, name), stop)
open(f'{folder}/pid-{rank}', 'w').write(str(os.getpid()))
time.sleep(600)"""

Launcher = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Starts a launcher of two ranks as a process of its own and returns once both ranks run."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *under: str) -> subprocess.Popen[str]:
        main = (
            "import pathlib, sys; from tests.runner.launch.test_local import run_local\n"
            f"sys.exit(run_local({[*python(script), str(tmp_path)]!r}, 2, "
            f"pathlib.Path({str(tmp_path)!r})))"
        )
        command = [*under, sys.executable, "-c", main]
        started.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
        wait_for(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)))
        wait_for(lambda: all((tmp_path / f"pid-{rank}").read_text() for rank in range(2)))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM"), ("SIGHUP", "SIGTERM"), ("SIGUSR1", "SIGUSR1")],
)
def test_a_stop_signal_reaches_every_rank_once_and_the_run_can_be_resumed(
    tmp_path: Path, launcher: Launcher, sent: str, arrives: str
) -> None:
    process = launcher(RANK_THAT_WAITS)
    process.send_signal(getattr(signal, sent))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 5
    assert [(tmp_path / f"got-{rank}").read_text() for rank in range(2)] == [f"{arrives}\n"] * 2
    assert "run the same command again to resume" in said
    assert not RunFolder(tmp_path).stopped.exists()


def test_a_hangup_that_nohup_ignores_stops_nothing(tmp_path: Path, launcher: Launcher) -> None:
    """Signals are handled in order: the one that is obeyed is the one that came second."""
    process = launcher(RANK_THAT_WAITS, "nohup")
    for number in (signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "SIGTERM received" in said and "SIGHUP" not in said


COMMAND_THAT_IMPORTS = """
folder = sys.argv[1]
def command():
    '''Imports.'''
    open(f'{folder}/pid-{rank}', 'w').write(str(os.getpid()))
    time.sleep(600)
import click
from runner.cli import main
main.add_command(click.Command('wait', callback=command))
main(['wait'])"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGUSR1])
def test_a_stop_while_the_ranks_import_torch_is_no_failure(
    tmp_path: Path, launcher: Launcher, sent: signal.Signals
) -> None:
    """The ranks are in a command of ours, where SIGTERM is an exception in other processes."""
    process = launcher(COMMAND_THAT_IMPORTS)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 5, said
    assert "a checkpoint if they have made a step" in said
    assert "before a checkpoint was saved: run the same command again" in said
    assert "error" not in said and "failed" not in said and "Ended" not in said


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path, launcher: Launcher) -> None:
    process = launcher(RANK_THAT_WAITS)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    process.kill()
    wait_for(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@obeys(ENVIRONMENT, "unset {}, then start it with `runner train`.")
def test_a_process_without_rank_variables_is_told_which_are_missing() -> None:
    environ = {"AIRLIFT_RANK": "1"}
    with pytest.raises(UsageError, match=r"RANK, WORLD_SIZE.* not set") as refused:
        RankInfo.of(environ)
    assert found(environ) == "rank"
    del environ[in_it(refused.value.remedy, r"(?<=unset )\w+")]
    assert found(environ) == "local"
