"""Tokenises once, outside the ranks: parquet -> documents -> one stream of ids -> full sequences -> store.

Documents are joined by the tokenizer's separator and cut into sequences without padding (RoBERTa, arXiv:1907.11692,
4.2, FULL-SENTENCES): on short lines that is several times more text a step than padding each. The store's key is the
digest of everything that decides its content, so a second call finds it and returns at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import RunConfig
from runner.data.store import FACTS, TOKENS, StoreFacts, TokenStore, facts_text
from runner.errors import UsageError, human_count, human_size
from runner.inputs import Inputs, ModelInput, SplitInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STORE_FORMAT = 2
TEXTS_AT_ONCE = 1000  # rows read and tokenised together: bounds the memory
ABANDONED_S = 24 * 3600  # a preparation writes every few seconds


@dataclass(frozen=True)
class Recipe:
    """What decides the content of a store, for one split."""

    task: str
    sequence_length: int
    split: SplitInput
    text: str
    limit: int | None
    model: ModelInput

    def to_json(self) -> dict[str, Any]:
        """The recipe as data: what the key is the digest of."""
        return {
            "format": STORE_FORMAT,
            "task": self.task,
            "sequence_length": self.sequence_length,
            "text": self.text,
            "limit": self.limit,
            "data": list(self.split.digests),
            "tokenizer": self.model.tokenizer_digests,
        }

    @property
    def key(self) -> str:
        """Names the store: 24 hex digits."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:24]


def recipes(config: RunConfig, inputs: Inputs, sequence_length: int) -> dict[str, Recipe]:
    """The stores a run needs: `train`, and `validation` if there is one."""
    splits = {"train": inputs.train} | ({"validation": inputs.validation} if inputs.validation else {})
    return {
        role: Recipe(
            config.task, sequence_length, split, config.dataset.text, config.dataset.limit.get(role), inputs.model
        )
        for role, split in splits.items()
    }


def is_prepared(recipe: Recipe, stores: Path) -> bool:
    """Whether the store is there."""
    return (stores / recipe.key / FACTS).is_file()


