"""`runner rehearse`: what would end a run at its first save ends its rehearsal, and nothing stays.

The models are real and small; two of them are broken in ways that the libraries notice late.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from scripts.lib.demo.repositories import DATASET, dataset_files
from scripts.lib.hub.loopback_hub import LoopbackHub
from tests.first_job.test_good_runs import RUNS, TWINS
from tests.runner.conftest import Cluster
from tests.support.once import once
from tests.support.staging import fetch_bundle
from tests.support.training.models import tiny_tokenizer
from tests.support.waiting import wait_for

MANIFEST = f"""\
format: 1
name: rehearsed
assets:
  deep: {{model: acme/deep}}
  mute: {{model: acme/mute}}
  half: {{model: acme/half}}
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


def deep(folder: Path, **changes: int) -> None:
    """A GPT-2 of five layers."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer({"eos_token": "<|endoftext|>"}, 1024, wordpiece=False)
    config = GPT2Config(vocab_size=len(tokenizer), **{**DEEP, **changes})
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def half(folder: Path) -> None:
    """A wider one, whose weights are half as large in its files as after training in fp32."""
    deep(folder, n_layer=3, n_embd=128)
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


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
        for make in (deep, mute, half):
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
    """The message of a rehearsal that fails; whatever failed, nothing of it stays."""
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


@pytest.mark.slow
def test_a_tokenizer_that_cannot_encode_ends_it_before_a_rank_starts(cluster: Cluster) -> None:
    said = refusal(cluster, "--set", "model.asset=mute", code=1)
    assert "rehearsal, data: " in said and "WordPiece error: Missing [UNK] token" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_and_leaves_nothing(cluster: Cluster) -> None:
    process = cluster.start("rehearse", "tiny.yaml")
    wait_for(lambda: list(cluster.folder.glob("output/.tiny.rehearsal-*/run/logs/rank-1.pulse")))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 5 and "Interrupted. A rehearsal leaves nothing behind." in said
    assert nothing_stays(cluster)
    assert not [
        line for line in commands() if ".tiny.rehearsal-" in line and str(cluster.folder) in line
    ]


def commands() -> list[str]:
    """The command lines of all processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((entry / "cmdline").read_bytes().decode("utf-8", "replace"))
            except OSError:
                continue
    return found


def limited(cluster: Cluster, *arguments: str) -> str:
    """The message of a rehearsal under the shell's own limit of a file's size (ulimit -f)."""
    size = 1_150_000

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    done = subprocess.run(
        cluster.command("rehearse", "tiny.yaml", *arguments), cwd=cluster.folder,
        preexec_fn=limit, env=cluster.environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 5, f"{done.stdout}\n{done.stderr}"
    assert f"{cluster.output()}" in done.stderr and ".rehearsal" not in done.stderr
    assert nothing_stays(cluster)
    return done.stderr


@pytest.mark.slow
def test_a_checkpoint_that_the_disk_does_not_take_ends_it(cluster: Cluster) -> None:
    assert "error: rehearsal, train: " in limited(cluster)


@pytest.mark.slow
def test_an_exported_model_that_the_disk_does_not_take_ends_it(cluster: Cluster) -> None:
    """Checkpoints hold LoRA's matrices alone, and the exported model is whole."""
    lora = ("--set", "lora={merge: true}", "--set", "model.asset=half")
    assert "error: rehearsal, train: " in limited(cluster, *lora)


NARROW = """\
import runner.trials.rehearse as rehearsal
rehearsal.memory_here = lambda environ: 3
rehearsal.memory_needed = lambda config, model: 2 if model.path.name == SMALL else 4
from runner.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, False])
def test_a_model_too_wide_for_this_machine_is_rehearsed_narrow(
    cluster: Cluster, fits: bool
) -> None:
    """The memory is set: this machine's cannot be changed. All else is real."""
    code = NARROW.replace("SMALL", repr("narrow" if fits else ""))
    command = [sys.executable, "-c", code, "rehearse", "tiny.yaml", "--bundle", str(cluster.bundle)]
    done = subprocess.run(
        command, cwd=cluster.folder, env=cluster.environment(), capture_output=True, text=True
    )
    assert done.returncode == (0 if fits else 5), done.stderr
    if fits:
        assert "2 of 5 layers" in done.stdout and "width 32, random weights" in done.stdout
    else:
        assert "needs 4" in done.stderr and "salloc" in done.stderr
    assert nothing_stays(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_each_published_run_is_rehearsed_on_its_twin(
    run: Path, tmp_path: Path, twins_bundle: Path
) -> None:
    text = run.read_text()
    for asset, twin in TWINS.items():
        text = re.sub(rf"asset: {asset}\b(?!-)", f"asset: {twin}", text)
    text = re.sub(r"^sequence_length: .*", "sequence_length: 64", text, flags=re.MULTILINE)
    (tmp_path / "tiny.yaml").write_text(text)
    cluster = Cluster(tmp_path, twins_bundle)
    done = cluster.run("rehearse", "tiny.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [*stages_of(done.stdout)][-1] == "load back"
    assert nothing_stays(cluster)


OTHERS: dict[str, dict[str, Any]] = {
    "classes of texts with LoRA": {
        "task": "text-classification",
        "dataset": {
            "asset": "glue-mrpc",
            "text": "sentence1",
            "pair": "sentence2",
            "validation": "10%",
        },
        "model": {"asset": "gpt2-bare"},
        "lora": {"rank": 2, "targets": ["c_attn"]},
    },
    "classes of words with LoRA": {
        "task": "token-classification",
        "dataset": {"asset": "conll2003"},
        "lora": {"rank": 2, "targets": ["query", "value"], "merge": True},
    },
    "new tokens and whole words": {
        "task": "masked-lm",
        "dataset": {"asset": "reference"},
        "tokenizer": {"add_tokens": ["Netherfield"]},
        "whole_words": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_tasks_are_rehearsed_too(name: str, tmp_path: Path, twins_bundle: Path) -> None:
    cluster = Cluster(tmp_path, twins_bundle)
    cluster.write(**{"model": {"asset": "still-bert"}, **OTHERS[name]})
    done = cluster.run("rehearse", "tiny.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = stages_of(done.stdout)
    assert stages["load back"].endswith(", from_pretrained")
    assert "validation loss" in stages["resume"]
    assert nothing_stays(cluster)
