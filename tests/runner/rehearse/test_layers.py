"""Which layers and weights a rehearsal keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig, BertForMaskedLM

from runner.inputs import ModelInput, safetensors_header
from runner.trials.layers import cut, narrowed
from runner.trials.small_model import WEIGHTS, write

SHORT: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
    "num_hidden_layers": 5,
}


def settings_of(kind: str) -> dict[str, Any]:
    """config.json of a model of five layers."""
    names = {"gpt2": {"n_layer": 5, "n_embd": 32, "n_head": 4, "vocab_size": 64}}
    return AutoConfig.for_model(kind, **names.get(kind, SHORT)).to_dict()


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "qwen2", "vit"])
def test_two_layers_are_left_and_transformers_builds_them(kind: str) -> None:
    small = cut(settings_of(kind))
    assert small is not None and (small.layers, small.of) == (2, 5)
    settings = AutoConfig.for_model(
        kind, **{k: v for k, v in small.settings.items() if k != "model_type"}
    )
    names = [name for name, _ in AutoModel.from_config(settings).named_parameters()]
    assert any(".1." in name for name in names) and not any(".2." in name for name in names)


def test_layers_are_kept_until_each_kind_of_them_is_there() -> None:
    kinds = ["linear", "linear", "linear", "full", "linear"]
    small = cut({**SHORT, "layer_types": kinds})
    assert small is not None
    assert small.layers == 4
    assert small.settings["layer_types"] == kinds[:4]
    assert cut({**SHORT, "first_k_dense_replace": 3}).layers == 4  # type: ignore[union-attr]


def test_a_model_that_is_small_or_has_no_layers_stays_as_it_is() -> None:
    assert cut({**SHORT, "num_hidden_layers": 2}) is None
    assert cut({"depths": [3, 4, 6, 3]}) is None


def test_the_text_part_of_a_model_with_images_is_cut() -> None:
    small = cut({"model_type": "llava", "text_config": SHORT, "vision_config": SHORT})
    assert small is not None
    assert small.settings["text_config"]["num_hidden_layers"] == 2
    assert small.settings["vision_config"]["num_hidden_layers"] == 5


def test_the_weights_of_the_first_layers_are_those_of_the_model(tmp_path: Path) -> None:
    """From two shards, as bytes; transformers loads them and misses none."""
    folder = tmp_path / "whole"
    whole = BertForMaskedLM(BertConfig(**SHORT))
    whole.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    small = cut(whole.config.to_dict())
    assert small is not None
    digests = {path.name: "" for path in folder.iterdir()}
    model = ModelInput("bert", folder, "acme/bert", None, digests, whole.config.to_dict())
    written = write(model, small, tmp_path / "small", folder, weights=True)
    assert set(written.digests) == {"config.json", WEIGHTS}
    assert len(safetensors_header(written.path / WEIGHTS)) < len(whole.state_dict())
    loaded, info = BertForMaskedLM.from_pretrained(written.path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_model_too_wide_for_this_machine_becomes_narrow(kind: str) -> None:
    small = cut(settings_of(kind))
    assert small is not None
    narrow = narrowed(small)
    assert narrow is not None and narrow.width == 16
    kept = {k: v for k, v in narrow.settings.items() if k != "model_type"}
    model = AutoModel.from_config(AutoConfig.for_model(kind, **kept))
    assert model.get_input_embeddings().weight.shape == (64, 16)
