"""The model card has the facts that a stranger needs; each row is a promise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.config.run_config import RunConfig
from runner.inputs import resolve
from runner.job.plan import TrainingPlan
from runner.training.saving.model_card import model_card
from scripts.lib.demo.repositories import DATASET
from stage.bundle.bundle import Bundle
from tests.runner.conftest import Cluster, metrics
from tests.support.code import run_warm

PLAN = TrainingPlan(32, 2, 8, 2, 2, "bf16", 2, ())
RECORD = {
    "device": "CPU",
    "world_size": 2,
    "python": "3.11",
    "versions": {"airlift": "0", "torch": "2"},
}


def written(cluster: Cluster, lines: list[dict[str, Any]] | None = None, **settings: Any) -> str:
    """The card of a run that never ran."""
    config = RunConfig.load(cluster.write("mine", **settings))
    return model_card(config, resolve(config, cluster.bundle), PLAN, RECORD, lines or [])


def metadata(card: str) -> dict[str, Any]:
    """The card's metadata as the Hub reads it."""
    from huggingface_hub import ModelCard

    found: dict[str, Any] = ModelCard(card).data.to_dict()
    return found


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


def test_bundle_settings_and_machine_are_recorded(
    card: str, trained_at: Callable[[int], Path]
) -> None:
    record = json.loads((trained_at(2) / "environment.json").read_text())
    for row in (
        f"| bundle | `{record['bundle_id']}` |",
        "| sequence_length | 32 |",
        "| packing.documents | joined |",
        "| steps | 8 |",
        "| batch.global | 8 |",
        "| batch.micro | 2 on each of 2 ranks |",
        "| optimizer.name | adamw |",
        "| optimizer.lr | 0.003 |",
        "| optimizer.weight_decay | 1.0 |",
        "| schedule.name | cosine |",
        "| schedule.warmup | 0.05 |",
        "| precision | fp32 |",
        "| engine.name | deepspeed |",
        "| engine.zero | 2 |",
        "| seed | 42 |",
        "| device | 2 x CPU |",
        f"torch {record['versions']['torch']}",
    ):
        assert row in card


def test_the_results_are_those_of_the_run(card: str, trained_at: Callable[[int], Path]) -> None:
    folder = trained_at(2)
    (first, *_, last), ((step, validation),) = metrics(folder), metrics(folder, "validation_loss")
    assert (
        f"| loss of step 1 | {first[1]:.6g} |" in card
        and f"| loss of step 8 | {last[1]:.6g} |" in card
    )
    assert f"| validation_loss after step {step} (the best) | {validation:.6g} |" in card
    assert "| validation_perplexity after step 8 (the best) |" in card


def test_its_code_to_load_the_model_works(card: str, trained_at: Callable[[int], Path]) -> None:
    code = card.partition("```python\n")[2].partition("```")[0]
    code += "assert type(model).__name__ == 'BertForMaskedLM' and tokenizer.mask_token == '[MASK]'"
    done = run_warm(code, cwd=trained_at(2) / "model")
    assert done.returncode == 0, done.stderr


def test_an_adapter_names_its_base_and_how_both_are_loaded(cluster: Cluster) -> None:
    settings = {"task": "causal-lm", "model": {"asset": "tiny-gpt2"}, "engine": {"name": "ddp"}}
    card = written(cluster, **settings, lora={"rank": 4, "alpha": 8}, quantization={"bits": 4})
    found = metadata(card)
    assert (found["library_name"], found["base_model_relation"]) == ("peft", "adapter")
    commit = resolve(RunConfig.load(cluster.folder / "mine.yaml"), cluster.bundle).model.commit
    assert (
        f'base = AutoModelForCausalLM.from_pretrained("acme/tiny-gpt2", revision="{commit}")'
        in card
    )
    assert 'model = PeftModel.from_pretrained(base, ".")' in card
    assert "| lora.rank | 4 |" in card and "| lora.alpha | 8.0 |" in card
    assert "| quantization.bits | 4 |" in card and "| engine.name | ddp |" in card
    assert "engine.zero" not in card
    merged = written(cluster, **settings, lora={"merge": True})
    assert metadata(merged)["library_name"] == "transformers" and "PeftModel" not in merged


def test_a_model_with_new_weights_is_no_fine_tune(cluster: Cluster) -> None:
    card = written(
        cluster, model={"asset": "tiny-bert", "init": "scratch"}, engine={"name": "fsdp"}
    )
    assert "base_model" not in metadata(card)
    assert (
        "all weights random before training" in card
        and "| architecture and tokenizer | `acme/tiny-bert`" in card
    )
    assert "| engine.name | fsdp |" in card


def test_every_dataset_has_its_weight_and_columns(tmp_path: Path, twins_bundle: Path) -> None:
    datasets = [{"asset": "prompts", "prompt": "User", "response": "Prompt"},
                {"asset": "chats", "messages": "messages", "weight": 0.5}]  # fmt: skip
    card = written(
        Cluster(tmp_path, twins_bundle), task="instruction", model={"asset": "tiny-chat"},
        dataset=None,
        datasets=datasets, sequence_length=128,
    )  # fmt: skip
    assert metadata(card)["datasets"] == ["acme/chats"]  # a CSV means nothing to the Hub
    assert (
        "| training data | `./midjourney_prompt_dataset.csv`, config `default`, split `train`, "
        "201 rows, sha256"
    ) in card
    assert "split `train`, 80 rows, weight 0.5 | not stated |" in card
    assert "| datasets.0.prompt | User |" in card and "| datasets.1.weight | 0.5 |" in card
    assert "| packing.documents | separate |" in card


def test_the_best_evaluation_is_beside_the_last_and_a_missing_one_is_stated(
    cluster: Cluster,
) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 3.0}, {"step": 2, "validation_loss": 1.5}, {"step": 4, "loss": None},
        {"step": 4, "validation_loss": 1.75, "validation_accuracy": 0.5},
    ]  # fmt: skip
    card = written(cluster, lines)
    assert "| validation_loss after step 2 (the best) | 1.5 |" in card
    assert (
        "| validation_loss after step 4 | 1.75 |" in card
        and "| validation_accuracy after step 4 | 0.5 |" in card
    )
    assert "| loss of step 4 | no number |" in card
    assert "It was not evaluated" in written(cluster, lines[:1])
