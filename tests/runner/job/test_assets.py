"""Tokenizers and weights that do not fit the model are found by `check`, in their files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runner.config.run_config import RunConfig
from runner.inputs import ModelInput, resolve
from runner.job.model_probe import compare, judge
from runner.tasks import task_named
from tests.runner.conftest import Cluster
from tests.support.findings import errors


def tokenizer(size: int, added: dict[int, str], **roles: str) -> Any:
    """What `compare` reads of a tokenizer."""
    words = {f"w{n}": n for n in range(size)} | {text: n for n, text in added.items()}
    return SimpleNamespace(
        get_vocab=lambda: words, added_tokens_decoder=added, chat_template="", **roles
    )


IMAGE = {262: "<image_soft_token>"}
LEGAL: dict[str, tuple[str, Any, int, int]] = {
    "an embedding padded to a multiple of 64": ("masked-lm", tokenizer(257, {}), 320, 0),
    "as many tokens as rows": ("causal-lm", tokenizer(1024, {}), 1024, 0),
    "a token of images beyond the rows (Gemma 3 1B)": (
        "causal-lm", tokenizer(262, IMAGE), 262, 1,
    ),
    "a padding token beyond the rows": (
        "instruction", tokenizer(320, {320: "<pad>"}, pad_token="<pad>"), 320, 1,
    ),
    "few tokens": ("causal-lm", tokenizer(100, {}), 300, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", LEGAL)
def test_an_odd_but_legal_vocabulary_is_not_refused(cluster: Cluster, case: str) -> None:
    task, made, rows, warned = LEGAL[case]
    found = list(compare(task_named(task), model_of(cluster), made, rows, "vocab_size"))
    assert not errors(found)
    assert len(found) == warned


def test_a_token_of_the_chat_template_beyond_the_rows_is_refused(cluster: Cluster) -> None:
    chat = tokenizer(320, {320: "<|im_start|>"})
    chat.chat_template = "<|im_start|>user"
    found = compare(task_named("instruction"), model_of(cluster), chat, 320, "vocab_size")
    assert "<|im_start|> (320)" in str(errors(found)[0])


def model_of(cluster: Cluster) -> ModelInput:
    return resolve(RunConfig.load(cluster.write()), cluster.bundle).model


def test_weights_of_a_deeper_model_are_told() -> None:
    keys = ["model.layers.4.up.weight", "lm_head.weight"]
    (found,) = judge("m", {"unexpected_keys": keys}, {})
    assert found.level == "warning" and "model.layers.4.up.weight, for which" in found.message


def test_a_head_that_is_missing_or_of_another_size_is_drawn() -> None:
    head = ("classifier.weight", (2, 8), (5, 8))
    info = {"missing_keys": ["bert.pooler.dense.weight"], "mismatched_keys": [head]}
    assert list(judge("m", info, {}, "bert.")) == []


def test_a_layer_that_the_weights_lack_is_refused() -> None:
    (found,) = judge("m", {"missing_keys": ["bert.encoder.layer.1.up.weight"]}, {}, "bert.")
    assert found.level == "error"
    assert "the weights lack bert.encoder.layer.1.up.weight" in found.message
