"""Shows without transformers that a tokenizer serves a task, where its files say enough.

To import transformers takes two thirds of the time of `runner check`. `serves` only ever says yes.
In all other cases transformers loads the tokenizer, and its error is the one that is printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.inputs import ModelInput
from runner.plan.transformers_tables import tokens_of_class

_NEEDED = {"masked-lm": ("mask_token", "cls_token", "sep_token"), "causal-lm": ("eos_token",)}
"""Task -> the tokens that frame its sequences; see `runner.data.tokenizing.frame`."""
_OTHER_FORMATS = ("tekken.json",)


def serves(task: str, model: ModelInput) -> bool:
    """Returns whether the tokenizer of a model certainly loads and has the tokens of a task."""
    needed = _NEEDED.get(task)
    if (
        needed is None
        or "tokenizer.json" not in model.digests
        or any(name in model.digests for name in _OTHER_FORMATS)
    ):
        return False
    from tokenizers import Tokenizer

    try:
        settings = _mapping(model, "tokenizer_config.json")
        named = _mapping(model, "special_tokens_map.json") | settings
        own = tokens_of_class(
            str(model.settings.get("model_type")), settings.get("tokenizer_class")
        )
        if own is None or "auto_map" in settings:
            return False
        tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
        texts = [_text(named.get(role, own.get(role))) for role in needed]
    except Exception:  # noqa: BLE001 - tokenizers raises this class; transformers explains it
        return False
    has_words = tokenizer.get_vocab_size() > len(tokenizer.get_added_tokens_decoder())
    return has_words and all(text and tokenizer.token_to_id(text) is not None for text in texts)


def _mapping(model: ModelInput, name: str) -> dict[str, Any]:
    if name not in model.digests:
        return {}
    found = json.loads(Path(model.path / name).read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no mapping")
    return found


def _text(token: object) -> str | None:
    """Returns the text of a token as transformers accepts it; None: it may be wrong."""
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        token = token.get("content")
    return token if isinstance(token, str) else None
