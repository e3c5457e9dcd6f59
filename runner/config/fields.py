"""The keys of a run file as a whole: defaults, unused keys, `--set`, choices as text. Pure.

Each component of a run file is a dataclass whose fields `setting` declares.

A task is a plug-in: a file of `runner.tasks`, which is built from `runner.data` and so from this
folder. Nothing here imports it: the files are found by name when the first run file is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple

from runner.from_stage import (
    Key,
    Lines,
    UsageError,
    Where,
    dotted,
    keys_of,
    lookup,
    read_value,
)


class Choice(NamedTuple):
    """One automatic choice, for printing.

    Attributes:
        key: dotted key of the run file.
        value: the chosen value.
        reason: why.
        group: the heading under which it is printed; empty: the section of its key.
    """

    key: str
    value: object
    reason: str
    group: str = ""


def every_key(component: Any, where: Where = ()) -> Iterator[tuple[Where, Key, Any]]:
    """Yields the keys of a component and of those inside it, each with its value."""
    for key in keys_of(type(component)).values():
        value, here = getattr(component, key.field), (*where, key.name)
        if dataclasses.is_dataclass(value):
            yield from every_key(value, here)
        elif isinstance(value, tuple) and key.component:
            for number, item in enumerate(value):
                yield from every_key(item, (*here, number))
        else:
            yield here, key, value


def unused_keys(config: Any) -> Iterator[tuple[Where, Key, Any]]:
    """Yields the keys that mean nothing beside the value of another key."""
    for where, key, value in every_key(config):
        if key.only and lookup(config, key.only[0]) not in key.only[1]:
            yield where, key, value


def check_unused_keys(config: Any, wrong: set[str], lines: Lines) -> None:
    """Finds keys that mean nothing here, and are not their defaults: `config.yaml` has all keys.

    The mistakes are kept in `lines.mistakes`.

    Args:
        config: the run file.
        wrong: dotted keys whose values are not known.
    """
    for where, key, value in unused_keys(config):
        other, values = key.only or ("", ())
        if value == key.default or other in wrong:
            continue
        actual = lookup(config, other)
        with lines.mistakes:
            raise UsageError(
                f"`{dotted(where)}` is only for {other}: "
                f"{' or '.join(map(str, values))}; it is {actual} here.",
                f"Remove it, or set {other}: {values[0]}.{_those_that_are(config, where, actual)}",
                place=lines.place(*where),
            )


def _those_that_are(config: Any, where: Where, actual: object) -> str:
    names = [
        key.name
        for other, key, _ in every_key(config)
        if other[:-1] == where[:-1] and key.only and actual in key.only[1]
    ]
    return f" With {actual} there are {', '.join(names)}." if where[1:] and names else ""


LEFT_OUT = "left out"
"""The value of a key of the user's ds_config.json that is not used."""
EMPTY_VALUES: tuple[object, ...] = (None, "", {}, ())


def choice_lines(choices: Iterable[Choice]) -> list[str]:
    """Returns one line per choice: key, value and reason."""
    return [
        " ".join(f"{choice.key}: {shown(choice.value)}  ({choice.reason})".split("\n"))
        for choice in choices
        if choice.value not in EMPTY_VALUES
    ]


def choices_as_comments(choices: Iterable[Choice]) -> str:
    """Returns all choices as comments of a YAML file; empty: there are none."""
    lines = [f"#   {line}" for line in choice_lines(choices)]
    return "\n".join(["# Automatic choices, with reasons:", *lines, ""]) if lines else ""


def of_ds_config(notes: Iterable[Choice], choices: Iterable[Choice] = ()) -> list[str]:
    """Returns a line for each decision about the user's ds_config.json that it does not ask for.

    Args:
        notes: of the run file.
        choices: all of it: those for an "auto" of that file are on one line.
    """
    found = [note for note in notes if note.group and '"auto"' not in note.reason]
    lines = [f"{note.group}: {line}" for note in found for line in choice_lines([note])]
    autos = [choice for choice in choices if choice.group.startswith('"auto" in ')]
    if autos:
        values = ", ".join(f"{choice.key} {shown(choice.value)}" for choice in autos)
        lines.append(f"{autos[0].group}: {values}  (the run file's value, or its default)")
    return lines


def shown(value: object) -> str:
    """Returns a value as a run file has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, tuple) else str(value)


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


def found_tasks() -> dict[str, Any]:
    """Name -> task. Each folder asks with its own type: what it knows of a task."""
    found: dict[str, Any] = import_module("runner.tasks").TASKS
    return found


def task_names() -> Any:
    """The type of the key `task`: one of these names."""
    return Literal[tuple(found_tasks())]


def those_with(key: str) -> Callable[[], tuple[str, tuple[str, ...]]]:
    """The `only` of a key that some tasks have: `TaskKeys.keys`."""

    def only() -> tuple[str, tuple[str, ...]]:
        return "task", tuple(name for name, task in found_tasks().items() if key in task.keys)

    return only
