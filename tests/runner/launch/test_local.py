"""Ranks on one machine are real processes here; Slurm is given by its environment variables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.launch import local as ranks_module
from runner.launch.place import STOPPED, Place, Start
from runner.launch.start import start_ranks
from runner.run_folder.layout import RunFolder
from tests.remedies.obeyed import in_it, obeys

ENVIRONMENT = "runner/launch/place.py"
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


def found(environ: Mapping[str, str], processes: int | None = None) -> str:
    """Whether a process is a rank, or starts ranks itself or by srun ("batch")."""
    start = Start.of(environ, processes)
    if start is None:
        return "rank"
    return "local" if start.job is None else "batch"


def test_outside_slurm_the_process_launches_locally() -> None:
    assert found({}) == "local"


def test_a_rank_is_known_by_our_flag_by_torchruns_variables_and_by_a_slurm_step() -> None:
    assert found({"AIRLIFT_RANK": "1"}, processes=2) == "rank"
    assert found(TORCHRUN) == "rank"
    assert found(STEP) == "rank"


def test_the_batch_script_and_an_salloc_shell_launch_with_srun() -> None:
    assert found(BATCH) == "batch"
    assert found(SALLOC) == "batch"


@pytest.mark.parametrize("reserved", ["4294967291", "4294967290"])
def test_a_reserved_step_number_of_newer_slurms_is_not_a_rank(reserved: str) -> None:
    assert found(STEP | {"SLURM_STEP_ID": reserved}) == "batch"


def test_step_variables_left_over_from_the_submitting_shell_are_not_believed() -> None:
    assert found(STEP | {"SLURM_NTASKS": "8"}) == "batch"


def test_a_step_of_one_task_is_a_machine_to_launch_on() -> None:
    assert found(ONE_TASK_STEP) == "local"
    assert found(ONE_TASK_STEP | {"SLURM_PTY_PORT": "4000"}) == "local"


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
    assert found(BATCH | {"SLURM_JOB_NUM_NODES": "1"}, processes=2) == "local"


def test_a_rank_learns_its_place_from_torchrun() -> None:
    place = Place.of(TORCHRUN)
    assert place.variables() == TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}


def test_a_rank_learns_its_place_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place.of(STEP | {"MASTER_ADDR": "n1-ib"})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert place.master == "n1-ib"
    assert 10000 <= place.port < 32768


def test_every_rank_computes_the_same_port_and_another_job_another() -> None:
    given = {"MASTER_ADDR": "10.77.0.1"}
    first = Place.of(STEP | given | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"})
    last = Place.of(STEP | given)
    other = Place.of(STEP | given | {"SLURM_JOB_ID": "18"})
    assert first.port == last.port != other.port


def test_one_node_meets_on_loopback_whatever_its_name_resolves_to() -> None:
    one_node = STEP | {
        "SLURM_STEP_TASKS_PER_NODE": "4",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "no-such-host",
    }
    assert Place.of(one_node).master == "127.0.0.1"


@pytest.mark.parametrize("loopback", ["localhost", "127.0.0.1", "::1"])
def test_a_loopback_master_on_two_nodes_is_refused(loopback: str) -> None:
    with pytest.raises(UsageError, match="world of its own"):
        Place.of(STEP | {"MASTER_ADDR": loopback})


def test_a_first_node_without_an_address_is_refused_and_never_becomes_localhost() -> None:
    with pytest.raises(UsageError, match=r"'no-such-host\.invalid' has no address"):
        Place.of(STEP | {"SLURM_STEP_NODELIST": "no-such-host.invalid,n2"})


def test_uneven_placement_is_refused_naming_the_option_that_mends_it() -> None:
    with pytest.raises(UsageError, match="unevenly") as refused:
        Place.of(STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"})
    assert "--ntasks-per-node" in refused.value.remedy


@obeys(ENVIRONMENT, "Start the ranks with srun, mpirun or torchrun, in a shell without these")
@pytest.mark.parametrize("wrong", [{"RANK": "2"}, {"LOCAL_RANK": "5"}, {"LOCAL_WORLD_SIZE": "4"}])
def test_rank_variables_that_contradict_each_other_are_refused(wrong: Mapping[str, str]) -> None:
    with pytest.raises(UsageError, match="contradict each other") as refused:
        Place.of(TORCHRUN | dict(wrong))
    assert "torchrun, in a shell without these variables" in refused.value.remedy
    assert Place.of(TORCHRUN).rank == 1


def test_a_rank_variable_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE='two' is not a number"):
        Place.of(TORCHRUN | {"WORLD_SIZE": "two"})


@obeys(ENVIRONMENT, "unset {}, then start it with `runner train`.")
def test_a_process_without_rank_variables_is_told_which_are_missing() -> None:
    environ = {"AIRLIFT_RANK": "1"}
    with pytest.raises(UsageError, match=r"RANK, WORLD_SIZE.* not set") as refused:
        Place.of(environ)
    assert found(environ) == "rank"
    del environ[in_it(refused.value.remedy, r"(?<=unset )\w+")]
    assert found(environ) == "local"


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


def test_ranks_get_their_places_and_share_the_cores(tmp_path: Path) -> None:
    script = (
        f"open(f'{tmp_path}/{{rank}}.json', 'w').write(__import__('json').dumps(dict(os.environ)))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert run_local(python(script), 2, tmp_path, environ) == 0
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    places = [Place.of(variables) for variables in seen]
    assert [(p.rank, p.local_rank, p.world_size, p.local_world_size) for p in places] == [
        (0, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    assert places[0].port == places[1].port
    assert all(found(variables) == "rank" for variables in seen)
    assert seen[0]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_a_thread_count_the_user_set_stays(tmp_path: Path) -> None:
    script = "sys.exit(os.environ['OMP_NUM_THREADS'] != '7')"
    assert run_local(python(script), 1, tmp_path, os.environ | {"OMP_NUM_THREADS": "7"}) == 0


def test_rank_0_is_heard_and_the_others_write_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_local(python("print('I am', rank)"), 2, tmp_path) == 0
    assert capfd.readouterr().out == "I am 0\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "I am 1\n"


def test_lines_of_an_earlier_run_are_kept_but_not_shown_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_local(python("print('earlier')"), 2, tmp_path)
    assert run_local(python("print('now'); sys.exit(rank)"), 2, tmp_path) == 1
    assert "] earlier" not in capfd.readouterr().err
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "earlier\nnow\n"


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


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


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
    assert not (tmp_path / STOPPED).exists()


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


def test_launching_imports_no_torch() -> None:
    code = (
        "import sys, runner.launch.place; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
