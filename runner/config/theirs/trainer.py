"""TrainingArguments of transformers' Trainer, as JSON, as keys of a run file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner.config.theirs.accelerate import of_fsdp
from runner.config.theirs.found import Found, is_set, is_true
from runner.errors import UsageError, save_as_utf8, suggest_path

PLAIN: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "per_device_train_batch_size": ("batch.micro", int),
    "learning_rate": ("optimizer.lr", float),
    "weight_decay": ("optimizer.weight_decay", float),
    "adam_epsilon": ("optimizer.eps", float),
    "label_smoothing_factor": ("label_smoothing", float),
    "max_grad_norm": ("optimizer.clip", float),
    "num_train_epochs": ("epochs", float),
    "gradient_checkpointing": ("activation_checkpointing", is_true),
    "torch_compile": ("compile", is_true),
    "seed": ("seed", int),
    "save_total_limit": ("checkpoint.keep", int),
    "load_best_model_at_end": ("checkpoint.best", is_true),
}
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "sgd": "sgd",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
_REASONS = {
    "output_dir": "the run folder is output/ and the run's name; --output gives another",
    "gradient_accumulation_steps": "it follows from batch.global, batch.micro and the ranks",
    "per_device_eval_batch_size": "evaluation takes the micro batch of training",
    "resume_from_checkpoint": "a run resumes from its last checkpoint by itself",
    "do_train": "`runner train` trains",
    "do_eval": "the validation split is read where the dataset has one",
    "report_to": "the run folder has TensorBoard files and metrics; wandb: true adds wandb's",
    "push_to_hub": "there is no network",
    "deepspeed": "see `engine`",
}


_ARGUMENTS = "Give the text of `TrainingArguments.to_json_string()` in a file."


def load(path: Path) -> dict[str, Any]:
    """Reads the JSON file.

    Raises:
        UsageError: there is no such file, or it is no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", suggest_path(path, "")) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text.", save_as_utf8(path, error.object)) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}", _ARGUMENTS) from None
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise UsageError(f"{path}:{line}: not JSON: {error}", "Correct that line.") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: expected {{...}}, the TrainingArguments as JSON.", _ARGUMENTS)
    return data


def read(data: Mapping[str, Any], path: Path) -> Found:
    """Translates TrainingArguments. A path in `deepspeed` stays as it is.

    Raises:
        UsageError: a value has the wrong type, or FSDP is asked for in a way that is not here.
    """
    found = Found()
    rest = dict(data)
    try:
        _numbers(found, rest)
        _optimizer(found, rest)
        _length(found, rest)
        _checkpoints(found, rest)
        _precision(found, rest)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: a value has the wrong type: {error}", _ARGUMENTS) from None
    _engine(found, rest, path)
    loggers = rest.get("report_to")
    if "wandb" in (loggers if isinstance(loggers, list) else [loggers]):
        found.take("wandb", True, "report_to", rest.pop("report_to"))
    for key, value in rest.items():
        if is_set(value):
            found.leave(key, value, _REASONS.get(key, "no equal here"))
    return found


def _numbers(found: Found, rest: dict[str, Any]) -> None:
    for theirs, (key, convert) in PLAIN.items():
        value = rest.pop(theirs, None)
        if value is not None:
            found.take(key, convert(value), theirs, value)


