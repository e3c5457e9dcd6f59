"""`go.sh`: from a bundle on the cluster into its queue, under each shell, whatever is killed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.runner.remote.far import PROGRAMS, Far, each_shell, kill_all
from tests.stage.carry.conftest import WEIGHTS, flip
from tests.support.waiting import wait_for

ALL = [
    line
    for step in ("verify", "environment", "check", "submit")
    for line in (f"{step} begin 0", f"{step} {'skipped' if step == 'environment' else 'done'} 0")
]
FLIP = """\
import os, sys
status = os.stat(sys.argv[1])
with open(sys.argv[1], "r+b") as file:
    byte = file.read(1)[0]
    file.seek(0)
    file.write(bytes([byte ^ 1]))
os.utime(sys.argv[1], ns=(status.st_atime_ns, status.st_mtime_ns))"""
SKIPPED = [
    line
    for step in ("verify", "environment", "check", "submit")
    for line in (f"{step} begin 0", f"{step} skipped 0")
]


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return Far(tmp_path)


@each_shell
def test_a_run_reaches_the_queue_and_a_second_walk_skips_all(far: Far, shell: list[str]) -> None:
    runs = far.plan(OPTIONS="--set 'a=b c'", SUBMIT="--array seed=1,2")
    done = far.go(shell)
    assert (done.returncode, far.read("result")) == (0, "w1 0 17\n"), done.stderr + far.read("log")
    assert far.steps == ALL
    words = f"{runs}/my.yaml --bundle bundle --output output/my --set a=b c"
    calls = [f"runner check {words}", f"runner submit -q {words} --array seed=1,2"]
    assert far.calls == calls
    log = far.read("log")
    assert (
        "== w1 verify\n" in log and "runner submit speaks" in log and f"bundle id {far.id}" in log
    )
    assert not (far.folder / ".airlift/lock").exists()

    far.plan(WALK="w2", OPTIONS="--set 'a=b c'", SUBMIT="--array seed=1,2")
    done = far.go(shell)
    assert (done.returncode, far.read("result")) == (0, "w2 0 17\n"), done.stderr
    assert far.steps == ALL + SKIPPED and far.calls == calls

    # A changed file: read again. A job of another run file: `runner submit` decides.
    flip(far.folder / "bundle" / WEIGHTS)
    flip(far.folder / "bundle" / WEIGHTS)
    far.plan("name: my\nseed: 2\n")
    assert far.go(shell).returncode == 2
    assert far.steps[16:] == [*ALL[:-1], "submit failed 2"] and len(far.calls) == 4


@each_shell
def test_another_text_under_the_name_of_a_job_that_waits_is_no_obstacle_to_its_own(
    far: Far, shell: list[str]
) -> None:
    """Two laptops, one name: the second is refused; the first, and its job, have what was asked."""
    mine = far.plan("name: my\nsteps: 5\n")
    assert far.go(shell).returncode == 0
    other = far.plan("name: my\nsteps: 777\n", WALK="w2")
    for _ in range(2):
        assert far.go(shell).returncode == 2 and far.read("result") == "w2 2 0\n"
    assert f"/{mine}/my.yaml" in (far.folder / "output/my/submit.sbatch").read_text()
    assert (far.folder / mine / "my.yaml").read_text() == "name: my\nsteps: 5\n" != other
    far.plan("name: my\nsteps: 5\n", WALK="w3")
    assert far.go(shell).returncode == 0 and far.read("result") == "w3 0 17\n"
    assert far.steps[-1] == "submit skipped 0"


@each_shell
def test_a_run_file_that_is_not_the_one_of_the_plan_is_refused(far: Far, shell: list[str]) -> None:
    runs = far.plan("name: my\nsteps: 5\n")
    for change in (lambda path: path.write_text("name: my\nsteps: 7\n"), Path.unlink):
        change(far.folder / runs / "my.yaml")
        assert far.go(shell).returncode == 1 and far.calls == []
        assert f"{runs}: a file is not what was submitted, or is missing." in far.read("log")


@each_shell
def test_what_is_damaged_after_it_was_verified_is_not_submitted(far: Far, shell: list[str]) -> None:
    words = (shutil.which("python3") or "", "-c", FLIP, str(far.folder / "bundle" / WEIGHTS))
    far.add("runner", shlex.join(words))
    assert far.go(shell).returncode == 1
    assert far.steps[-3:] == ["check done 0", "verify begin 0", "verify failed 1"]
    assert far.read("damaged") == f"{WEIGHTS}\n" and not (far.notes / "queue").exists()


@each_shell
def test_what_fails_ends_it_with_its_code_and_the_next_walk_goes_on(
    far: Far, shell: list[str]
) -> None:
    flip(far.folder / "bundle" / WEIGHTS)
    assert far.go(shell).returncode == 1
    assert far.read("result") == "w1 1 0\n" and far.steps[-1] == "verify failed 1"
    assert far.read("damaged") == f"{WEIGHTS}\n" and far.calls == []
    flip(far.folder / "bundle" / WEIGHTS)
    (far.notes / "check").write_text("3")
    assert far.go(shell).returncode == 3
    assert far.read("result") == "w1 3 0\n" and far.steps[-1] == "check failed 3"
    (far.notes / "check").unlink()
    assert far.go(shell).returncode == 0
    assert far.steps[-8:] == ["verify begin 0", "verify skipped 0", *ALL[2:]]
    far.add("runner", "kill -9 $$")  # as a limit of a login node
    far.plan(SUBMIT="--array seed=1")
    assert far.go(shell).returncode == 5 and far.steps[-1] == "check failed 137"
    assert "error: check was killed here, by signal 9." in far.read("log")
    far.plan(BUNDLE_ID="0" * 64)
    assert far.go(shell).returncode == 1 and "another" in far.read("log")


@each_shell
def test_without_a_python_sha256sum_compares_the_bytes(far: Far, shell: list[str]) -> None:
    (far.bin / "python3").unlink()
    assert far.go(shell).returncode == 0, far.read("log")
    assert "no Python 3.6 here" in far.read("log")
    flip(far.folder / "bundle" / WEIGHTS)
    assert far.go(shell).returncode == 1
    assert far.read("damaged") == f"{WEIGHTS}\n"


@each_shell
def test_what_is_missing_there_is_said_at_the_terminal_too(far: Far, shell: list[str]) -> None:
    runner = (far.bin / "runner").read_text()
    (far.bin / "runner").unlink()
    done = far.go(shell)
    assert done.returncode == 2 and far.steps[-1] == "environment failed 2"
    assert "no `runner` here" in done.stderr and "Activate an environment" in done.stderr
    far.add("runner", runner)
    assert far.go(shell).returncode == 0
    far.add("find", 'case $1 in model) exit 1 ;; esac; exec /usr/bin/find "$@"')  # a closed folder
    (far.folder / "output/my/model").mkdir(parents=True)
    assert far.go(shell, "--list", "my").stdout == "- unreadable model\n"


def states(far: Far) -> list[str]:
    """What can be seen of a walk from outside; it only grows."""
    return far.read("steps").splitlines() + far.calls


@each_shell
def test_killed_at_ten_moments_it_ends_with_one_job(tmp_path: Path, shell: list[str]) -> None:
    for moment in range(10):  # after as many signs of life; the last ones are of the end
        far = Far(tmp_path / str(moment))
        running = far.start(shell)
        while len(states(far)) < moment and running.poll() is None:
            time.sleep(0.005)
        kill_all(running)
        waits = (far.folder / ".airlift/lock").exists()
        if waits and far.read("lock/holder") == "":  # it was killed before it wrote that
            assert far.go(shell).returncode == 75
            far.age_lock(61)
        elif waits:
            far.age_lock(14)  # 1 s is waited for
        done = far.go(shell)
        assert done.returncode == 0, f"{moment}: {done.stderr}{far.read('log')}"
        assert far.read("result") == "w1 0 17\n"
        assert (far.notes / "queue").read_text() == "17\n"
        assert sum(call.startswith("runner submit") for call in far.calls) <= 2
        assert not (far.folder / ".airlift/lock").exists()


@each_shell
def test_killed_alone_its_step_goes_on_and_holds_the_lock_till_its_end(
    far: Far, shell: list[str]
) -> None:
    far.add("runner", 'echo $$ >"$FAR/pid"; until [ -e "$FAR/over" ]; do sleep 1; done')
    running = far.start(shell)
    wait_for(lambda: (far.notes / "pid").exists() and far.read("lock/step") != "")
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    for _ in range(3):
        assert far.go(shell).returncode == 75
    (far.notes / "over").touch()
    wait_for(lambda: not (far.folder / ".airlift/lock").exists())
    assert far.read("result") == ""


@each_shell
def test_the_line_is_cut_and_it_goes_on(far: Far, shell: list[str]) -> None:
    running = far.start(shell)
    wait_for(lambda: "verify begin 0" in far.steps)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    running.stderr.close()
    os.killpg(running.pid, signal.SIGHUP)
    wait_for(lambda: far.read("result") == "w1 0 17\n")
    assert far.steps == ALL


@each_shell
def test_two_at_once_are_one_walk(far: Far, shell: list[str]) -> None:
    both = [far.start(shell) for _ in range(2)]
    for running in both:
        running.communicate(timeout=60)
    assert sorted(running.returncode for running in both) in ([0, 75], [0, 0])
    assert sum(call.startswith("runner submit") for call in far.calls) == 1
    assert (far.notes / "queue").read_text() == "17\n"


@each_shell
def test_a_dead_lock_is_taken_over_and_a_living_one_is_not(far: Far, shell: list[str]) -> None:
    lock = far.folder / ".airlift/lock"
    lock.mkdir()
    (lock / "holder").write_text("w0 login7 1\n")
    (lock / "beat").touch()
    far.age_lock(50)
    state = far.go(shell, "--state").stdout.split()
    assert state[:3] == ["w0", "login7", "1"] and 50 <= int(state[3]) <= 55
    done = far.go(shell)
    assert done.returncode == 75 and "login7" in done.stderr and far.steps == []
    stopped = far.go(shell, "--stop")
    assert stopped.returncode == 5 and "-> ssh login7 sh " in stopped.stderr
    far.age_lock(61)
    assert far.go(shell).returncode == 0 and far.steps == ALL
    assert far.go(shell, "--state").stdout == "none\n"
    lock.mkdir()  # the clock of that disk was an hour ahead, and is put right
    (lock / "holder").write_text("w0 login7 1\n")
    (lock / "beat").touch()
    far.age_lock(-3600)
    assert far.go(shell, "--state").stdout == "w0 login7 1 9999\n"
    assert far.go(shell).returncode == 0
    lock.mkdir()  # killed before it wrote its name
    assert far.go(shell).returncode == 75
    then = lock.stat().st_mtime - 61
    os.utime(lock, (then, then))
    assert far.go(shell).returncode == 0


@each_shell
@pytest.mark.parametrize("by", ["a signal", "--stop"])
def test_a_stop_by_hand_is_a_result_too(far: Far, shell: list[str], by: str) -> None:
    far.add("runner", 'echo $$ >"$FAR/pid"; exec sleep 600')
    far.add("sleep", 'exec /bin/sleep "$@"')
    running = far.start(shell)
    wait_for(lambda: (far.notes / "pid").exists() and (far.notes / "pid").read_text() != "")
    if by == "--stop":
        assert far.go(shell, "--stop").returncode == 0
    else:
        os.kill(running.pid, signal.SIGTERM)
    running.communicate(timeout=20)
    assert running.returncode == 5 and far.read("result") == "w1 5 0\n"
    wait_for(lambda: not Path("/proc", (far.notes / "pid").read_text().strip()).exists())
    assert "nothing is at work" in far.go(shell, "--stop").stdout


@each_shell
def test_every_byte_is_read_in_a_job_that_a_killed_one_finds_again(
    far: Far, shell: list[str]
) -> None:
    far.plan(VERIFY="job", PARTITION="batch")
    running = far.start(shell)
    wait_for(lambda: "job 21 verifies" in far.read("log"), running)
    os.kill(running.pid, signal.SIGKILL)  # its job goes on
    running.wait()
    os.kill(int(far.read("lock/step")), signal.SIGKILL)
    wait_for(lambda: not (far.folder / ".airlift/lock").exists())
    running = far.start(shell)
    wait_for(lambda: far.read("log").count("job 21 verifies") == 2, running)
    (far.notes / "node").touch()
    running.communicate(timeout=60)
    assert running.returncode == 0 and f"bundle id {far.id}" in far.read("log"), far.read("log")
    jobs = [call for call in far.calls if call.startswith("sbatch")]
    assert len(jobs) == 1 and "-p batch -n1 -c4 " in jobs[0] and " -A " not in jobs[0]
    assert list((far.folder / ".airlift/state/airlift/receipts").glob("*.json"))
    flip(far.folder / "bundle" / WEIGHTS)
    assert far.go(shell).returncode == 1 and far.read("damaged") == f"{WEIGHTS}\n"


@each_shell
def test_a_partition_that_takes_only_some_jobs_verifies_too(far: Far, shell: list[str]) -> None:
    """Without its qos, or without a GPU, sbatch refuses; then the job gets the GPUs of the run."""
    (far.notes / "node").touch()
    needs = """case "$*" in *--qos=long*--gres=gpu:2*|*--gres=gpu:2*--qos=long*) ;;
    *) echo "sbatch: error: QOSMinGRES" >&2; exit 1 ;; esac"""
    far.add("sbatch", f"{needs}\n{PROGRAMS['sbatch']}")
    far.plan(VERIFY="job", SBATCH="--qos=long --constraint='a b'")
    assert far.go(shell).returncode == 5 and "sbatch took no job" in far.read("log")
    far.plan(VERIFY="job", SBATCH="--qos=long --constraint='a b'", GPUS="gpu:2")
    assert far.go(shell).returncode == 0, far.read("log")
    (call,) = [call for call in far.calls if call.startswith("sbatch")]
    assert call.startswith("sbatch --parsable --gres=gpu:2 --qos=long --constraint=a b -n1"), call


@each_shell
def test_a_job_that_ends_while_it_is_asked_for_verifies_once(far: Far, shell: list[str]) -> None:
    far.plan(VERIFY="job")
    (far.folder / ".airlift/verify-job").write_text("21\n")
    (far.notes / "node").touch()  # a second job, if there is one, does not wait
    ends = f"echo 0 >{far.folder}/.airlift/verify-code"
    far.add("squeue", f'[ "$3" != 21 ] || {{ {ends}; exit; }}\n{PROGRAMS["squeue"]}')
    assert far.go(shell).returncode == 0
    assert not [call for call in far.calls if call.startswith("sbatch")]


@each_shell
def test_a_greeting_is_no_answer_of_slurm(far: Far, shell: list[str]) -> None:
    """A login shell that greets: no job is taken for one that waits."""
    (far.notes / ".bash_profile").write_text('echo "Welcome. 17 PENDING"; echo PENDING\n')
    far.plan(SETUP=f"PATH={far.bin}\ntest a = b\ntrue")
    said = far.go(shell, "--runner", "status")
    assert said.returncode == 1 and "ended the shell, with 1: PATH=" in said.stderr
    assert "\ntest a = b\n" in said.stderr
    far.plan(SETUP=f"PATH={far.bin}")
    assert far.go(shell).returncode == 0
    (far.notes / "queue").write_text("")
    assert far.go(shell).returncode == 0
    assert sum(call.startswith("runner submit") for call in far.calls) == 2
