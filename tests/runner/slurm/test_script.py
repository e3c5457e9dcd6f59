"""The sbatch script is text made by a pure function; the golden files are what a reviewer reads."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.from_stage import UsageError
from runner.slurm.script import (
    MOST_MEMBERS,
    SbatchRequest,
    members,
    save_before_end_s,
    sbatch_script,
    time_limit_s,
)
from tests.first_job.harness import programs

GOLDEN = Path(__file__).parent / "golden"
GPU = SbatchRequest(
    name="bert-large-mlm",
    run_folder=Path("/scratch/alice/output/bert-large-mlm"),
    working_folder=Path("/home/alice/project"),
    command=(
        "/home/alice/.venv/bin/python",
        "/home/alice/.venv/bin/runner",
        "train",
        "/home/alice/project/runs/bert-large.yaml",
        "--bundle",
        "/scratch/alice/bundle",
        "--output",
        "/scratch/alice/output/bert-large-mlm",
        "--set",
        "optimizer.lr=1e-4",
    ),
    bin_folder=Path("/home/alice/.venv/bin"),
    nodes=2,
    tasks_per_node=4,
    gpus_per_node=4,
    partition="gpu",
    cpus_per_task=16,
    cpus_reason="A rank's share: the smallest node has 64 CPUs and 4 GPUs.",
    time="24:00:00",
    modules=("nvidia/cuda/12.2",),
    setup=("export NCCL_SOCKET_IFNAME=ib0",),
    options={"account": "proj", "exclusive": True},
)
CPU = SbatchRequest(
    name="tiny",
    run_folder=Path("/scratch/it's 100% mine"),
    working_folder=Path("/scratch"),
    command=("/usr/bin/python3", "-mrunner", "train", "/scratch/two words.yaml"),
    bin_folder=Path("/usr/bin"),
    nodes=1,
    tasks_per_node=2,
    gpus_per_node=0,
)


SRUN = dataclasses.replace(GPU, srun=("--environment=/home/alice/ngc.toml", "--container-writable"))
SRUN_SWEEP = dataclasses.replace(
    CPU,
    command=("/opt/it's/bin/python", "/opt/it's/bin/runner", "train", "/scratch/two words.yaml"),
    members=members(["seed=1,2"]),
    srun=("--container-image=/scratch/ngc.sqsh", "--container-mounts=/scratch"),
)
SRUN_COMMAND = dataclasses.replace(
    SRUN_SWEEP,
    command=("/opt/it's/bin/python", "/opt/it's/bin/runner", "launch", "--by-script"),
    of_command=True,
)
OPTIONS = dataclasses.replace(
    GPU,
    options={
        "gres": "gpu:a800:4", "cpus_per_task": 7, "--signal": "B:USR1@60", "requeue": False,
        "exclusive": True, "nice": False, "account": "proj",
    },
)  # fmt: skip
SWEEP = dataclasses.replace(CPU, members=members(["optimizer.lr=1e-4,3e-4", "seed=1,2"]))


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("gpu", GPU),
        ("cpu", CPU),
        ("options", OPTIONS),
        ("gpus-by-option", dataclasses.replace(GPU, options={"gpus": 8})),
        ("sweep", SWEEP),
        ("srun", SRUN),
        ("srun-sweep", SRUN_SWEEP),
        ("srun-command", SRUN_COMMAND),
    ],
)
def test_the_script_is_the_golden_one(name: str, request_: SbatchRequest) -> None:
    golden = GOLDEN / f"{name}.sbatch"
    script = sbatch_script(request_)
    if os.environ.get(
        "AIRLIFT_WRITE_GOLDEN"
    ):  # only ever on purpose; the difference is then reviewed in git
        golden.write_text(script)
    assert script == golden.read_text()


def test_bash_runs_the_command_word_by_word_and_without_leftovers_of_another_step(
    tmp_path: Path,
) -> None:
    words = [
        "/usr/bin/env",
        "--",
        "python3",
        "-c",
        "import os, sys; print(sys.argv[1:], sorted(os.environ))",
    ]
    request_ = dataclasses.replace(CPU, command=(*words, "a b", "it's", "$HOME", "*"))
    environ = {
        "PATH": os.environ["PATH"],
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_PTY_PORT": "1",
    }
    done = subprocess.run(
        ["bash"],
        input=sbatch_script(request_),
        env=environ,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("""['a b', "it's", '$HOME', '*']""")
    assert "SLURM" not in done.stdout


def test_a_setup_line_that_fails_ends_the_job_before_the_ranks() -> None:
    """Its log was empty, where the line says nothing itself."""
    lines = ("cd .", "test $(echo node) = login", "true")
    request_ = dataclasses.replace(CPU, setup=lines, command=("echo", "ranks"))
    script = sbatch_script(request_)
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: slurm.setup: test $(echo node) = login\n  ended the job on" in done.stderr


@pytest.mark.parametrize(
    ("leaves", "restarts", "state", "is_requeued"),
    [
        ("stopped", "31", "RUNNING", True),
        ("stopped", "32", "RUNNING", False),
        ("stopped", "0", "CANCELLED", False),
        ("nothing", "0", "RUNNING", False),
    ],
)
def test_a_job_without_a_launcher_goes_back_in_the_queue_after_a_stop_alone(
    tmp_path: Path, leaves: str, restarts: str, state: str, is_requeued: bool
) -> None:
    request_ = dataclasses.replace(
        CPU,
        run_folder=tmp_path,
        bin_folder=tmp_path / "bin",
        command=("p", "r", "train"),
        srun=("x",),
    )
    path = programs(
        tmp_path / "bin", sleep=":",
        srun=f"case $* in *train*) : >{tmp_path}/{leaves}; exit 3 ;; esac",
        scontrol=f'echo "$*" >>{tmp_path}/asked; echo "JobId=7 BatchFlag=1 JobState={state} X=0"',
    )  # fmt: skip
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": restarts}
    script = sbatch_script(request_)
    done = subprocess.run(
        ["bash"], input=script.encode(), env={"PATH": path, **environ}, check=False
    )
    asked = tmp_path / "asked"
    assert done.returncode == 3
    assert (asked.exists() and "requeue 7" in asked.read_text()) == is_requeued


@pytest.mark.parametrize(
    ("change", "said", "remedy"),
    [
        *(
            ({"options": {name: "1"}}, "key of its own", "slurm.")
            for name in ("nodes", "time", "partition", "--ntasks_per_node")
        ),
        *(
            ({"options": {name: "1"}}, "long name", "man sbatch")
            for name in ("A", "-p", "account=x", "", "no space", "a\nb")
        ),
        ({"options": {"array": "0-3"}}, "every member would write the same run folder", "--array"),
        ({"options": {"comment": "a\n#SBATCH --uid=root"}}, "line break", "Write one entry"),
        ({"setup": ("a\nb",)}, "line break", "Write one entry"),
        ({"name": "a\nb"}, "line break", "Write one entry"),
    ],
)
def test_what_sbatch_would_read_otherwise_is_refused(
    change: dict[str, Any], said: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        sbatch_script(dataclasses.replace(GPU, **change))
    assert remedy in refused.value.remedy


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        ("0", None),
        ("30:00", 1800),
        ("24:00:00", 86400),
        ("2-0", 172800),
        ("1-12:30", 86400 + 12 * 3600 + 1800),
        ("1-00:00:01", 86401),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_slurms_time_notation(text: str, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "24h", "1:2:3:4", "-1", "1-", "86400s"])
def test_what_is_no_time_is_refused_because_slurm_would_not_say_so(text: str) -> None:
    with pytest.raises(UsageError, match=r"slurm\.time"):
        time_limit_s(text)


def test_a_short_job_keeps_most_of_its_time_for_work() -> None:
    times = (None, "24:00:00", "00:20:00", "00:10:00", "00:02:00", "00:00:03")
    assert [*map(save_before_end_s, times)] == [300, 300, 300, 150, 30, 1]


def test_a_sweep_is_every_combination_each_with_a_folder_that_says_which() -> None:
    found = members(["optimizer.lr=1e-4,3e-4", "seed=1,2"])
    assert [member.name for member in found] == [
        "lr=1e-4,seed=1",
        "lr=1e-4,seed=2",
        "lr=3e-4,seed=1",
        "lr=3e-4,seed=2",
    ]
    assert found[1].overrides == ("optimizer.lr=1e-4", "seed=2")


@pytest.mark.parametrize(
    "axes",
    [
        ["seed"],
        ["seed="],
        ["seed=1,,2"],
        ["seed=1,1"],
        ["seed=1", "seed=2"],
        ["name=../x,y"],
        [f"optimizer.lr={'1' * 150}", f"seed={'2' * 60}"],  # a name too long for a folder
        ["seed=" + ",".join(map(str, range(MOST_MEMBERS + 1)))],
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(axes: list[str]) -> None:
    with pytest.raises(UsageError, match="--array"):
        members(axes)
