"""Documents side by side in one sequence do not see each other, in each supported model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from runner.config.run_config import RunConfig
from runner.data.recipe import KEEPS_APART
from runner.data.store import Rows
from runner.inputs import resolve
from runner.tasks import task_named
from runner.training.components import language
from runner.training.components.batches import SamplePlace

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40},
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "phi3"), SMALL | {"num_key_value_heads": 2}
    ),
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert")


def small_model(kind: str) -> Any:
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(kind, **KINDS.get(kind, SMALL))).eval()


def rows(*sequences: list[int], layout: str, seed: int = 0) -> Rows:
    """Sequences of documents with these lengths, padded to the longest; new ids per document."""
    random, longest = np.random.default_rng(seed), max(map(sum, sequences))
    ids, documents = np.zeros((2, len(sequences), longest), dtype=np.int64)
    for row, lengths in enumerate(sequences):
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        documents[row, : len(numbers)] = numbers
        ids[row, : len(numbers)] = random.integers(5, 60, len(numbers))
    return Rows(ids, documents, documents > 0, layout)


def logits(model: Any, given: Rows, *, causal: bool) -> Any:
    """Of shape (rows, longest, vocabulary), as the task's module asks for them."""
    module = language.Language(model, causal=causal)
    batch = language.position_inputs(given, language.first_position(model.config))
    inputs = module.model_inputs(input_ids=torch.from_numpy(given.ids), **batch)
    with torch.no_grad():
        return model(**inputs).logits.numpy()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", sorted(KEEPS_APART))
def test_a_document_is_read_as_if_it_were_alone(kind: str, attention: str) -> None:
    model, causal = small_model(kind), kind not in ENCODERS
    model.set_attn_implementation(attention)
    together = rows([7, 12, 9], [20], layout="separate")
    found = logits(model, together, causal=causal)
    for begin, end in ((0, 7), (7, 19), (19, 28)):
        size = end - begin
        ids = together.ids[:1, begin:end]
        alone = Rows(ids, np.ones((1, size), np.int64), np.ones((1, size), bool), "joined")
        expected = logits(model, alone, causal=causal)
        assert found[0, begin:end] == pytest.approx(expected[0], abs=2e-5), f"document at {begin}"
    assert np.isfinite(found).all()


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2", "llama"])
def test_padding_changes_nothing(kind: str) -> None:
    model, causal = small_model(kind), kind not in ENCODERS
    padded = rows([9], [20], layout="alone")
    found = logits(model, padded, causal=causal)
    short = Rows(padded.ids[:1, :9], np.ones((1, 9), np.int64), np.ones((1, 9), bool), "joined")
    assert found[0, :9] == pytest.approx(logits(model, short, causal=causal)[0], abs=2e-5)


def test_positions_start_again_with_each_document() -> None:
    placed = language.position_inputs(rows([3, 2], [4], layout="separate"), 0)
    assert placed["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]


@pytest.mark.parametrize(
    ("task", "asset"), [("masked-lm", "tiny-bert"), ("causal-lm", "tiny-gpt2")]
)
def test_the_loss_of_documents_side_by_side_is_the_sum_of_their_own(
    task: str, asset: str, bundle: Any, tmp_path: Any
) -> None:
    (tmp_path / "run.yaml").write_text(
        f"format: 1\ntask: {task}\nmodel: {{asset: {asset}, init: scratch}}\n"
        "dataset: {asset: reference}\n"
    )
    config = RunConfig.load(tmp_path / "run.yaml")
    made = task_named(task).objective(config, resolve(config, bundle).model, None)
    made.module.eval()
    batch = made.collate(
        rows([9, 14], [17], layout="separate"), [SamplePlace(0, 0), SamplePlace(1, 0)]
    )
    with torch.no_grad():
        expected = 0.0
        for row, begin, end in ((0, 0, 9), (0, 9, 23), (1, 0, 17)):
            alone = {
                name: batch[name][row : row + 1, begin:end] for name in ("input_ids", "labels")
            }  # without `guessed`: logits at every position
            expected += made.module(**alone).item()
        assert made.module(**batch).item() == pytest.approx(expected, rel=1e-5)
