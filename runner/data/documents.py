"""Text columns -> documents of token ids, for masked-lm and causal-lm; and documents -> sequences.

`joined`: documents follow each other, the separator between them, and the stream is cut into full sequences (RoBERTa,
arXiv:1907.11692, 4.2, FULL-SENTENCES): on short lines several times more text a step than padding each. `separate` and
`alone`: each document keeps its own frame; what is longer than a sequence goes on in further ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.recipe import Recipe
from runner.data.table import columns
from runner.data.tokenizing import Frame, whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase


class Document(NamedTuple):
    """A document that fits into a sequence. `learned`: which tokens, where not all are."""

    ids: NDArray[np.int64]
    learned: NDArray[np.bool_] | None = None


def token_ids(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[list[int]]]:
    """Ids of the texts that hold anything, without special tokens, in the order of the files, many at a time."""
    fast, name = whole(tokenizer), recipe.dataset.text
    for rows in columns(recipe.split, [name], recipe.limit):
        texts = [text for text in rows[name] if text and not text.isspace()]
        if fast is not None:
            documents = [encoding.ids for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]
        else:
            documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        yield [ids for ids in documents if ids]


def framed(ids: list[int], frame: Frame, longest: int) -> Iterator[Document]:
    """A document in its own frame, `before text after`; in pieces where it is longer than a sequence."""
    import numpy as np

    after = frame.after or [frame.separator]
    body = longest - len(frame.before) - len(after)
    for begin in range(0, len(ids), body):
        yield Document(np.array([*frame.before, *ids[begin : begin + body], *after], dtype=np.int64))


class Joiner:
    """Cuts a stream of documents into full sequences; the tail that fills none is left in `pending`."""

    def __init__(self, frame: Frame, longest: int, dtype: np.dtype[Any]) -> None:
        import numpy as np

        self._frame, self._dtype = frame, dtype
        self._body = longest - len(frame.before) - len(frame.after)
        self.pending = np.empty(0, dtype=dtype)

    def add(self, documents: list[list[int]]) -> NDArray[Any]:
        """The sequences that these documents fill up: shape (number, longest)."""
        import numpy as np

        added = (np.array([*ids, self._frame.separator], dtype=self._dtype) for ids in documents)
        self.pending = np.concatenate([self.pending, *added])
        number = len(self.pending) // self._body
        rows = self.pending[: number * self._body].reshape(number, self._body)
        self.pending = self.pending[number * self._body :]
        sides = (
            np.tile(np.array(ids, dtype=self._dtype), (number, 1)) for ids in (self._frame.before, self._frame.after)
        )
        first, last = sides
        return np.concatenate([first, rows, last], axis=1)
