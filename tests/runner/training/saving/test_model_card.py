"""The model card has the facts that a stranger needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.lib.demo.repositories import DATASET
from stage.bundle.bundle import Bundle
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


def test_model_and_data_have_commits_rows_and_licences(card: str, bundle: Path) -> None:
    assets = Bundle.open(bundle).lock.assets
    model, data = assets["tiny-bert"], assets["reference"]
    rows = {name: split.rows for name, split in data.configs["chapters"].items()}
    assert data.licence
    for row in (
        f"| first weights | `acme/tiny-bert` at `{model.source.commit}` "
        f"| {model.licence or 'not stated'} |",
        f"| training data | `{DATASET}` at `{data.source.commit}`, config `chapters`, "
        f"split `train`, "
        f"the first 300 of {rows['train']:,} rows | {data.licence} |",
        f"| validation data | `{DATASET}` at `{data.source.commit}`, config `chapters`, "
        f"split `validation`, "
        f"the first 60 of {rows['validation']:,} rows | {data.licence} |",
    ):
        assert row in card


def test_its_code_to_load_the_model_works(card: str, trained_at: Callable[[int], Path]) -> None:
    code = card.partition("```python\n")[2].partition("```")[0]
    code += "assert type(model).__name__ == 'BertForMaskedLM' and tokenizer.mask_token == '[MASK]'"
    done = run_warm(code, cwd=trained_at(2) / "model")
    assert done.returncode == 0, done.stderr
