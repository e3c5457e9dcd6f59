"""How texts and chats become sequences of token ids.

Texts -> documents of token ids -> sequences. `joined`: documents follow each other with a separator
between them, and the stream is cut into full sequences (RoBERTa, arXiv:1907.11692, 4.2,
FULL-SENTENCES). With short lines, a step then reads several times more text than with padding.
`separate` and `alone`: each document keeps its own frame. A document that is longer than a sequence
continues in further sequences; a chat is left out or cut, as `dataset.too_long` says.

Which documents share a sequence is decided by their lengths: best fit, the longest first (Johnson,
1973), as Krell et al. use it for BERT (arXiv:2107.02027). Documents stay whole, little space is
unused, and the result is always the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from runner.data.recipe import Recipe
from runner.data.store import Sample, StoreFacts
from runner.data.table import columns, read_ahead
from runner.data.tokenizing import Tokenizer, fast_tokenizer, id_type, load_tokenizer
from runner.from_stage import UsageError, human_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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


def fill(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts documents into as few sequences as best fit finds.

    Args:
        lengths: tokens of each document, at most `capacity`.
        capacity: tokens of a sequence.

    Returns:
        Sequences as lists of document numbers. Each document is in one of them. The sequences are
        in the order of their first documents.
    """
    sequences: list[list[int]] = []
    by_space: dict[int, list[list[int]]] = {}  # free tokens -> sequences
    spaces: list[int] = []  # the keys of `by_space`, ascending
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        index = bisect_left(spaces, lengths[number])
        if index == len(spaces):
            sequence: list[int] = []
            sequences.append(sequence)
            left = capacity
        else:
            left = spaces[index]
            sequence = by_space[left].pop()
            if not by_space[left]:
                del by_space[left], spaces[index]
        sequence.append(number)
        left -= lengths[number]
        if left:
            if left not in by_space:
                by_space[left] = []
                insort(spaces, left)
            by_space[left].append(sequence)
    return sorted(sorted(sequence) for sequence in sequences)


class Document(NamedTuple):
    """A document that fits into a sequence.

    Attributes:
        ids: token ids, shape (length,).
        learned: which tokens the model learns, shape (length,); None: all.
    """

    ids: NDArray[np.int64]
    learned: NDArray[np.bool_] | None = None


def token_ids(
    recipe: Recipe, tokenizer: Tokenizer, tally: Counter[str]
) -> Iterator[list[list[int]]]:
    """Yields lists of documents, each as token ids without special tokens, in the files' order.

    Args:
        recipe: what to read.
        tokenizer: of the model.
        tally: counts `empty` texts, which are omitted: null, blank, or without any token.
    """
    fast = fast_tokenizer(tokenizer)
    for number, encoded in read_ahead(_encoded(recipe, tokenizer, fast)):
        documents = encoded if fast is None else [encoding.ids for encoding in encoded]
        kept = [ids for ids in documents if ids]
        tally["empty"] += number - len(kept)
        yield kept


def _encoded(recipe: Recipe, tokenizer: Tokenizer, fast: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yields the number of rows read, and their texts' encodings, or ids without a fast tokenizer.

    A fast tokenizer lets other threads of Python work meanwhile.
    """
    name = recipe.dataset.text
    for rows in read_ahead(columns(recipe.split, [name], recipe.limit)):
        texts = [text for text in rows[name] if text and not text.isspace()]
        if fast is not None:
            encoded = fast.encode_batch_fast(texts, add_special_tokens=False)
        elif texts:
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            encoded = []
        yield len(rows[name]), encoded


def framed(ids: list[int], frame: Frame, longest: int) -> Iterator[Document]:
    """Puts a document into its own frame, `before text after`.

    Args:
        ids: token ids of the document.
        frame: ids before and after.
        longest: the most tokens in a sequence, with the frame.

    Yields:
        The document; or its pieces, if it is longer than a sequence.
    """
    import numpy as np

    after = frame.after or [frame.separator]
    body = longest - len(frame.before) - len(after)
    for begin in range(0, len(ids), body):
        yield Document(
            np.array([*frame.before, *ids[begin : begin + body], *after], dtype=np.int64)
        )


class Joiner:
    """Cuts a stream of documents into full sequences. The incomplete tail remains in `pending`."""

    def __init__(self, frame: Frame, longest: int, dtype: np.dtype[Any]) -> None:
        import numpy as np

        self._frame, self._dtype = frame, dtype
        self._body = longest - len(frame.before) - len(frame.after)
        self.pending = np.empty(0, dtype=dtype)

    def add(self, documents: list[list[int]]) -> NDArray[Any]:
        """Adds documents; returns the sequences that are full now, shape (number, longest)."""
        import numpy as np

        end = (self._frame.separator,)
        ids = chain.from_iterable(chain.from_iterable((ids, end) for ids in documents))
        number = sum(map(len, documents)) + len(documents)
        self.pending = np.concatenate([self.pending, np.fromiter(ids, self._dtype, number)])
        number = len(self.pending) // self._body
        rows = self.pending[: number * self._body].reshape(number, self._body)
        self.pending = self.pending[number * self._body :]
        first, last = (
            np.tile(np.array(ids, dtype=self._dtype), (number, 1))
            for ids in (self._frame.before, self._frame.after)
        )
        return np.concatenate([first, rows, last], axis=1)


Read: TypeAlias = "Callable[[Recipe, Tokenizer, Counter[str]], Iterator[list[Document]]]"
"""Yields lists of documents of a split; counts the rows that become none."""
FrameOf: TypeAlias = "Callable[[Tokenizer], Frame]"


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

    def read(recipe: Recipe, tokenizer: Tokenizer, tally: Counter[str]) -> Iterator[list[Document]]:
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
