"""The parameters of a model without weights (`init: scratch`), as transformers counts them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.numpy import load_file

import stage
from runner.config.run_config import RunConfig
from runner.job.model_probe import count_parameters
from runner.job.training_run import TrainingRun
from runner.trials.small_run import memory_needed
from tests.runner.conftest import Cluster
from tests.support.training.models import tiny_model_files

SMALL = {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SMALL, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 16}
MOE = {
    "model_type": "qwen3_moe", **DECODER, "moe_intermediate_size": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "tie_word_embeddings": False, "max_position_embeddings": 128,
}  # fmt: skip
ENCODER_DECODER = {"vocab_size": 1024, "d_model": 64}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("causal-lm", MOE),
    ("causal-lm", {"model_type": "qwen2", **DECODER, "tie_word_embeddings": False}),
    ("causal-lm", {"model_type": "llama", **DECODER, "tie_word_embeddings": True}),
    (
        "masked-lm",
        {
            "model_type": "bart", **ENCODER_DECODER, "encoder_layers": 2, "decoder_layers": 3,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        },
    ),
    (
        "text-classification",
        {
            "model_type": "t5", **ENCODER_DECODER, "num_layers": 2, "num_decoder_layers": 3,
            "num_heads": 4, "d_kv": 16, "d_ff": 128,
        },
    ),
]  # fmt: skip
AUTO = {
    "causal-lm": transformers.AutoModelForCausalLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "text-classification": transformers.AutoModelForSequenceClassification,
}


@pytest.mark.parametrize(("task", "settings"), MODELS, ids=[m["model_type"] for _, m in MODELS])
def test_the_count_is_that_of_the_model_that_transformers_makes(
    tmp_path: Path, cluster: Cluster, task: str, settings: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = RunConfig.load(cluster.write(model={"asset": "m", "init": "scratch"}))
    made = AUTO[task].from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    counted = count_parameters(replace(config, task=task), tmp_path)
    assert counted == sum(p.numel() for p in made.parameters()) > 0


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A bundle with the config.json and the tokenizer of a mixture of experts, without weights."""
    monkeypatch.setenv("AIRLIFT_STORE", "none")
    files = tiny_model_files(tmp_path / "made", "gpt2")
    files["config.json"] = json.dumps(MOE).encode()
    (tmp_path / "moe").mkdir()
    for name in files.keys() - {"model.safetensors"}:
        (tmp_path / "moe" / name).write_bytes(files[name])
    (tmp_path / "lines.csv").write_text("text\n" + "a line of words\n" * 200)
    (tmp_path / "m.yaml").write_text(
        "format: 1\nname: bare\nassets:\n  moe: {path: moe}\n"
        "  lines: {path: lines.csv, convert: csv}\n"
    )
    stage.fetch(tmp_path / "m.yaml", tmp_path / "bundle", offline_check=False, quiet=True)
    cluster = Cluster(tmp_path, tmp_path / "bundle")
    cluster.write(
        task="causal-lm", model={"asset": "moe", "init": "scratch"},
        dataset={"asset": "lines", "train": "train", "text": "text"},
    )  # fmt: skip
    return cluster


def test_check_plans_with_all_experts(bare: Cluster) -> None:
    for _ in ("from the child", "from the verdict that was kept"):
        done = bare.run("check", "tiny.yaml", "--processes", "2")
        assert done.returncode == 0, done.stderr
        assert "model moe: qwen3_moe, 0.55 M parameters, init scratch" in done.stdout
        assert "16 bytes x 0.55 M parameters" in done.stdout
        assert "memory and disk: not checked" not in done.stdout


def test_the_ranks_plan_with_all_experts(bare: Cluster) -> None:
    """The launcher of `train` cannot count: rank 0 does."""
    done = bare.run("train", "tiny.yaml", "--processes", "1", "--set", "steps=2")
    assert done.returncode == 0, done.stderr
    resolved = json.loads((bare.output() / "resolved.json").read_text())
    made = load_file(bare.output() / "model" / "model.safetensors")
    assert resolved["shape"]["num_parameters"] == sum(tensor.size for tensor in made.values())


def test_a_rehearsal_counts_all_experts(bare: Cluster) -> None:
    run = TrainingRun.load(bare.folder / "tiny.yaml", bare.bundle, None, ())
    model = run.inputs.model
    text = json.loads((model.path / "config.json").read_text())
    (bare.folder / "config.json").write_text(json.dumps({**text, "num_experts": 160}))
    larger = replace(run.inputs, model=replace(model, path=bare.folder))
    assert memory_needed(replace(run, inputs=larger)) > memory_needed(run) + 2**26
