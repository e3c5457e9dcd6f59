"""The memory-mapped store: full sequences of token ids, read by every rank without copying.

A folder `<key>/` with `tokens.bin` (little-endian uint16 or uint32, shape (num_sequences, sequence_length), row-major)
and `store.json`. It is written under another name and renamed, then read-only: a store is there whole or not at all.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import DamageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKENS = "tokens.bin"
FACTS = "store.json"


@dataclass(frozen=True)
class StoreFacts:
    """What `store.json` says.

    Attributes:
        dtype: `uint16` where the vocabulary allows, else `uint32`.
        num_tokens: real tokens in it; none is padding.
        dropped_tokens: the tail that did not fill a sequence.
        recipe: what went in and how; its digest is the store's key.
    """

    num_sequences: int
    sequence_length: int
    dtype: str
    num_tokens: int
    num_documents: int
    dropped_tokens: int
    recipe: dict[str, Any]


class TokenStore:
    """An open store: indexable like an array of shape (num_sequences, sequence_length)."""

    def __init__(self, folder: Path, facts: StoreFacts, tokens: NDArray[np.unsignedinteger[Any]]) -> None:
        self.folder, self.facts, self.tokens = folder, facts, tokens

    @staticmethod
    def open(folder: Path) -> TokenStore:
        """Maps a store.

        Raises:
            DamageError: its files do not fit each other.
        """
        import numpy as np

        try:
            facts = StoreFacts(**json.loads((folder / FACTS).read_text()))
            shape = (facts.num_sequences, facts.sequence_length)
            tokens = np.memmap(folder / TOKENS, dtype=np.dtype(facts.dtype).newbyteorder("<"), mode="r", shape=shape)
        except (OSError, ValueError, TypeError) as error:
            raise DamageError(
                f"{folder}: this store cannot be read: {error}.", f"rm -r {folder}  # then prepare again"
            ) from None
        if (folder / TOKENS).stat().st_size != tokens.nbytes:
            raise DamageError(f"{folder}: this store has the wrong size.", f"rm -r {folder}  # then prepare again")
        return TokenStore(folder, facts, tokens)

    def __len__(self) -> int:
        return self.facts.num_sequences

    def rows(self, indices: list[int]) -> NDArray[np.int64]:
        """Sequences by number: int64, shape (len(indices), sequence_length)."""
        import numpy as np

        return np.asarray(self.tokens[indices], dtype=np.int64)


def facts_text(facts: StoreFacts) -> bytes:
    """The text of `store.json`."""
    return (json.dumps(asdict(facts), indent=1, sort_keys=True) + "\n").encode()