def _optimizer(found: Found, rest: dict[str, Any]) -> None:
    betas = [rest.pop("adam_beta1", None), rest.pop("adam_beta2", None)]
    if betas != [None, None]:
        both = [0.9 if betas[0] is None else betas[0], 0.999 if betas[1] is None else betas[1]]
        found.take(
            "optimizer.betas", [float(beta) for beta in both], "adam_beta1, adam_beta2", both
        )
    for theirs, key, names in (
        ("optim", "optimizer.name", OPTIMIZERS),
        ("lr_scheduler_type", "schedule.name", SCHEDULES),
    ):
        value = rest.pop(theirs, None)
        if value in names:
            found.take(key, names[value], theirs, value)
            if value == "sgd":
                found.take("optimizer.momentum", 0.0, "optim", "torch's own default")
        elif value is not None:
            found.leave(
                theirs, value, f"{key} is one of {', '.join(dict.fromkeys(names.values()))}"
            )
    steps, ratio = rest.pop("warmup_steps", None), rest.pop("warmup_ratio", None)
    if steps:
        found.take("schedule.warmup", float(steps), "warmup_steps", steps)
    elif ratio is not None:
        found.take("schedule.warmup", float(ratio), "warmup_ratio", ratio)
    elif steps is not None:
        found.take("schedule.warmup", 0.0, "warmup_steps", steps)


def _length(found: Found, rest: dict[str, Any]) -> None:
    steps = rest.pop("max_steps", None)
    if steps is not None and int(steps) > 0:
        found.values.pop("epochs", None)
        found.reasons.pop("epochs", None)
        found.take("steps", int(steps), "max_steps", steps)


def _checkpoints(found: Found, rest: dict[str, Any]) -> None:
    for theirs, number, key in (
        ("save_strategy", "save_steps", "checkpoint.every"),
        ("eval_strategy", "eval_steps", "evaluation.every"),
    ):
        strategy, steps = rest.pop(theirs, None), rest.pop(number, None)
        if strategy == "epoch":
            found.take(key, "epoch", theirs, strategy)
        elif strategy == "best":
            found.leave(theirs, strategy, f"{key} is a number of steps, or a time")
        elif steps is not None and float(steps) >= 1 and strategy != "no":
            found.take(key, int(steps), number, steps)
        elif steps is not None and strategy != "no":
            found.leave(number, steps, f"{key} is a number of steps, not a share")


def _precision(found: Found, rest: dict[str, Any]) -> None:
    asked = {name: rest.pop(name) for name in ("bf16", "fp16") if rest.get(name) is not None}
    on = [name for name, value in asked.items() if is_true(value)]
    if on:
        found.take("precision", on[0], on[0], True)
    elif asked:
        found.take("precision", "fp32", ", ".join(asked), False)


def _engine(found: Found, rest: dict[str, Any], path: Path) -> None:
    fsdp, deepspeed = rest.pop("fsdp", None), rest.pop("deepspeed", None)
    settings = rest.pop("fsdp_config", None) or {}
    if is_set(fsdp):
        found.take("engine.name", "fsdp", "fsdp", fsdp)
        words = fsdp if isinstance(fsdp, list) else str(fsdp).split()
        if isinstance(settings, str):
            settings = load(path.parent / settings)
        found.add(of_fsdp(_as_accelerate(words, settings), lambda key: f"{path}: {key}"))
    elif is_set(deepspeed):
        found.take("engine.name", "deepspeed", "deepspeed", "...")
        if isinstance(deepspeed, str):
            found.take("engine.config", deepspeed, "deepspeed", deepspeed)
    else:
        found.take("engine.name", "ddp", "neither fsdp nor deepspeed", "Trainer uses DDP")


def _as_accelerate(words: list[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`fsdp` and `fsdp_config` of Trainer, under Accelerate's names."""
    theirs: dict[str, Any] = {}
    for word in map(str, words):
        if word == "offload":
            theirs["fsdp_offload_params"] = True
        elif word == "auto_wrap":
            by_size = settings.get("min_num_params") or settings.get("fsdp_min_num_params")
            kind = "SIZE_BASED_WRAP" if by_size else "TRANSFORMER_BASED_WRAP"
            theirs["fsdp_auto_wrap_policy"] = kind
        elif word.lower() != "true":
            theirs["fsdp_sharding_strategy"] = word.upper()
    for key, value in settings.items():
        name = key if key.startswith("fsdp_") else f"fsdp_{key}"
        if value not in (None, [], 0):
            theirs[name] = value
    return theirs
