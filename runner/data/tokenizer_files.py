"""What is known of a tokenizer without transformers: its files, and the number of its tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import ModelInput, unreadable

_VOCABULARY = re.compile(r"tokenizer\.json|vocab\.(txt|json)|.*\.model|tekken\.json|.*\.tiktoken")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def check_tokenizer_files(config: RunConfig, model: ModelInput, vocabulary: int) -> None:
    """Refuses a tokenizer that cannot work. The ranks load it.

    Args:
        config: the run file.
        model: the model with the tokenizer.
        vocabulary: the number of tokens that the model knows; 0: not known.

    Raises:
        UsageError: there is no tokenizer, it has more tokens than the model, or it lacks the chat
            template that the run needs.
        DamageError: a file cannot be read.
    """
    if not has_tokenizer(model.digests):
        raise UsageError(
            f"{model.path}: no tokenizer can be loaded: it has none of a tokenizer's files.",
            "Stage a model whose repository has tokenizer.json (or vocab.txt, tokenizer.model).",
        )
    number = num_tokens(_read(model, "tokenizer.json"))
    if vocabulary and number > vocabulary:
        raise UsageError(
            f"{config.place('model.asset')}: "
            f"the tokenizer of `{model.asset}` knows {number} tokens, "
            f"its model {vocabulary}.",
            "Tokenizer and model do not belong together: stage both from one repository.",
        )
    chats = any(source.messages is not None for source in config.sources)
    if config.task == "instruction" and chats and not _has_template(model):
        raise UsageError(
            f"dataset.messages: the tokenizer in {model.path} has no chat template.",
            "Stage the model's chat_template.jinja too, or give `format` or `prompt` and "
            "`response`.",
        )


def has_tokenizer(names: Iterable[str]) -> bool:
    """Returns whether a vocabulary is among these files of a model."""
    return any(map(_VOCABULARY.fullmatch, names))


def num_tokens(tokenizer: dict[str, Any]) -> int:
    """The number of tokens in a tokenizer.json; 0: it does not say. Pure."""
    try:
        vocabulary = tokenizer["model"]["vocab"]
        known = set(vocabulary) if isinstance(vocabulary, dict) else {t for t, _ in vocabulary}
        return len(known | {added["content"] for added in tokenizer.get("added_tokens") or ()})
    except (KeyError, TypeError, ValueError):
        return 0


def rows_needed(model: ModelInput) -> int:
    """The rows that an embedding needs for all tokens, with those that the run adds.

    They get the ids that the library tokenizers gives them (added_vocabulary.rs, `add_tokens`).

    Returns:
        0: the run adds none.

    Raises:
        UsageError: there is no tokenizer.json, whose tokens are known.
        DamageError: a file cannot be read.
    """
    new = (*model.new_tokens, *model.new_special_tokens)
    if not new:
        return 0
    tokenizer = _read(model, "tokenizer.json")
    if not num_tokens(tokenizer):
        raise UsageError(
            f"tokenizer.add_tokens: `{model.asset}` has no tokenizer.json whose tokens can be "
            "counted.",
            "Stage a model whose repository has tokenizer.json.",
        )
    words = tokenizer["model"]["vocab"]
    size = len(words)
    ids = words if isinstance(words, dict) else {t: n for n, (t, _) in enumerate(words)}
    added = {t["content"]: int(t["id"]) for t in tokenizer.get("added_tokens") or ()}
    unknown = [token for token in new if token not in ids and token not in added]
    first = max(size, max(added.values(), default=-1) + 1)
    return max(*ids.values(), *added.values(), first + len(unknown) - 1) + 1


def _has_template(model: ModelInput) -> bool:
    # transformers also reads several templates, from a folder.
    is_template = any(n in _TEMPLATES or n.endswith(".jinja") for n in model.digests)
    return is_template or bool(_read(model, "tokenizer_config.json").get("chat_template"))


def _read(model: ModelInput, name: str) -> dict[str, Any]:
    """A JSON file of the model; empty: it has none of that name."""
    if name not in model.digests:
        return {}
    path: Path = model.path / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"not JSON: {error}") from None
    return found if isinstance(found, dict) else {}
