"""Tokens that a run adds: their rows begin near the mean, are trained, and are in the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from runner.config.run_config import RunConfig
from runner.data.tokenizing import load_tokenizer, rows_needed
from runner.from_stage import UsageError
from runner.inputs import resolve
from runner.job.shapes import describe_new_tokens, outline_of
from runner.tasks import task_named
from tests.runner.conftest import Cluster, in_ranks, metrics

NEW = {"add_tokens": ["Netherfield", "Longbourn"], "add_special_tokens": ["<letter>"]}
# One engine for each way in which weights are on the ranks; BERT ties its head to the embedding.
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": {"name": "ddp"}},
    "fsdp": {"engine": {"name": "fsdp"}},
    "zero3": {"engine": {"zero": 3}},
}
STEPS = 4


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Cluster:
    """A run with each engine."""
    cluster = Cluster(tmp_path_factory.mktemp("grown"), bundle)

    def write(name: str, steps: int = STEPS, init: str = "pretrained", **changes: Any) -> Path:
        return cluster.write(
            name, model={"asset": "steady-bert", "init": init}, tokenizer=NEW, steps=steps,
            schedule={"name": "constant", "warmup": 0}, **changes,
        )  # fmt: skip

    runs = [write(name, **settings) for name, settings in RUNS.items()]
    runs.append(write("scratch", init="scratch", engine={"zero": 2}))
    cluster.prepare(runs[0])
    in_ranks(cluster, 2, *runs)
    return cluster


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_every_engine_learns_the_same_with_them(grown: Cluster, name: str) -> None:
    assert dict(metrics(grown.output(name))) == pytest.approx(
        dict(metrics(grown.output("ddp"))), abs=1e-4
    )


@pytest.mark.parametrize("name", [*RUNS, "scratch"])
def test_plain_transformers_loads_model_and_tokenizer_with_them(grown: Cluster, name: str) -> None:
    folder = grown.output(name) / "model"
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    settings = json.loads((folder / "tokenizer.json").read_text())
    assert settings["truncation"]["max_length"] == 16, "its other settings stay"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = model.get_input_embeddings().weight
    assert len(rows) == len(tokenizer) == model.config.vocab_size
    assert model.get_output_embeddings().weight.shape == rows.shape
    pieces = tokenizer.tokenize("He left Netherfield for Longbourn <letter>")
    assert [piece.casefold() for piece in pieces if len(piece) > 5] == [
        "netherfield", "longbourn", "<letter>",
    ]  # fmt: skip
    assert "<letter>" not in tokenizer.decode(
        tokenizer("a <letter>")["input_ids"], skip_special_tokens=True
    )


def test_a_new_row_begins_near_the_mean_of_the_others(grown: Cluster) -> None:
    config = RunConfig.load(grown.folder / "ddp.yaml")
    model = resolve(config, grown.bundle).model
    made = task_named(config.task).objective(config, model, None).model
    rows = made.get_input_embeddings().weight.detach()
    said = describe_new_tokens(outline_of(model), model)
    assert f"3 tokens added; the embedding grows from {len(rows) - 3} to {len(rows)} rows" in said
    old = rows[:-3]
    torch.testing.assert_close(rows[-3:], old.mean(0).expand(3, -1), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {"rank": 2}}, "new tokens do not go with `lora`"),
        ({"tokenizer": {"add_tokens": ["a", "a"]}}, "`a` is there twice"),
        ({"tokenizer": {"add_tokens": [" "]}}, "it is empty"),
        ({"tokenizer": {"add_token": ["a"]}}, "Did you mean `add_tokens`"),
        ({"add_tokens": ["a"]}, "tokenizer.add_tokens"),
    ],
)
def test_what_cannot_work_is_refused_with_its_line(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = Cluster(tmp_path, tmp_path).write(**{"tokenizer": NEW, **changes})
    with pytest.raises(UsageError, match=r"tiny\.yaml") as caught:
        RunConfig.load(path)
    assert words in f"{caught.value.message} {caught.value.remedy}"


def test_the_new_size_is_known_before_anything_is_loaded(grown: Cluster) -> None:
    config = RunConfig.load(grown.folder / "ddp.yaml")
    model = resolve(config, grown.bundle).model
    rows = rows_needed(model)
    assert rows == len(load_tokenizer(model))
    said = describe_new_tokens(outline_of(model), model)
    before = model.settings["vocab_size"]
    assert f"3 tokens added; the embedding grows from {before} to {rows} rows" in said
