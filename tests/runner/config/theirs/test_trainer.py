"""TrainingArguments as JSON: what the run file has an equal for, and what is left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runner.cli import main
from runner.config.run_config import RunConfig
from runner.config.theirs import trainer
from runner.errors import UsageError

ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "learning_rate": 2e-5,
    "adam_beta2": 0.95,
    "num_train_epochs": 2,
    "max_steps": -1,
    "warmup_ratio": 0.03,
    "lr_scheduler_type": "constant_with_warmup",
    "optim": "adamw_torch_fused",
    "bf16": True,
    "fp16": False,
    "save_strategy": "steps",
    "save_steps": 200,
    "eval_strategy": "epoch",
    "logging_steps": 10,
    "hub_token": None,
    "fsdp": "full_shard auto_wrap offload",
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"], "min_num_params": 0},
}


def init(folder: Path, arguments: object, task: str = "causal-lm") -> Any:
    source = folder / "args.json"
    source.write_text(json.dumps(arguments))
    words = ["init", task, "--from", str(source), "-o", str(folder / "run.yaml")]
    return CliRunner().invoke(main, words, prog_name="runner")


def test_arguments_with_fsdp_become_a_run_file(tmp_path: Path) -> None:
    done = init(tmp_path, ARGUMENTS)
    assert done.exit_code == 0, done.output
    config = RunConfig.load(tmp_path / "run.yaml")
    assert (config.engine.name, config.engine.sharding) == ("fsdp", "full")
    assert config.engine.offload == "cpu" and config.engine.wrap == {"layer": "GPT2Block"}
    assert (config.batch.micro, config.epochs, config.steps) == (4, 2.0, None)
    assert (config.optimizer.lr, config.optimizer.betas) == (2e-5, (0.9, 0.95))
    assert (config.schedule.name, config.schedule.warmup) == ("constant", 0.03)
    assert (config.precision, config.checkpoint.every) == ("bf16", 200)
    assert config.evaluation.every == "epoch"
    assert "optimizer.lr: 2e-05 (from args.json, learning_rate: 2e-05)" in done.stdout


def test_what_has_no_equal_is_in_a_comment_and_on_stderr(tmp_path: Path) -> None:
    done = init(tmp_path, ARGUMENTS)
    text = (tmp_path / "run.yaml").read_text()
    for line in (
        "gradient_accumulation_steps: 8: left out; it follows from batch.global",
        "logging_steps: 10: left out; no equal here",
        "output_dir: out: left out; the run folder",
    ):
        assert f"#   {line}" in text and line in done.stderr
    assert "hub_token" not in text + done.stderr


def test_a_deepspeed_config_inside_the_arguments_is_written_beside_the_run_file(
    tmp_path: Path,
) -> None:
    theirs = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    done = init(tmp_path, {"deepspeed": theirs, "max_steps": 50, "num_train_epochs": 3})
    assert done.exit_code == 0, done.output
    config = RunConfig.load(tmp_path / "run.yaml")
    assert (config.engine.name, config.engine.zero) == ("deepspeed", 2)
    assert (config.steps, config.epochs) == (50, None)
    assert json.loads((tmp_path / "run.ds_config.json").read_text()) == theirs


def test_a_path_of_a_deepspeed_config_is_relative_to_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert init(tmp_path, {"deepspeed": "ds.json"}).exit_code == 0
    assert RunConfig.load(tmp_path / "run.yaml").engine.zero == 1


def test_without_fsdp_and_deepspeed_it_is_ddp_and_what_the_example_adds_goes(
    tmp_path: Path,
) -> None:
    done = init(tmp_path, {"learning_rate": 1e-4, "optim": "muon"}, "instruction")
    config = RunConfig.load(tmp_path / "run.yaml")
    assert config.engine.name == "ddp" and config.lora is None and config.quantization is None
    assert "lora: left out" in done.stderr or "lora" in done.stderr
    assert "optim: muon: left out; optimizer.name is one of adamw" in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "args.json:1: not JSON"),
        ("[1]", "expected {...}"),
        ('{"learning_rate": "fast"}', "wrong type"),
        ('{"fsdp": "hybrid_shard"}', "HYBRID_SHARD cannot be done here"),
    ],
)
def test_arguments_that_cannot_be_read_write_nothing(tmp_path: Path, text: str, words: str) -> None:
    source = tmp_path / "args.json"
    source.write_text(text)
    out = tmp_path / "run.yaml"
    words_of = ["init", "causal-lm", "--from", str(source), "-o", str(out)]
    done = CliRunner().invoke(main, words_of, prog_name="runner")
    assert done.exit_code == 2 and words in done.output and not out.exists()


def test_max_steps_of_minus_one_means_the_epochs() -> None:
    assert "steps" not in trainer.read({"max_steps": -1}, Path("a")).values


def test_saves_by_epoch_sgd_and_label_smoothing_are_taken() -> None:
    theirs = {"save_strategy": "epoch", "save_steps": 500, "optim": "sgd"}
    found = trainer.read({**theirs, "label_smoothing_factor": 0.1}, Path("a"))
    assert not found.left_out
    assert found.values == {
        "checkpoint.every": "epoch",
        "optimizer.name": "sgd",
        "optimizer.momentum": 0.0,
        "label_smoothing": 0.1,
        "engine.name": "ddp",
    }
    best = trainer.read({"save_strategy": "best"}, Path("a"))
    assert any(key.startswith("save_strategy") for key in best.left_out)
    with pytest.raises(UsageError):
        trainer.read({"seed": "x"}, Path("a"))


def test_wandb_is_taken_and_other_loggers_are_named() -> None:
    assert trainer.read({"report_to": ["tensorboard", "wandb"]}, Path("a")).values["wandb"] is True
    other = trainer.read({"report_to": "mlflow"}, Path("a"))
    assert "wandb" not in other.values
    assert any(key.startswith("report_to") for key in other.left_out)
