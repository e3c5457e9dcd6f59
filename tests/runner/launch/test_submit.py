"""What `runner submit` decides by itself. That Slurm accepts or refuses it is in tests/site."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from runner.errors import StageError, UsageError
from runner.launch import submit
from runner.plan.devices import NodeShape
from tests.runner.slurm.test_script import CPU


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", 0),
        ("", 0),
        ("gpu:4", 4),
        ("gpu", 1),
        ("gpu:a800:4(S:0-1)", 4),
        ("gpu:a100-sxm4-80gb:8,nvme:1", 8),
        ("gpu:v100:2(S:0,2),gpu:t4:1", 3),
        ("gpu:1g.10gb:7", 7),
        ("craynetwork:4", 0),
    ],
)
def test_gpus_are_counted_in_every_notation(gres: str, gpus: int) -> None:
    assert submit.count_gpus(gres) == gpus


def test_a_rank_gets_the_share_of_cpus_that_goes_with_its_gpu() -> None:
    assert submit.cpus_per_task([NodeShape(64, 4)], ranks=4, gpus=4)[0] == 16
    assert submit.cpus_per_task([NodeShape(64, 4)], ranks=1, gpus=1)[0] == 16
    assert submit.cpus_per_task([NodeShape(64, 4), NodeShape(32, 4)], ranks=4, gpus=4)[0] == 8


def test_nodes_without_enough_gpus_do_not_count() -> None:
    cpus, reason = submit.cpus_per_task([NodeShape(8, 0), NodeShape(64, 4)], ranks=4, gpus=4)
    assert cpus == 16
    assert reason == "A rank's share: the smallest node has 64 CPUs and 4 GPUs."


def test_where_nothing_is_known_the_site_decides() -> None:
    assert submit.cpus_per_task([], ranks=4, gpus=4) == (None, "")


def test_a_machine_without_slurm_is_told_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no sbatch on this machine") as refused:
        submit.submit(dataclasses.replace(CPU, run_folder=tmp_path / "run"))
    assert "login node" in refused.value.remedy


@pytest.mark.parametrize(
    ("said", "exit_code", "remedy"),
    [
        ("sbatch: error: invalid partition specified: nope", 2, "sinfo -s"),
        ("allocation failure: Requested node configuration is not available", 2, "gpus_per_node"),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition",
            2,
            "options.account",
        ),
        ("sbatch: unrecognized option '--bogus=1'", 2, "slurm.options"),
        (
            "allocation failure: Unable to contact slurm controller (connect failure)",
            5,
            "Try again",
        ),
        ("sbatch: fatal: Could not establish a configuration source", 2, "login node"),
        ("allocation failure: something new", 2, "submit.sbatch"),
    ],
)
def test_what_sbatch_says_becomes_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, exit_code: int, remedy: str
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("sinfo", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(StageError) as refused:
        submit.submit(dataclasses.replace(CPU, run_folder=tmp_path / "run"))
    assert refused.value.exit_code == exit_code
    assert said.partition("error: ")[2] in str(refused.value)
    assert remedy in refused.value.remedy
