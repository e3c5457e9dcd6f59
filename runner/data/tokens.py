"""Writes the files of a token store: documents -> sequences -> `tokens.bin` and its companions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from runner.data import instruction
from runner.data.documents import Document, Joiner, framed, token_ids
from runner.data.packing import fill
from runner.data.recipe import Recipe
from runner.data.store import DOCUMENTS, LEARNED, ROWS, TOKENS, StoreFacts
from runner.data.tokenizing import frame, load_tokenizer
from runner.errors import UsageError, human_count

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

# Documents that are packed together. This bounds the memory; the last sequences of each batch are
# less full.
PACKED_AT_ONCE = 10_000


def write(recipe: Recipe, folder: Path) -> StoreFacts:
    """Tokenises a split into a folder.

    Args:
        recipe: what to read, and how.
        folder: an empty folder.

    Returns:
        The content of `store.json`, which is not written here.

    Raises:
        UsageError: the tokenizer lacks a token that the task needs, or there is nothing to train
            on.
    """
    import numpy as np

    tokenizer = load_tokenizer(recipe.model)
    dtype = np.dtype("<u2") if len(tokenizer) <= 2**16 else np.dtype("<u4")
    if recipe.documents == "joined":
        return _write_joined(recipe, folder, tokenizer, dtype)
    return _write_whole(recipe, folder, tokenizer, dtype)


def _name(dtype: np.dtype[Any]) -> str:
    return "uint16" if dtype.itemsize == 2 else "uint32"


def _write_joined(
    recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase, dtype: np.dtype[Any]
) -> StoreFacts:
    joiner = Joiner(frame(recipe.task, tokenizer), recipe.sequence_length, dtype)
    num_sequences = num_documents = 0
    tally = instruction.Tally()
    with open(folder / TOKENS, "wb") as file:
        for documents in token_ids(recipe, tokenizer, tally.add_empty):
            num_documents += len(documents)
            rows = joiner.add(documents)
            num_sequences += len(rows)
            file.write(rows.tobytes())
    if num_sequences == 0:
        raise UsageError(
            f"split `{recipe.split.name}`: its {human_count(num_documents, 'text')} do not fill "
            f"one sequence of {recipe.sequence_length} tokens "
            f"({human_count(tally.nothing_to_learn, 'row')} left out: empty).",
            "Set a smaller sequence_length, or raise dataset.limit.",
        )
    return StoreFacts(
        num_sequences=num_sequences,
        sequence_length=recipe.sequence_length,
        dtype=_name(dtype),
        num_tokens=num_sequences * recipe.sequence_length,
        num_documents=num_documents,
        dropped_tokens=len(joiner.pending),
        recipe=recipe.to_json(),
        dropped_documents=tally.nothing_to_learn,
        empty_documents=tally.nothing_to_learn,
    )


def _write_whole(
    recipe: Recipe, folder: Path, tokenizer: PreTrainedTokenizerBase, dtype: np.dtype[Any]
) -> StoreFacts:
    tally = instruction.Tally()
    has_learned = recipe.task == "instruction" and recipe.dataset.loss_on == "response"
    num_sequences = num_documents = num_tokens = 0
    with _Files(folder, dtype, has_learned=has_learned) as files:
        for documents in _in_chunks(_documents(recipe, tokenizer, tally)):
            num_documents += len(documents)
            lengths = [len(document.ids) for document in documents]
            # `alone`: each document has a sequence, however short it is.
            sequences = (
                fill(lengths, recipe.sequence_length)
                if recipe.documents == "separate"
                else [[number] for number in range(len(documents))]
            )
            for sequence in sequences:
                num_tokens += files.add([documents[number] for number in sequence])
            num_sequences += len(sequences)
    if num_sequences == 0:
        raise UsageError(f"split `{recipe.split.name}`: {_why_nothing(tally, recipe)}.", _WHAT_THEN)
    return StoreFacts(
        num_sequences=num_sequences,
        sequence_length=recipe.sequence_length,
        dtype=_name(dtype),
        num_tokens=num_tokens,
        num_documents=num_documents,
        dropped_tokens=0,
        recipe=recipe.to_json(),
        documents=recipe.documents,
        has_learned=has_learned,
        dropped_documents=tally.too_long + tally.nothing_to_learn,
        cut_documents=tally.cut,
        empty_documents=tally.nothing_to_learn,
        unasked_documents=tally.no_prompt,
    )


_WHAT_THEN = (
    "Look at the columns, set a larger sequence_length, `too_long: cut`, or raise dataset.limit."
)


def _why_nothing(tally: instruction.Tally, recipe: Recipe) -> str:
    return (
        f"nothing to train on: {human_count(tally.too_long, 'sample')} longer than "
        f"{recipe.sequence_length} tokens, "
        f"{tally.nothing_to_learn} empty or without a response"
    )


def _documents(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tally: instruction.Tally
) -> Iterator[list[Document]]:
    if recipe.task == "instruction":
        yield from instruction.documents(recipe, tokenizer, tally)
        return
    built = frame(recipe.task, tokenizer)
    for several in token_ids(recipe, tokenizer, tally.add_empty):
        yield [piece for ids in several for piece in framed(ids, built, recipe.sequence_length)]


def _in_chunks(parts: Iterator[list[Document]]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    for part in parts:
        chunk += part
        if len(chunk) >= PACKED_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class _Files:
    """Writes the files of a store of whole documents."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], *, has_learned: bool) -> None:
        self._folder, self._dtype, self._has_learned = folder, dtype, has_learned
        self._files: dict[str, BinaryIO] = {}
        self._end = 0

    def __enter__(self) -> _Files:
        names = [TOKENS, ROWS, DOCUMENTS, *([LEARNED] if self._has_learned else [])]
        with ExitStack() as stack:
            self._files = {
                name: stack.enter_context(open(self._folder / name, "wb")) for name in names
            }
            self._stack = stack.pop_all()
        self._mark()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _mark(self) -> None:
        self._files[ROWS].write(self._end.to_bytes(8, "little"))

    def add(self, documents: list[Document]) -> int:
        """Writes one sequence; returns its number of tokens."""
        import numpy as np

        before = self._end
        for number, (ids, learned) in enumerate(documents, start=1):
            self._files[TOKENS].write(ids.astype(self._dtype).tobytes())
            self._files[DOCUMENTS].write(np.full(len(ids), number, dtype="<u2").tobytes())
            if self._has_learned and learned is not None:
                self._files[LEARNED].write(learned.astype(np.uint8).tobytes())
            self._end += len(ids)
        self._mark()
        return self._end - before
