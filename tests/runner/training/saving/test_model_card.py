"""The model card has the facts that a stranger needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.demo.repositories import DATASET
from tests.support.code import run_warm


def metadata(card: str) -> dict[str, Any]:
    """The card's metadata as the Hub reads it."""
    from huggingface_hub import ModelCard

    return ModelCard(card).data.to_dict()


@pytest.fixture(scope="module")
def card(trained_at: Callable[[int], Path]) -> str:
    """The card of a real run."""
    return (trained_at(2) / "model" / "README.md").read_text()


def test_the_hub_reads_what_it_is_and_what_it_was_made_from(card: str) -> None:
    found = metadata(card)
    assert found["library_name"] == "transformers" and found["pipeline_tag"] == "fill-mask"
    assert (found["base_model"], found["base_model_relation"]) == ("acme/tiny-bert", "finetune")
    assert found["datasets"] == [DATASET]


def test_its_code_to_load_the_model_works(card: str, trained_at: Callable[[int], Path]) -> None:
    code = card.partition("```python\n")[2].partition("```")[0]
    code += "assert type(model).__name__ == 'BertForMaskedLM' and tokenizer.mask_token == '[MASK]'"
    done = run_warm(code, cwd=trained_at(2) / "model")
    assert done.returncode == 0, done.stderr
