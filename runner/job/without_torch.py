"""What transformers says about a run without torch: its config, its tokenizer, its first rows.

`look` runs in a child process, which has no network and cannot import torch: that saves seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from runner import offline
from runner.config.run_config import RunConfig
from runner.data.recipe import Recipe
from runner.data.tokenizing import load_tokenizer
from runner.errors import StageError, UsageError, shortage
from runner.inputs import Inputs, ModelInput
from runner.job.findings import (
    Finding,
    attempt,
    errors_in,
    errors_of,
    fact_line,
    usage_error,
    warning,
)
from runner.job.installed import leave_torch_alone
from runner.job.model import newer_transformers
from runner.tasks import Task, task_named

NAMED = 3  # at most so many tokens are named in a message
FEW = 0.5  # a tokenizer with less than this share of the embedding's rows is worth a line
SPECIAL = ("bos", "eos", "unk", "cls", "sep", "mask")
"""Tokens that training itself may write. Not the padding: a batch here is filled with others."""


def look(
    config: RunConfig,
    inputs: Inputs,
    rows: tuple[int, str],
    train: Sequence[Recipe],
    counted: Sequence[Recipe],
) -> tuple[list[Finding], list[int | None]]:
    """Loads what the ranks will load of a model's small files.

    Args:
        rows: of the embedding (0: not known), and where that is written.
        train: what is trained on, where `Task.writes_chats`: its first rows are written as samples.
        counted: splits that are so small that they may not fill a step.

    Returns:
        What was found; and for each of `counted` its sequences.
    """
    leave_torch_alone()
    offline.close_network()
    found, numbers = [*attempt(check_config, config, inputs.model)], list[int | None]()
    if task_named(config.task).has_tokens:
        found += attempt(_look_at_tokenizer, config, inputs, rows)
    if not errors_in(found):
        for recipe in train:
            found += attempt(_write_samples, config, recipe)
    if errors_in(found):
        return found, []
    for recipe in counted:
        try:
            numbers.append(count(recipe))
        except StageError as error:
            found += errors_of(error)
            numbers.append(None)
    return found, numbers


def check_config(config: RunConfig, model: ModelInput) -> None:
    """Refuses a config.json that the installed transformers does not read, with its words."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(model.path), local_files_only=True, trust_remote_code=False)
    except ImportError:
        return  # of torch, or of a package for one kind of model: the ranks have it
    except Exception as error:
        if shortage(error):
            raise
        said = " ".join(str(error).split())[:300] or type(error).__name__
        wanted, here = newer_transformers(model), metadata.version("transformers")
        remedy = "Stage the model again, with its own config.json unchanged, or use another model."
        if wanted:
            remedy = (
                f"transformers {wanted} wrote it: pip install -U 'transformers>={wanted}', in the "
                "environment of the job too."
            )
        raise UsageError(
            f"{config.path}: transformers {here} does not read "
            f"{model.path / 'config.json'}: {said}",
            remedy,
        ) from None


def _look_at_tokenizer(
    config: RunConfig, inputs: Inputs, rows: tuple[int, str]
) -> Iterator[Finding]:
    model, task = inputs.model, task_named(config.task)
    tokenizer = load_tokenizer(model)
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # transformers makes an empty one of the class that config.json names.
        raise UsageError(
            f"`{config.model.asset}` has no tokenizer: none of its files (tokenizer.json, "
            "vocab.txt, vocab.json, a SentencePiece model) is in the bundle, or they hold no "
            "tokens.",
            "Stage the tokenizer's files with the model, from the same repository.",
        )
    if rows[0]:
        yield from compare(task, model, tokenizer, *rows)
    yield from map(fact_line, task.check_tokenizer(config, inputs, tokenizer))


def compare(
    task: Task, model: ModelInput, tokenizer: Any, rows: int, where: str
) -> Iterator[Finding]:
    """Compares the ids of a tokenizer with the rows of an embedding.

    An id beyond them reads past their end: on a GPU an assertion in CUDA, on a CPU an index error
    or nan. The opposite is normal: embeddings are padded to a multiple of 64 or more. A token that
    was added beyond them and never appears in a text does no harm (Gemma 3 1B has one).
    """
    asset, new = f"`{model.asset}`: its tokenizer", {*model.new_tokens, *model.new_special_tokens}
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    own = {n for text, n in tokenizer.get_vocab().items() if n not in added and text not in new}
    highest, count = max(own, default=-1), len(own | added.keys())
    remedy = "Tokenizer and model do not belong together: stage both from one repository."
    if highest >= rows:
        yield usage_error(
            f"{asset} knows {max(count, highest + 1)} tokens, its model {rows} (ids up to "
            f"{highest}; {where}).",
            remedy,
        )
        return
    beyond = {n: text for n, text in added.items() if n >= rows and text not in new}
    template = str(tokenizer.chat_template or "") if task.writes_chats else ""
    special = {getattr(tokenizer, f"{role}_token", None) for role in SPECIAL}
    if used := {
        n: text
        for n, text in beyond.items()
        if task.draws_tokens or text in special or text in template
    }:
        yield usage_error(
            f"{asset} adds {_named(used)} beyond the model's {rows} ids ({where}).",
            "Resize the model's embedding and save it (model.resize_token_embeddings), then "
            "stage it again; or remove the tokens from the tokenizer.",
        )
    elif beyond:
        yield warning(
            f"{asset} adds {_named(beyond)} beyond the model's {rows} ids: a text in which they "
            "are written would end the run.",
            "Check that the texts hold none of them.",
        )
    if count < FEW * rows:
        yield warning(
            f"{asset} knows {count} tokens, its model {rows}.",
            f"If that is not intended: {remedy[0].lower()}{remedy[1:]}",
        )


def _named(tokens: dict[int, str]) -> str:
    named = [f"{text} ({number})" for number, text in sorted(tokens.items())[:NAMED]]
    more = len(tokens) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _write_samples(config: RunConfig, recipe: Recipe) -> Iterator[Finding]:
    tokenizer = load_tokenizer(recipe.model)
    if problem := task_named(recipe.task).try_first_rows(recipe, tokenizer):
        yield warning(
            f"{config.path}: {problem}.",
            "Look at these rows: in `messages`, the answers need the role `assistant`; "
            "dataset.response names the column of the answers; a longer sequence_length, or "
            "dataset.too_long: cut, keeps long rows.",
        )


def count(recipe: Recipe) -> int:
    """Prepares a split, and returns the number of its sequences.

    Raises:
        UsageError: there is none.
    """
    return sum(1 for _ in task_named(recipe.task).samples(recipe))
