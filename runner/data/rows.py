"""Samples of a store -> arrays that are padded to the longest of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.store import IGNORED, Sample, StoreFacts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Rows(NamedTuple):
    """A batch of sequences: arrays of shape (number, longest).

    Behind the end of each sequence, `documents` is 0. `layout` is the store's `documents`: it
    decides which attention mask the model needs.
    """

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    learned: NDArray[np.bool_]
    layout: str = "joined"

    @staticmethod
    def of(samples: Sequence[Sample], facts: StoreFacts) -> Rows:
        """Pads samples, in which a column that is the same everywhere can be absent."""
        import numpy as np

        return Rows(
            padded(samples, "ids", np.int64),
            padded(samples, "documents", np.int64, otherwise=1),
            padded(samples, "learned", np.bool_, otherwise=1),
            facts.documents,
        )


class LabelledRows(NamedTuple):
    """A batch: int64 arrays of shape (number, longest); `labels` of texts: (number,).

    `documents` is 0 behind the end of a sample, 1 in its first text and 2 in its second.
    """

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    labels: NDArray[np.int64]
    layout: str = "alone"

    @staticmethod
    def of(samples: Sequence[Sample], facts: StoreFacts) -> LabelledRows:
        """Pads samples that have one label each."""
        import numpy as np

        labels = np.concatenate([sample["labels"] for sample in samples], dtype=np.int64)
        ids, documents = (padded(samples, name, np.int64) for name in ("ids", "documents"))
        return LabelledRows(ids, documents, labels)

    @staticmethod
    def of_words(samples: Sequence[Sample], facts: StoreFacts) -> LabelledRows:
        """Pads samples that have a label for each token."""
        import numpy as np

        ids, documents = (padded(samples, name, np.int64) for name in ("ids", "documents"))
        labels = padded(samples, "labels", np.int64, behind=IGNORED)
        return LabelledRows(ids, documents, labels)


def padded(
    samples: Sequence[Sample], name: str, dtype: Any, *, otherwise: int = 0, behind: int = 0
) -> NDArray[Any]:
    """A column of a batch, shape (number, longest).

    Args:
        samples: column -> values.
        name: of the column.
        dtype: of the result.
        otherwise: the value in samples without this column; they are as long as their `ids`.
        behind: the value behind the end of a sample.
    """
    import numpy as np

    lengths = [len(sample.get(name, sample["ids"])) for sample in samples]
    result = np.full((len(samples), max(lengths)), behind, dtype)
    for number, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        result[number, :length] = sample.get(name, otherwise)
    return result
