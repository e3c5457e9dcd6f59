"""Tokenizers of staged models, and what a task needs of one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.errors import UsageError
from runner.inputs import ModelInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Frame(NamedTuple):
    """The special tokens of a sequence.

    Attributes:
        before: ids before each sequence.
        separator: the id between two documents.
        after: ids after each sequence.
    """

    before: list[int]
    separator: int
    after: list[int]


def load_tokenizer(model: ModelInput) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a staged model, once per process.

    Raises:
        UsageError: transformers cannot load one from the folder.
    """
    return _load(model.path)


@cache
def _load(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder}: no tokenizer can be loaded: {str(error).strip().splitlines()[0]}",
            "Stage a model whose repository has tokenizer.json (or vocab.txt, tokenizer.model).",
        ) from None


def frame(task: str, tokenizer: PreTrainedTokenizerBase) -> Frame:
    """Returns the special tokens of the sequences of a task.

    Masked-lm sequences are `[CLS] text [SEP] text ... [SEP]`. Others have only the end-of-text
    token between documents.

    Raises:
        UsageError: the tokenizer lacks a token that the task needs.
    """
    if task == "masked-lm":
        if tokenizer.mask_token_id is None:
            raise UsageError(
                f"masked-lm: the tokenizer in {tokenizer.name_or_path} has no mask token.",
                "Use `task: causal-lm`, or a model such as BERT.",
            )
        if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
            return Frame([tokenizer.cls_token_id], tokenizer.sep_token_id, [tokenizer.sep_token_id])
    separator = (
        tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    )
    if separator is None:
        raise UsageError(
            f"{task}: the tokenizer in {tokenizer.name_or_path} has neither an end-of-text "
            "nor a separator token.",
            "Stage the tokenizer_config.json or special_tokens_map.json that names them, "
            "or another model.",
        )
    return Frame([], int(separator), [])


def fast_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns the fast tokenizer (`tokenizers.Tokenizer`), without truncation and padding.

    Published tokenizer.json files often set both. Here every token counts, once.

    Returns:
        The fast tokenizer; None: this tokenizer has none.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        fast.no_truncation()
        fast.no_padding()
    return fast
