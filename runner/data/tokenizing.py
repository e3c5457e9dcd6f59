"""Tokenizers of staged models, and what a task needs of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from runner.errors import UsageError
from runner.inputs import ModelInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Frame(NamedTuple):
    """How sequences are built: ids before each, the id between documents, ids after each."""

    before: list[int]
    separator: int
    after: list[int]


def load_tokenizer(model: ModelInput) -> PreTrainedTokenizerBase:
    """The tokenizer of a staged model.

    Raises:
        UsageError: transformers cannot make one from the folder.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model.path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{model.path}: no tokenizer can be loaded: {str(error).strip().splitlines()[0]}",
            "Stage a model whose repository has tokenizer.json (or vocab.txt, tokenizer.model).",
        ) from None


def frame(task: str, tokenizer: PreTrainedTokenizerBase) -> Frame:
    """Masked-lm sequences are `[CLS] text [SEP] text ... [SEP]`; others have only the end of text between documents.

    Raises:
        UsageError: the tokenizer lacks the token.
    """
    if task == "masked-lm":
        if tokenizer.mask_token_id is None:
            raise UsageError(
                f"masked-lm: the tokenizer in {tokenizer.name_or_path} has no mask token.",
                "Use `task: causal-lm`, or a model such as BERT.",
            )
        if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
            return Frame([tokenizer.cls_token_id], tokenizer.sep_token_id, [tokenizer.sep_token_id])
    separator = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if separator is None:
        raise UsageError(
            f"{task}: the tokenizer in {tokenizer.name_or_path} has neither an end-of-text nor a separator token.",
            "Stage the tokenizer_config.json or special_tokens_map.json that names them, or another model.",
        )
    return Frame([], int(separator), [])


def whole(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The fast tokenizer inside, set to neither cut nor fill texts; None without one.

    Published tokenizer.json files often do both to each text: here every token counts, once.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        fast.no_truncation()
        fast.no_padding()
    return fast
