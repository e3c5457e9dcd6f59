"""`runner rehearse`: what would end a run at its first save ends its rehearsal, and nothing stays.

The models are real and small; two of them are broken in ways that the libraries notice late.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from runner.from_stage import IncompleteError
from runner.job.training_run import TrainingRun
from runner.trials.rehearse import _check_memory
from scripts.lib.demo.repositories import DATASET, dataset_files
from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.runner.conftest import Cluster
from tests.support.once import once
from tests.support.staging import fetch_bundle
from tests.support.training.models import tiny_tokenizer

MANIFEST = f"""\
format: 1
name: rehearsed
assets:
  deep: {{model: acme/deep}}
  mute: {{model: acme/mute}}
  reference: {{dataset: {DATASET}, config: chapters}}
"""
DEEP = {
    "n_layer": 5,
    "n_positions": 64,
    "n_embd": 64,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def deep(folder: Path) -> None:
    """A GPT-2 of five layers."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer({"eos_token": "<|endoftext|>"}, 1024, wordpiece=False)
    config = GPT2Config(vocab_size=len(tokenizer), **DEEP)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def mute(folder: Path) -> None:
    """Its tokenizer loads, and cannot encode a word that it does not know."""
    deep(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"] = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"<|endoftext|>": 0, "pride": 1, "and": 2, "prejudice": 3},
    }  # fmt: skip
    tokenizer |= {"post_processor": None, "decoder": None}
    path.write_text(json.dumps(tokenizer))


def _stage(laptop: Path) -> None:
    (laptop / "models.yaml").write_text(MANIFEST)
    with LoopbackHub(laptop / "hub") as hub:
        for make in (deep, mute):
            make(laptop / make.__name__)
            files = {path.name: path.read_bytes() for path in (laptop / make.__name__).iterdir()}
            hub.repositories.commit("models", f"acme/{make.__name__}", files)
        hub.repositories.commit("datasets", DATASET, dataset_files())
        # The load test of `stage fetch` finds the tokenizer too.
        fetch_bundle(laptop, "models", hub.endpoint, "--no-offline-check")


@pytest.fixture(scope="session")
def rehearsed_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "rehearsed-bundle", _stage) / "bundle"


@pytest.fixture
def cluster(tmp_path: Path, rehearsed_bundle: Path) -> Cluster:
    cluster = Cluster(tmp_path, rehearsed_bundle)
    cluster.write(**SETTINGS)
    return cluster


SETTINGS: dict[str, Any] = {
    "task": "causal-lm", "model": {"asset": "deep"}, "engine": {"name": "ddp"},
    "dataset": {"asset": "reference"}, "precision": "auto", "steps": 8,
}  # fmt: skip


def nothing_stays(cluster: Cluster) -> bool:
    return {path.name for path in cluster.folder.iterdir()} == {"tiny.yaml"}


def stages_of(printed: str) -> dict[str, str]:
    """The stages of a rehearsal: name -> what is said of it."""
    return dict(re.findall(r"^  (\S.*?) +\d+\.\d s  (.*)$", printed, re.MULTILINE))


def refusal(cluster: Cluster, *arguments: str, code: int) -> str:
    """The message of a rehearsal that fails; whatever failed, nothing is kept."""
    done = cluster.run("rehearse", "tiny.yaml", *arguments)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    assert "rehearsed:" not in done.stdout
    assert nothing_stays(cluster)
    return done.stderr


def test_a_run_is_rehearsed_from_its_first_step_to_a_model_that_loads(cluster: Cluster) -> None:
    done = cluster.run("rehearse", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    stages = stages_of(done.stdout)
    assert list(stages) == ["check", "model", "data", "train", "resume", "load back"]
    assert stages["model"] == "2 of 5 layers  (all widths as they are)"
    assert re.search(r"loss \d.*; step-1, \d", stages["train"])
    assert "from step-1; loss " in stages["resume"] and "validation loss" in stages["resume"]
    assert "model.safetensors" in stages["resume"] and "GPT2LMHeadModel" in stages["load back"]
    assert "\n  precision: fp32  (" in done.stdout and "\n  steps: 2  (" in done.stdout
    assert nothing_stays(cluster)


def test_a_machine_with_too_little_memory_is_named_before_a_rank_starts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.trials.rehearse.memory_here", lambda _environ: 2**30)
    job = TrainingRun.load(cluster.folder / "tiny.yaml", cluster.bundle, cluster.output(), ())
    with pytest.raises(IncompleteError, match=r"of `deep` needs \d.* and 1.07 GB are free here"):
        _check_memory(job, {})


@pytest.mark.slow
def test_a_tokenizer_that_cannot_encode_ends_it_before_a_rank_starts(cluster: Cluster) -> None:
    said = refusal(cluster, "--set", "model.asset=mute", code=1)
    assert "rehearsal, data: " in said and "WordPiece error: Missing [UNK] token" in said
    assert "Traceback" not in said
