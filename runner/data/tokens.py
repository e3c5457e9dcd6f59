"""Texts and chats -> samples: documents of token ids in sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, TypeAlias

from runner.data.documents import Document, Joiner, framed, token_ids
from runner.data.packing import fill
from runner.data.recipe import Recipe
from runner.data.store import Sample, StoreFacts
from runner.data.tokenizing import Frame, id_type, load_tokenizer
from runner.errors import UsageError, human_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Read: TypeAlias = (
    "Callable[[Recipe, PreTrainedTokenizerBase, Counter[str]], Iterator[list[Document]]]"
)
"""Yields lists of documents of a split; counts the rows that become none."""

FrameOf: TypeAlias = "Callable[[PreTrainedTokenizerBase], Frame]"

# Documents that are packed together. This bounds the memory; the last sequences of each batch are
# less full.
PACKED_AT_ONCE = 10_000


def joined(recipe: Recipe, frame_of: FrameOf) -> Generator[Sample, None, StoreFacts]:
    """Yields full sequences of a split: `ids`.

    Args:
        recipe: of the split.
        frame_of: tokenizer -> the special tokens of a sequence.

    Raises:
        UsageError: the tokenizer lacks a token that the task needs, or the texts do not fill one
            sequence.
    """
    tokenizer, tally = load_tokenizer(recipe.model), Counter[str]()
    joiner = Joiner(frame_of(tokenizer), recipe.sequence_length, id_type(tokenizer))
    for documents in token_ids(recipe, tokenizer, tally):
        tally["texts"] += len(documents)
        for ids in joiner.add(documents):
            tally["sequences"] += 1
            yield {"ids": ids}
    texts, empty = human_count(tally["texts"], "text"), human_count(tally["empty"], "row")
    if not tally["sequences"]:
        raise UsageError(
            f"split `{recipe.split.name}`: its {texts} do not fill one sequence of "
            f"{recipe.sequence_length} tokens ({empty} left out: empty).",
            "Set a smaller sequence_length, or raise dataset.limit.",
        )
    tail = f"the last {human_count(len(joiner.pending), 'token')} would fill no sequence"
    return StoreFacts(
        recipe.to_json(),
        f"{human_count(tally['sequences'], 'sequence')} of {recipe.sequence_length} tokens "
        f"from {texts}",
        [*([f"{empty} left out: empty"] if tally["empty"] else []), tail],
        documents="joined",
    )


def whole(
    recipe: Recipe, read: Read, left_out: Callable[[Counter[str]], list[str]]
) -> Generator[Sample, None, StoreFacts]:
    """Yields sequences of whole documents: `ids`, `documents`, and `learned` if not all is.

    Args:
        recipe: what to read.
        read: reads the documents.
        left_out: notes on the rows that `read` counted.

    Raises:
        UsageError: the tokenizer lacks a token that the task needs, or there is nothing to train
            on.
    """
    import numpy as np

    tokenizer, tally = load_tokenizer(recipe.model), Counter[str]()
    dtype = id_type(tokenizer)
    for several in _in_chunks(read(recipe, tokenizer, tally)):
        lengths = [len(document.ids) for document in several]
        # `alone`: each document has a sequence, however short it is.
        sequences = (
            fill(lengths, recipe.sequence_length)
            if recipe.documents == "separate"
            else [[number] for number in range(len(several))]
        )
        for sequence in sequences:
            places = np.arange(1, len(sequence) + 1, dtype=np.uint16)
            sample = {
                "ids": np.concatenate([several[number].ids for number in sequence]).astype(dtype),
                "documents": places.repeat([lengths[number] for number in sequence]),
            }
            learned = [one for number in sequence if (one := several[number].learned) is not None]
            if learned and recipe.dataset.loss_on == "response":
                sample["learned"] = np.concatenate(learned).astype(np.uint8)
            tally["tokens"] += len(sample["ids"])
            yield sample
        tally["texts"] += len(several)
        tally["sequences"] += len(sequences)
    length = recipe.sequence_length
    if not tally["sequences"]:
        raise UsageError(
            f"split `{recipe.split.name}`: nothing to train on: "
            f"{human_count(tally['too_long'], 'sample')} longer than {length} tokens, "
            f"{tally['empty']} empty or without a response.",
            "Look at the columns, set a larger sequence_length, `too_long: cut`, or raise "
            "dataset.limit.",
        )
    notes = left_out(tally)
    if tally["no_prompt"]:
        notes.append(f"{tally['no_prompt']} kept with an empty prompt")
    full = tally["tokens"] / (tally["sequences"] * length)
    return StoreFacts(
        recipe.to_json(),
        f"{human_count(tally['sequences'], 'sequence')} of up to {length} tokens, {full:.0%} full, "
        f"documents {recipe.documents}, from {human_count(tally['texts'], 'text')}",
        notes,
        documents=recipe.documents,
    )


def pieces(frame_of: FrameOf) -> Read:
    """Yields the texts of a column as documents; those that are too long, in pieces.

    Args:
        frame_of: tokenizer -> the special tokens of each piece.
    """

    def read(
        recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
    ) -> Iterator[list[Document]]:
        frame = frame_of(tokenizer)
        for several in token_ids(recipe, tokenizer, tally):
            yield [piece for ids in several for piece in framed(ids, frame, recipe.sequence_length)]

    return read


def empty_rows(tally: Counter[str]) -> list[str]:
    """Notes on the rows without a text."""
    return [f"{human_count(tally['empty'], 'row')} left out: empty"]


def _in_chunks(parts: Iterator[list[Document]]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    for part in parts:
        chunk += part
        if len(chunk) >= PACKED_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
