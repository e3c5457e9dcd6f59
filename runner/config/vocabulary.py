"""The key `tokenizer` of a run file: tokens that the staged tokenizer does not have. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runner.config.fields import setting
from runner.errors import Lines, UsageError


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """What is added to the model's vocabulary.

    Attributes:
        add_tokens: are found in texts; a tokenizer that lowers letters finds them in any case.
        add_special_tokens: as they stand, and left out when a text is decoded without special ones.
    """

    add_tokens: tuple[str, ...] = setting((), "the model's own vocabulary")
    add_special_tokens: tuple[str, ...] = setting((), "the model's own special tokens")


def check_tokens(config: Any, lines: Lines) -> None:
    """Finds new tokens that cannot be added, or that nothing would train.

    Args:
        config: the run file.
        lines: its line numbers; the mistakes are kept in `lines.mistakes`, or raised.
    """
    both = ("add_tokens", "add_special_tokens")
    seen: set[str] = set()
    for key in both:
        for token in getattr(config.tokenizer, key):
            with lines.mistakes:
                if not token.strip() or token in seen:
                    what = "is there twice" if token in seen else "is no token: it is empty"
                    raise UsageError(
                        f"{lines.place('tokenizer', key)}: `{token}` {what}.", "Remove it."
                    )
                seen.add(token)
    if seen and config.task == "image-classification":
        raise UsageError(f"{lines.place('tokenizer')}: images have no tokens.", "Remove it.")
    if seen and config.lora is not None:
        raise UsageError(
            f"{lines.place('tokenizer')}: new tokens do not go with `lora`: it does not train the "
            "embedding, so they would stay as they begin.",
            "Remove `lora`, or the new tokens.",
        )
