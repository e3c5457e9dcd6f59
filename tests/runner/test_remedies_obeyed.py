"""Remedies of `runner` that need a bundle: whoever does what they say goes on."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import resolve
from runner.job.plan import sequence_length
from runner.job.shapes import shape_of
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster

OVERRIDES, INPUTS = "runner/config/overrides.py", "runner/inputs/__init__.py"


def load(cluster: Cluster, *overrides: str, **changes: Any) -> Any:
    """What a command does first: the run file, its assets, the length of a sequence."""
    config = RunConfig.load(cluster.write("mine", **changes), overrides)
    inputs = resolve(config, cluster.bundle)
    sequence_length(config, shape_of(config, inputs.model))
    return config


def remedy_of(cluster: Cluster, *overrides: str, **changes: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(cluster, *overrides, **changes)
    return caught.value.remedy


@obeys(OVERRIDES, "For instance: --set batch.micro=4")
def test_an_override_without_a_value_is_written_as_the_example(cluster: Cluster) -> None:
    words = shlex.split(remedy_of(cluster, "batch.micro").partition(": ")[2])
    assert load(cluster, *words[1:]).batch.micro == 4


@obeys(OVERRIDES, "Put text in two pairs of quotes: --set")
def test_text_with_brackets_is_put_into_quotes(cluster: Cluster) -> None:
    line = in_it(remedy_of(cluster, "name=[mine"), r"--set .*")
    _, override = shlex.split(line.replace("...", "[mine"))
    assert override == 'name="[mine"'
    load(cluster, override.replace("[", ""))  # no name may have a bracket


@obeys("runner/config/held_out.py", "For instance: validation: 5%")
def test_a_share_that_is_none_is_written_as_the_example(cluster: Cluster) -> None:
    dataset = {"asset": "reference", "validation": "500%"}
    for line in re.findall(r"(?<=validation: )(?:\d+%|null)", remedy_of(cluster, dataset=dataset)):
        load(cluster, dataset={"asset": "reference", **yaml.safe_load(f"validation: {line}")})


@obeys("runner/config/run_config.py", "Write it into slurm.options")
def test_an_sbatch_line_among_the_shells_becomes_an_option(cluster: Cluster) -> None:
    remedy = remedy_of(cluster, slurm={"setup": ["#SBATCH --mem=64G"]})
    load(cluster, **yaml.safe_load(in_it(remedy, r"slurm: \{.*\}")))


@obeys("runner/job/plan.py", "Set sequence_length: {} or less")
def test_a_sequence_gets_the_length_that_the_model_has(cluster: Cluster) -> None:
    remedy = remedy_of(cluster, sequence_length=10_000)
    load(cluster, sequence_length=int(in_it(remedy, r"\d+")))


@obeys(INPUTS, "the asset's name: {} is its repository")
def test_a_repository_in_place_of_an_asset_becomes_the_asset(cluster: Cluster) -> None:
    remedy = remedy_of(cluster, model={"asset": "acme/tiny-bert"})
    load(cluster, model={"asset": in_it(remedy, r"(?<=`)[^`]+")})


@obeys("runner/run_folder/checkpoints.py", "{} for {} steps or more (--set steps={})")
def test_a_run_that_is_past_its_end_is_asked_for_more_steps(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    cluster.take(trained_at(2))
    shutil.rmtree(cluster.output("zero2") / "model")
    command = ("train", "zero2.yaml", "--processes", "2", "--dry-run", "--set")
    line = in_it(cluster.refused(*command, "steps=4"), r"--set steps=\d+")
    done = cluster.run(*command, line.removeprefix("--set "))
    assert done.returncode == 0, done.stderr


@obeys("runner/trials/evaluate.py", "The exported model: --checkpoint none --set model.init=")
def test_a_run_without_checkpoints_is_measured_by_its_exported_model(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    cluster.take(trained_at(2))
    shutil.rmtree(cluster.output("zero2") / "checkpoints")
    refused = cluster.refused("evaluate", "zero2.yaml")
    for options in re.findall(r"--checkpoint none(?: --set [^;\s]+)?", " ".join(refused.split())):
        done = cluster.run("evaluate", "zero2.yaml", *options.split())
        assert done.returncode == 0, done.stderr


@obeys("runner/exec/run.py", "sed -i 's/\\r$//' {}")
def test_a_script_of_windows_is_repaired(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRLIFT_BUNDLE", str(cluster.bundle))
    script = cluster.folder / "mine.sh"
    script.write_bytes(b"#!/bin/sh\r\necho hello\r\n")
    script.chmod(0o755)
    line = in_it(cluster.run("exec", "--", str(script)).stderr, r"sed -i .*")
    subprocess.run(line, shell=True, check=True)
    assert cluster.run("exec", "--", str(script)).stdout.strip().endswith("hello")


@obeys("runner/exec/run.py", "{}{}runner exec --bundle B -- python {}")
def test_a_python_script_is_given_to_python(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRLIFT_BUNDLE", str(cluster.bundle))
    script = cluster.folder / "mine.py"
    script.write_text("print('hello')\n")
    refused = cluster.run("exec", "--", "mine.py").stderr
    words = shlex.split(in_it(refused, r"-- python \S+"))
    done = cluster.run("exec", *words)
    assert done.returncode == 0 and "hello" in done.stdout, json.dumps([refused, done.stderr])
