"""What FSDP2 gathers one at a time is known before the job: `runner check` asks as a rank does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stage
from tests.runner.conftest import Cluster
from tests.support.training.models import tiny_model_files


@pytest.fixture
def one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A bundle with a GPT-2 of one layer, and a run file for FSDP2."""
    monkeypatch.setenv("AIRLIFT_STORE", "none")
    files = tiny_model_files(tmp_path / "made", "gpt2")
    settings = json.loads(files["config.json"])
    files["config.json"] = json.dumps({**settings, "n_layer": 1}).encode()
    (tmp_path / "gpt2").mkdir()
    for name in files.keys() - {"model.safetensors"}:
        (tmp_path / "gpt2" / name).write_bytes(files[name])
    (tmp_path / "lines.csv").write_text("text\n" + "a line of words\n" * 200)
    (tmp_path / "m.yaml").write_text(
        "format: 1\nname: m\nassets:\n  gpt2: {path: gpt2}\n"
        "  lines: {path: lines.csv, convert: csv}\n"
    )
    stage.fetch(tmp_path / "m.yaml", tmp_path / "bundle", offline_check=False, quiet=True)
    cluster = Cluster(tmp_path, tmp_path / "bundle")
    cluster.write(
        task="causal-lm", model={"asset": "gpt2", "init": "scratch"}, engine={"name": "fsdp"},
        dataset={"asset": "lines", "train": "train", "text": "text"},
    )  # fmt: skip
    return cluster


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_model_of_one_layer_is_gathered_as_one_with_a_note(
    one_layer: Cluster, compiled: str
) -> None:
    words = ("tiny.yaml", "--processes", "2", "--set", "steps=2", "--set", f"compile={compiled}")
    note = "engine.wrap: the model repeats no layer: all its weights are gathered as one"
    for command in ("check", "train"):
        done = one_layer.run(command, *words)
        assert done.returncode == 0, done.stderr
        assert note in done.stdout
    assert ("compile: the whole model" in done.stdout) is (compiled == "true")


def test_a_layer_that_the_ranks_would_refuse_is_refused_by_check(one_layer: Cluster) -> None:
    one_layer.write(
        task="causal-lm", model={"asset": "gpt2", "init": "scratch"},
        engine={"name": "fsdp", "wrap": {"layer": "GPT2Blok"}},
        dataset={"asset": "lines", "train": "train", "text": "text"},
    )  # fmt: skip
    done = one_layer.run("check", "tiny.yaml", "--processes", "2")
    assert done.returncode == 2 and "has no layer `GPT2Blok` to wrap" in done.stderr
