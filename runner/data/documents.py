"""Text columns -> documents of token ids (masked-lm, causal-lm) -> sequences.

`joined`: documents follow each other with a separator between them, and the stream is cut into full
sequences (RoBERTa, arXiv:1907.11692, 4.2, FULL-SENTENCES). With short lines, a step then reads
several times more text than with padding. `separate` and `alone`: each document keeps its own
frame. A document that is longer than a sequence continues in further sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.recipe import Recipe
from runner.data.table import columns, read_ahead
from runner.data.tokenizing import Frame, fast_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class Document(NamedTuple):
    """A document that fits into a sequence.

    Attributes:
        ids: token ids, shape (length,).
        learned: which tokens the model learns, shape (length,); None: all.
    """

    ids: NDArray[np.int64]
    learned: NDArray[np.bool_] | None = None


def token_ids(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
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


def _encoded(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, fast: Any
) -> Iterator[tuple[int, list[Any]]]:
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
