"""The memory-mapped store: sequences of token ids, read by every rank without copying.

A folder `<key>/`: `tokens.bin` (little-endian uint16 or uint32, sequence after sequence, no padding) and `store.json`;
and where sequences hold whole documents `rows.bin` (uint64: where each sequence begins, and the end) and
`documents.bin` (uint16 a token: which document of its sequence, from 1); where not every token is learned `learned.bin`
(uint8 a token). It is written under another name and renamed, then read-only: a store is there whole or not at all.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from runner.errors import DamageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKENS, ROWS, DOCUMENTS, LEARNED = "tokens.bin", "rows.bin", "documents.bin", "learned.bin"
FACTS = "store.json"


@dataclass(frozen=True)
class StoreFacts:
    """What `store.json` says.

    Attributes:
        sequence_length: tokens of a sequence; where documents are whole, at most.
        dtype: `uint16` where the vocabulary allows, else `uint32`.
        num_tokens: real tokens in it; none is padding.
        dropped_tokens: the tail that did not fill a sequence.
        dropped_documents, cut_documents: samples that were too long, or had nothing to learn.
        documents: `joined`, `separate` or `alone`.
        has_learned: whether only some tokens are learned.
        recipe: what went in and how; its digest is the store's key.
    """

    num_sequences: int
    sequence_length: int
    dtype: str
    num_tokens: int
    num_documents: int
    dropped_tokens: int
    recipe: dict[str, Any]
    documents: str = "joined"
    has_learned: bool = False
    dropped_documents: int = 0
    cut_documents: int = 0


class Row(NamedTuple):
    """One sequence: arrays of shape (length,). `documents` counts from 1; `learned` is a bool."""

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    learned: NDArray[np.bool_]


class Rows(NamedTuple):
    """Sequences side by side: arrays of shape (number, longest); behind the end of each `documents` is 0.

    `layout` is the store's `documents`: what has to be told to a model so that it sees what it may see.
    """

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    learned: NDArray[np.bool_]
    layout: str = "joined"


class Store(Protocol):
    """Samples that a run reads by number."""

    @property
    def facts(self) -> Any:
        """What `store.json` says."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any:
        """One sample."""
        ...

    def stack(self, rows: Sequence[Any]) -> Any:
        """Samples as arrays of one batch."""
        ...

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Tokens of each sample."""
        ...


class TokenStore:
    """An open store of sequences."""

    def __init__(self, folder: Path, facts: StoreFacts, arrays: dict[str, NDArray[Any]]) -> None:
        self.folder, self.facts, self.tokens = folder, facts, arrays[TOKENS]
        self._arrays = arrays

    @staticmethod
    def open(folder: Path) -> TokenStore:
        """Maps a store.

        Raises:
            DamageError: its files do not fit each other.
        """
        import numpy as np

        try:
            facts = StoreFacts(**json.loads((folder / FACTS).read_text()))
            kinds: dict[str, tuple[str, int]] = {TOKENS: (facts.dtype, facts.num_tokens)}
            if facts.documents != "joined":
                kinds |= {ROWS: ("uint64", facts.num_sequences + 1), DOCUMENTS: ("uint16", facts.num_tokens)}
            if facts.has_learned:
                kinds[LEARNED] = ("uint8", facts.num_tokens)
            arrays = {
                name: np.memmap(folder / name, dtype=np.dtype(dtype).newbyteorder("<"), mode="r", shape=(count,))
                for name, (dtype, count) in kinds.items()
            }
        except (OSError, ValueError, TypeError) as error:
            raise unreadable(folder, str(error)) from None
        for name, array in arrays.items():
            if (folder / name).stat().st_size != array.nbytes:
                raise DamageError(
                    f"{folder}: {name} of this store has the wrong size.", f"rm -r {folder}  # then prepare again"
                )
        return TokenStore(folder, facts, dict(arrays))

    def __len__(self) -> int:
        return self.facts.num_sequences

    def _bounds(self, index: int) -> tuple[int, int]:
        if ROWS in self._arrays:
            return int(self._arrays[ROWS][index]), int(self._arrays[ROWS][index + 1])
        return index * self.facts.sequence_length, (index + 1) * self.facts.sequence_length

    def row(self, index: int) -> Row:
        """A sequence by number."""
        import numpy as np

        begin, end = self._bounds(index)
        size, arrays = end - begin, self._arrays
        return Row(
            np.asarray(self.tokens[begin:end], dtype=np.int64),
            np.asarray(arrays[DOCUMENTS][begin:end], np.int64) if DOCUMENTS in arrays else np.ones(size, np.int64),
            np.asarray(arrays[LEARNED][begin:end], np.bool_) if LEARNED in arrays else np.ones(size, np.bool_),
        )

    def stack(self, rows: Sequence[Row]) -> Rows:
        """Sequences side by side, each filled up to the longest."""
        import numpy as np

        longest = max(len(row.ids) for row in rows)
        ids, documents = (np.zeros((len(rows), longest), np.int64) for _ in range(2))
        learned = np.zeros((len(rows), longest), np.bool_)
        for number, row in enumerate(rows):
            size = len(row.ids)
            ids[number, :size], documents[number, :size], learned[number, :size] = row
        return Rows(ids, documents, learned, self.facts.documents)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Sequences by number."""
        return self.stack([self.row(index) for index in indices])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Tokens of each of these sequences."""
        return [end - begin for begin, end in map(self._bounds, indices)]


class Stores:
    """Several stores as one, their samples numbered one store after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)
        self._begins = [sum(map(len, self.parts[:n])) for n in range(len(self.parts))]

    @property
    def facts(self) -> Any:
        """Those of the first; what must agree between stores does (`check_together`)."""
        return self.parts[0].facts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def _find(self, index: int) -> tuple[Any, int]:
        number = bisect_right(self._begins, index) - 1
        return self.parts[number], index - self._begins[number]

    def row(self, index: int) -> Any:
        """A sample by number."""
        store, place = self._find(index)
        return store.row(place)

    def rows(self, indices: Sequence[int]) -> Any:
        """Samples by number, as arrays of one batch."""
        return self.parts[0].stack([self.row(index) for index in indices])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Tokens of each of these samples."""
        return [store.lengths([place])[0] for store, place in map(self._find, indices)]


def unreadable(folder: Path, problem: str) -> DamageError:
    """A store that cannot be opened."""
    return DamageError(f"{folder}: this store cannot be read: {problem}.", f"rm -r {folder}  # then prepare again")


def facts_text(facts: Any) -> bytes:
    """The text of `store.json`."""
    return (json.dumps(asdict(facts), indent=1, sort_keys=True) + "\n").encode()
