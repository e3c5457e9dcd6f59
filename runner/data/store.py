"""The memory-mapped store: sequences of token ids, which every rank reads without copying.

A store is a folder `<key>/` with these files:

- `store.json`: see `StoreFacts`.
- `tokens.bin`: token ids, little-endian uint16 or uint32, sequence after sequence, no padding.
- `rows.bin`, if sequences hold whole documents: uint64, where each sequence begins, and the end.
- `documents.bin`, if sequences hold whole documents: uint16 per token, the number of its document
in
  the sequence, from 1.
- `learned.bin`, if not every token is learned: uint8 per token.

The folder is written under a temporary name and renamed, and then it is read-only. So a store is
complete or it does not exist.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.errors import DamageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKENS, ROWS, DOCUMENTS, LEARNED = "tokens.bin", "rows.bin", "documents.bin", "learned.bin"
FACTS = "store.json"


@dataclass(frozen=True)
class StoreFacts:
    """The content of a token store's `store.json`.

    Attributes:
        num_sequences: in the store.
        sequence_length: tokens per sequence; where documents are whole, at most.
        dtype: `uint16` where the vocabulary allows it, else `uint32`.
        num_tokens: in the store; there is no padding.
        num_documents: in the store.
        dropped_tokens: the tail that did not fill a sequence.
        recipe: what was read, and how; its digest is the store's key.
        documents: `joined`, `separate` or `alone`.
        has_learned: whether only some tokens are learned.
        dropped_documents: omitted samples; of these `empty_documents` had nothing to learn, the
            others were too long.
        cut_documents: samples that were shortened.
        empty_documents: omitted samples with nothing to learn.
        unasked_documents: samples that were kept although their prompt is empty.
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
    empty_documents: int = 0
    unasked_documents: int = 0


class Row(NamedTuple):
    """One sequence: arrays of shape (length,). `documents` counts from 1."""

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    learned: NDArray[np.bool_]


class Rows(NamedTuple):
    """A batch of sequences: arrays of shape (number, longest).

    Behind the end of each sequence, `documents` is 0. `layout` is the store's `documents`: it
    decides which attention mask the model needs.
    """

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    learned: NDArray[np.bool_]
    layout: str = "joined"


class TokenStore:
    """An open store of sequences."""

    def __init__(self, folder: Path, facts: StoreFacts, arrays: dict[str, NDArray[Any]]) -> None:
        self.folder, self.facts, self.tokens = folder, facts, arrays[TOKENS]
        self._arrays = arrays

    @staticmethod
    def open(folder: Path) -> TokenStore:
        """Maps the files of a store into memory.

        Raises:
            DamageError: a file is missing or unreadable, or the files do not fit each other.
        """
        try:
            facts = StoreFacts(**json.loads((folder / FACTS).read_text()))
            kinds: dict[str, tuple[str, int]] = {TOKENS: (facts.dtype, facts.num_tokens)}
            if facts.documents != "joined":
                kinds |= {
                    ROWS: ("uint64", facts.num_sequences + 1),
                    DOCUMENTS: ("uint16", facts.num_tokens),
                }
            if facts.has_learned:
                kinds[LEARNED] = ("uint8", facts.num_tokens)
        except (OSError, ValueError, TypeError) as error:
            raise unreadable_store(folder, str(error)) from None
        return TokenStore(folder, facts, map_arrays(folder, kinds))

    def __len__(self) -> int:
        return self.facts.num_sequences

    def _bounds(self, index: int) -> tuple[int, int]:
        if ROWS in self._arrays:
            return int(self._arrays[ROWS][index]), int(self._arrays[ROWS][index + 1])
        return index * self.facts.sequence_length, (index + 1) * self.facts.sequence_length

    def row(self, index: int) -> Row:
        """Returns a sequence by its number."""
        import numpy as np

        begin, end = self._bounds(index)
        size, arrays = end - begin, self._arrays
        return Row(
            np.asarray(self.tokens[begin:end], dtype=np.int64),
            np.asarray(arrays[DOCUMENTS][begin:end], np.int64)
            if DOCUMENTS in arrays
            else np.ones(size, np.int64),
            np.asarray(arrays[LEARNED][begin:end], np.bool_)
            if LEARNED in arrays
            else np.ones(size, np.bool_),
        )

    def stack(self, rows: Sequence[Row]) -> Rows:
        """Returns sequences as one batch, each padded to the longest."""
        import numpy as np

        longest = max(len(row.ids) for row in rows)
        ids, documents = (np.zeros((len(rows), longest), np.int64) for _ in range(2))
        learned = np.zeros((len(rows), longest), np.bool_)
        for number, row in enumerate(rows):
            size = len(row.ids)
            ids[number, :size], documents[number, :size], learned[number, :size] = row
        return Rows(ids, documents, learned, self.facts.documents)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Returns a batch of sequences by their numbers."""
        return self.stack([self.row(index) for index in indices])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Returns the number of tokens of each of these sequences."""
        return [end - begin for begin, end in map(self._bounds, indices)]


class Stores:
    """Several stores as one. The samples are numbered one store after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)
        self._begins = [sum(map(len, self.parts[:n])) for n in range(len(self.parts))]

    @property
    def facts(self) -> Any:
        """The facts of the first store. `check_together` has compared those that must be equal."""
        return self.parts[0].facts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def _find(self, index: int) -> tuple[Any, int]:
        number = bisect_right(self._begins, index) - 1
        return self.parts[number], index - self._begins[number]

    def row(self, index: int) -> Any:
        """Returns a sample by its number."""
        store, inner = self._find(index)
        return store.row(inner)

    def rows(self, indices: Sequence[int]) -> Any:
        """Returns a batch of samples by their numbers."""
        return self.parts[0].stack([self.row(index) for index in indices])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Returns the number of tokens of each of these samples."""
        return [store.lengths([inner])[0] for store, inner in map(self._find, indices)]


def map_arrays(folder: Path, kinds: Mapping[str, tuple[str, int]]) -> dict[str, NDArray[Any]]:
    """Maps the arrays of a store into memory.

    Args:
        folder: of the store.
        kinds: file name -> dtype and number of elements; the bytes are little-endian.

    Raises:
        DamageError: a file is missing or unreadable, or has the wrong size.
    """
    import numpy as np

    arrays: dict[str, NDArray[Any]] = {}
    for name, (dtype, count) in kinds.items():
        try:
            kind = np.dtype(dtype).newbyteorder("<")
            arrays[name] = np.memmap(folder / name, dtype=kind, mode="r", shape=(count,))
        except (OSError, ValueError, TypeError) as error:
            raise unreadable_store(folder, str(error)) from None
        if (folder / name).stat().st_size != arrays[name].nbytes:
            raise unreadable_store(folder, f"{name} has the wrong size")
    return arrays


def unreadable_store(folder: Path, problem: str) -> DamageError:
    """Returns the error for a store that cannot be opened."""
    return DamageError(
        f"{folder}: this store cannot be read: {problem}.", f"rm -r {folder}  # then prepare again"
    )


def facts_text(facts: Any) -> bytes:
    """Returns the bytes of `store.json`."""
    return (json.dumps(asdict(facts), indent=1, sort_keys=True) + "\n").encode()