def prepare(recipe: Recipe, stores: Path, say: Callable[[str], None]) -> TokenStore:
    """The store of a recipe, made now if it is not there.

    Raises:
        UsageError: the tokenizer lacks a token the task needs, or the text is too short for one sequence.
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = stores / recipe.key
    if is_prepared(recipe, stores):
        store = TokenStore.open(folder)
        say(f"{recipe.split.name}: already prepared: {_described(store)}")
        return store
    temporary = stores / f"{recipe.key}.{platform.node()}-{os.getpid()}.tmp"
    _drop_abandoned(stores)
    temporary.mkdir(parents=True)
    try:
        _write(recipe, temporary)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    store = TokenStore.open(folder)
    say(f"{recipe.split.name}: prepared {_described(store)} in {folder}")
    return store


def _drop_abandoned(stores: Path) -> None:
    """Removes what a killed preparation left: of a process of this machine that is gone, or untouched for a day."""
    for left in stores.glob("*.tmp"):
        host, _, process = left.name.removesuffix(".tmp").partition(".")[2].rpartition("-")
        gone = host == platform.node() and process.isdecimal() and not _is_alive(int(process))
        try:
            last_written = max(path.stat().st_mtime for path in (left, *left.iterdir()))
        except OSError:  # its process has just finished it
            continue
        if gone or time.time() - last_written > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def open_prepared(recipe: Recipe, stores: Path, command: str) -> TokenStore:
    """The store of a recipe, in a rank: never made here.

    Args:
        command: what makes it, for the message.

    Raises:
        UsageError: it is not there.
    """
    if not is_prepared(recipe, stores):
        raise UsageError(f"{stores / recipe.key}: split `{recipe.split.name}` is not prepared.", command)
    return TokenStore.open(stores / recipe.key)


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


def frame(task: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int, list[int]]:
    """How sequences are built: ids before each, the id between documents, ids after each.

    Masked-lm sequences are `[CLS] text [SEP] text ... [SEP]`; causal-lm ones have only the end-of-text token between
    documents.

    Raises:
        UsageError: the tokenizer lacks the token.
    """
    if task == "masked-lm":
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "masked-lm: this tokenizer has no mask token.", "Use `task: causal-lm`, or a model such as BERT."
            )
        if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
            return [tokenizer.cls_token_id], tokenizer.sep_token_id, [tokenizer.sep_token_id]
    separator = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if separator is None:
        raise UsageError(f"{task}: this tokenizer has neither an end-of-text nor a separator token.")
    return [], int(separator), []


def _write(recipe: Recipe, folder: Path) -> None:
    import numpy as np

    tokenizer = load_tokenizer(recipe.model)
    before, separator, after = frame(recipe.task, tokenizer)
    body = recipe.sequence_length - len(before) - len(after)
    dtype = np.dtype("<u2") if len(tokenizer) <= 2**16 else np.dtype("<u4")
    pending = np.empty(0, dtype=dtype)
    num_sequences = num_documents = 0
    with open(folder / TOKENS, "wb") as file:
        for documents in _documents(recipe, tokenizer):
            num_documents += len(documents)
            pending = np.concatenate([pending, *(np.array([*ids, separator], dtype=dtype) for ids in documents)])
            whole = len(pending) // body
            file.write(_framed(pending[: whole * body].reshape(whole, body), before, after).tobytes())
            num_sequences += whole
            pending = pending[whole * body :]
        file.flush()
        os.fsync(file.fileno())
    if num_sequences == 0:
        raise UsageError(
            f"split `{recipe.split.name}`: its {human_count(num_documents, 'text')} do not fill one sequence of "
            f"{recipe.sequence_length} tokens.",
            "Set a smaller sequence_length, or raise dataset.limit.",
        )
    facts = StoreFacts(
        num_sequences=num_sequences,
        sequence_length=recipe.sequence_length,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_tokens=num_sequences * recipe.sequence_length,
        num_documents=num_documents,
        dropped_tokens=len(pending),
        recipe=recipe.to_json(),
    )
    with open(folder / FACTS, "wb") as file:
        file.write(facts_text(facts))
        file.flush()
        os.fsync(file.fileno())


def _framed(rows: Any, before: list[int], after: list[int]) -> Any:
    """Rows of shape (n, body length) with the special tokens round each, in the same dtype."""
    import numpy as np

    sides = (np.tile(np.array(ids, dtype=rows.dtype), (len(rows), 1)) for ids in (before, after))
    first, last = sides
    return np.concatenate([first, rows, last], axis=1)


def _documents(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[list[int]]]:
    """Token ids of the texts that hold anything, without special tokens, in the order of the files, many at a time."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        # Published tokenizer.json files often cut or fill each text to a length: here every token counts, once.
        fast.no_truncation()
        fast.no_padding()
    for rows in _texts(recipe):
        texts = [text for text in rows if text and not text.isspace()]
        if fast is not None:
            documents = [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        yield [ids for ids in documents if ids]


def _texts(recipe: Recipe) -> Iterator[list[str | None]]:
    """The text column, some rows at a time, up to the limit."""
    import pyarrow.parquet as pq

    left = recipe.limit if recipe.limit is not None else recipe.split.rows
    for path in recipe.split.files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=TEXTS_AT_ONCE, columns=[recipe.text]):
                if left <= 0:
                    return
                texts = batch.column(0).to_pylist()[:left]
                left -= len(texts)
                yield texts


def _publish(temporary: Path, folder: Path) -> None:
    """Renames a finished store into place, read-only; if another process was first, its store stays."""
    for name in (TOKENS, FACTS):
        (temporary / name).chmod(0o444)
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / FACTS).is_file():
            raise


def _described(store: TokenStore) -> str:
    facts = store.facts
    size = human_size((store.folder / TOKENS).stat().st_size)
    return (
        f"{human_count(facts.num_sequences, 'sequence')} of {facts.sequence_length} tokens "
        f"from {human_count(facts.num_documents, 'text')} "
        f"({facts.dtype}, {size}; the last {facts.dropped_tokens} tokens fill no sequence)"
    )
