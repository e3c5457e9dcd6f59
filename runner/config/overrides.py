"""`--set key=value`: sets keys of a run file; and their names in other trainers.

A message about such a value names the command line instead of a line of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.errors import Lines, UsageError, read_value

NAMES_ELSEWHERE = {
    "add_tokens": "tokenizer.add_tokens",
    "batch_size": "batch.global",
    "bf16": "precision",
    "early_stopping_patience": "evaluation.patience",
    "early_stopping_steps": "evaluation.patience",
    "eval_steps": "evaluation.every",
    "fp16": "precision",
    "gpus": "slurm.gpus_per_node",
    "gradient_checkpointing": "activation_checkpointing",
    "label_smoothing_factor": "label_smoothing",
    "learning_rate": "optimizer.lr",
    "load_best_model_at_end": "checkpoint.best",
    "lr": "optimizer.lr",
    "lr_scheduler_type": "schedule.name",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "max_steps": "steps",
    "mlm_probability": "masked_share",
    "micro_batch_size": "batch.micro",
    "model_name_or_path": "model.asset",
    "num_train_epochs": "epochs",
    "partition": "slurm.partition",
    "per_device_train_batch_size": "batch.micro",
    "save_steps": "checkpoint.every",
    "warmup_ratio": "schedule.warmup",
    "warmup_steps": "schedule.warmup",
    "weight_decay": "optimizer.weight_decay",
}
"""Name of Trainer, of LLaMA-Factory or of everyday speech -> the dotted key of a run file."""


_LENGTHS = {"steps": "epochs", "epochs": "steps"}


def override(data: dict[str, Any], lines: Lines, overrides: Sequence[str]) -> None:
    """Sets keys of a run file's data to the values of `--set`.

    A text that is not `key=value` is kept in `lines.mistakes`. `steps` replaces `epochs` of the
    file, and the other way round: they are two ways to say one thing.

    Args:
        lines: of the file; they learn what the command line gave.
        overrides: `a.b=value` texts; each value is read as YAML.
    """
    for text in overrides:
        with lines.mistakes:
            keys, value = _key_and_value(text)
            lines.put(data, keys, value, f"--set {'.'.join(keys)}")
            other = _LENGTHS.get(".".join(keys))
            if other and value is not None and (other,) not in lines.elsewhere:
                lines.put(data, (other,), None, "")


_KEYS = ("epochs", "steps", "seed", "precision", "sequence_length", "compile", "lora", "task")
_SHORT = {
    "engine": "engine.name",
    "nodes": "slurm.nodes",
    "optimizer": "optimizer.name",
    "time": "slurm.time",
    "zero": "engine.zero",
}


def key_of_option(option: str) -> str | None:
    """The key of the run file that somebody gave as an option: `epochs` for `--epochs`."""
    name = option.lstrip("-").replace("-", "_")
    known = {key: key for key in _KEYS} | _SHORT | NAMES_ELSEWHERE
    return known.get(name)


def _key_and_value(text: str) -> tuple[tuple[str, ...], Any]:
    dotted, equals, value = text.partition("=")
    keys = tuple(dotted.strip().split("."))
    if not equals or not all(keys):
        raise UsageError(
            "expected key=value.", "For instance: --set batch.micro=4", place=f"--set {text}"
        )
    try:
        return keys, read_value(value)
    except ValueError:
        raise UsageError(
            f"`{value}` is not a YAML value.",
            f"Put text in two pairs of quotes: --set '{dotted}=\"...\"'",
            place=f"--set {text}",
        ) from None
