"""What is known of a tokenizer without transformers: its files, and the number of its tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner.errors import UsageError
from runner.inputs import ModelInput, unreadable

_VOCABULARY = re.compile(r"tokenizer\.json|vocab\.(txt|json)|.*\.model|tekken\.json|.*\.tiktoken")


def has_tokenizer(names: Iterable[str]) -> bool:
    """Returns whether a vocabulary is among these files of a model."""
    return any(map(_VOCABULARY.fullmatch, names))


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
    try:
        words = tokenizer["model"]["vocab"]
        ids = words if isinstance(words, dict) else {t: n for n, (t, _) in enumerate(words)}
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"tokenizer.add_tokens: `{model.asset}` has no tokenizer.json whose tokens can be "
            "counted.",
            "Stage a model whose repository has tokenizer.json.",
        ) from None
    added = {t["content"]: int(t["id"]) for t in tokenizer.get("added_tokens") or ()}
    unknown = [token for token in new if token not in ids and token not in added]
    first = max(len(words), max(added.values(), default=-1) + 1)
    return max(*ids.values(), *added.values(), first + len(unknown) - 1) + 1


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
