"""Which layers and weights a rehearsal keeps."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, AutoModel

from runner.trials.small_run import Small, cut, kept_weights

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
    shorter = {**SHORT, "num_hidden_layers": 4}
    for more, kept in (
        ({"layer_types": kinds}, {"layer_types": kinds[:4]}),
        ({"first_k_dense_replace": 3}, {"first_k_dense_replace": 3}),
    ):
        assert cut({**SHORT, **more}) == Small({**shorter, **kept}, 4, 5)
        within = {"a": 1, "text_config": {**shorter, **kept}}
        assert cut({"a": 1, "text_config": {**SHORT, **more}}) == Small(within, 4, 5)


def test_a_model_that_is_small_or_has_no_layers_stays_as_it_is() -> None:
    assert cut({**SHORT, "num_hidden_layers": 2}) == cut({"depths": [3, 4, 6, 3]}) is None


def test_the_weights_of_the_kept_layers_are_kept_and_all_that_is_no_layer() -> None:
    experts = {f"layer.{n}.experts.{e}.w" for n in range(3) for e in range(5)}
    others = {"head.0.w", "head.1.w", "norm.w", "layer.w", "experts.7.w"}
    assert kept_weights(experts | others, 2, 3) == others | {
        name for name in experts if not name.startswith("layer.2.")
    }
