"""Remedies of `runner` that need a bundle: whoever does what they say goes on."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from runner.cli import main as runner
from runner.errors import UsageError
from runner.job.partition import Partition
from runner.job.submit import submit
from tests.remedies.obeyed import in_it
from tests.runner.conftest import Cluster
from tests.runner.slurm.test_script import CPU


def test_where_there_is_no_slurm_the_script_can_be_shown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="no sbatch on this machine") as caught:
        submit(replace(CPU, run_folder=cluster.output()), Partition("default"))
    assert not cluster.output().exists(), "a run that `runner status` would call stopped"
    words = shlex.split(in_it(caught.value.remedy, "runner submit --print"))
    run = [str(cluster.write()), "--bundle", str(cluster.bundle)]
    shown = CliRunner().invoke(runner, [*words[1:], *run])
    assert shown.exit_code == 0 and shown.stdout.startswith("#!/bin/bash"), shown.output
    shown = CliRunner().invoke(runner, [*words[1:], *run, "--array", "seed=1,2"])
    assert shown.exit_code == 0 and "#SBATCH --array=0-1" in shown.stdout, shown.output


def test_a_run_without_checkpoints_is_measured_by_its_exported_model(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    cluster.take(trained_at(2))
    shutil.rmtree(cluster.output("zero2") / "checkpoints")
    assert "--checkpoint none --set model.init=" in cluster.refused("evaluate", "zero2.yaml")


def test_an_adapter_alone_is_not_offered_to_be_evaluated(cluster: Cluster) -> None:
    """`--set model.init=` of an adapter was printed, which then was refused."""
    cluster.write("lora", task="causal-lm", model={"asset": "tiny-gpt2"}, lora={"rank": 2})
    cluster.output("lora").mkdir(parents=True)
    (cluster.output("lora") / "metrics.jsonl").write_text("")
    (cluster.output("lora") / "pulled.json").write_text("{}")
    said = cluster.refused("evaluate", "lora.yaml")
    assert "runner pull lora --to CLUSTER --checkpoints -o" in said and "model.init" not in said
