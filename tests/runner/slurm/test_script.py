"""The sbatch script is text made by a pure function; the golden files are what a reviewer reads."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from runner.cli import main as runner
from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.job.submit import check_srun
from runner.slurm.job_array import MOST_MEMBERS, members
from runner.slurm.script import SbatchRequest, save_before_end_s, sbatch_script, time_limit_s
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster

GOLDEN = Path(__file__).parents[1] / "golden"
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
SWEEP = dataclasses.replace(CPU, members=members(["optimizer.lr=1e-4,3e-4", "seed=1,2"]))


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("gpu", GPU),
        ("cpu", CPU),
        ("sweep", SWEEP),
        ("srun", SRUN),
        ("srun-sweep", SRUN_SWEEP),
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


@pytest.mark.parametrize("request_", [GPU, CPU, SRUN, SRUN_SWEEP])
def test_bash_can_parse_the_script(request_: SbatchRequest) -> None:
    checked = subprocess.run(
        ["bash", "-n"], input=sbatch_script(request_), text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


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
    request_ = dataclasses.replace(CPU, setup=("false",), command=("echo", "ranks"))
    done = subprocess.run(
        ["bash"], input=sbatch_script(request_), text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_options_replace_what_we_would_have_asked_for() -> None:
    script = sbatch_script(
        dataclasses.replace(
            GPU, options={"gres": "gpu:a800:4", "cpus_per_task": 7, "--signal": "B:USR1@60"}
        )
    )
    assert "#SBATCH --gres=gpu:a800:4\n" in script and "--gres=gpu:4" not in script
    assert "#SBATCH --cpus-per-task=7\n" in script and "--cpus-per-task=16" not in script
    assert "#SBATCH --signal=B:USR1@60\n" in script and "TERM@300" not in script.replace(
        "SIGTERM", ""
    )


def test_another_spelling_of_gpus_replaces_ours() -> None:
    script = sbatch_script(dataclasses.replace(GPU, options={"gpus-per-task": 1}))
    assert "--gpus-per-task=1" in script and "#SBATCH --gres" not in script


def test_false_takes_an_option_away_and_true_is_a_flag() -> None:
    script = sbatch_script(dataclasses.replace(GPU, options={"requeue": False, "exclusive": True}))
    assert "#SBATCH --requeue" not in script
    assert "#SBATCH --exclusive\n" in script


@pytest.mark.parametrize("name", ["nodes", "time", "partition", "--ntasks_per_node"])
def test_an_option_with_a_key_of_its_own_is_refused_naming_the_key(name: str) -> None:
    with pytest.raises(UsageError, match="key of its own") as refused:
        sbatch_script(dataclasses.replace(GPU, options={name: "1"}))
    assert "slurm." in refused.value.remedy


@pytest.mark.parametrize("name", ["A", "-p", "account=x", "", "no space", "a\nb"])
def test_what_is_no_long_option_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="long name"):
        sbatch_script(dataclasses.replace(GPU, options={name: "1"}))


@pytest.mark.parametrize(
    "change",
    [{"options": {"comment": "a\n#SBATCH --uid=root"}}, {"setup": ("a\nb",)}, {"name": "a\nb"}],
)
def test_a_line_break_inside_a_value_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="line break"):
        sbatch_script(dataclasses.replace(GPU, **change))  # type: ignore[arg-type]


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
    assert save_before_end_s("24:00:00") == 300
    assert save_before_end_s(None) == 300
    assert save_before_end_s("00:10:00") == 150
    assert save_before_end_s("00:02:00") == 30


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
        ["seed=" + ",".join(map(str, range(MOST_MEMBERS + 1)))],
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(axes: list[str]) -> None:
    with pytest.raises(UsageError, match="--array"):
        members(axes)


@obeys("runner/slurm/job_array.py", "For instance: --array", "List all its values in one: --array")
@obeys("runner/slurm/script.py", "runner submit RUN --array KEY=VALUE,VALUE gives each its own.")
def test_an_array_is_written_as_its_remedies_say(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"expected KEY=VALUE,VALUE") as refused:
        members(["optimizer.lr"])
    lr = in_it(refused.value.remedy, r"(?<=--array )\S+")
    assert [member.name for member in members([lr])] == ["lr=1e-4", "lr=3e-4"]
    with pytest.raises(UsageError, match="given twice") as refused:
        members(["seed=1", "seed=2,3"])
    one = in_it(refused.value.remedy, r"(?<=--array )KEY=A,B,C")
    assert len(members([one.replace("KEY", "seed").replace("A,B,C", "1,2,3")])) == 3

    with pytest.raises(UsageError, match="same run folder") as refused:
        sbatch_script(dataclasses.replace(CPU, options={"array": "0-3"}))
    line = in_it(refused.value.remedy, r"runner submit RUN --array \S+")
    words = line.replace("KEY=VALUE,VALUE", lr).replace("RUN", str(cluster.write())).split()
    monkeypatch.chdir(cluster.folder)
    bundle = ("--bundle", str(cluster.bundle), "--print")
    said = CliRunner().invoke(runner, [*words[1:], *bundle])
    assert said.exit_code == 0 and "#SBATCH --array=0-1" in said.stdout, said.output


def test_with_words_for_srun_nothing_of_ours_runs_outside_of_the_ranks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.write(slurm={"srun": ["--environment=/home/me/ngc.toml"], "tasks_per_node": 2})
    words = ["tiny.yaml", "--bundle", str(cluster.bundle)]
    monkeypatch.chdir(cluster.folder)
    done = CliRunner().invoke(runner, ["submit", *words, "--print"])
    assert done.exit_code == 0, done.output
    started = [line for line in done.output.splitlines() if line.startswith("srun ")]
    unset = "env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE"
    ours = f"--environment=/home/me/ngc.toml {unset} {sys.executable} "
    assert len(started) == 2 and all(ours in line for line in started)
    assert " prepare " in started[0] and " train " in started[1] and "exec " not in done.output
    config = RunConfig.load(cluster.folder / "tiny.yaml")
    check_srun(config)
    monkeypatch.setattr("runner.job.submit.is_light", lambda: True)
    with pytest.raises(UsageError, match="which cannot train") as refused:
        check_srun(config)
    assert f"PREFIX/bin/runner submit {config.path} --bundle BUNDLE" in refused.value.remedy
