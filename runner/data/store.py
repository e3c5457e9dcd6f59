"""The store of a prepared split: an Arrow IPC file, which every rank maps into memory.

Each column holds a list of numbers for each sample:

- `ids`: token ids, uint16 where the vocabulary allows it, else uint32; no padding.
- `documents`, if a sequence has several documents or two texts: the number of each token's document
  in the sequence, from 1.
- `learned`, if not every token is learned: uint8.
- `pixels`: uint8, side x side x 3, red green blue. Images are stored decoded, so a rank needs no
  image library and no time to decode (docs/adr/0015).
- `labels`: the class of the sample; of words: one for each token, -100 where there is none.

Record batches hold up to 10,000 samples or about 16 MB. What is known about all of them
(`StoreFacts`) is JSON in the metadata of the last one, which is empty. The file is written under a
temporary name and renamed, and then it is read-only. So a store is complete or it does not exist.
"""

from __future__ import annotations

import json
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from runner.from_stage import DamageError, quoted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Sample: TypeAlias = "dict[str, NDArray[Any]]"  # column -> values
FACTS = b"airlift"  # the key in the metadata
R = TypeVar("R")
BATCH_ROWS, BATCH_BYTES = 10_000, 2**24
IGNORED = -100
"""The label of a place where nothing is predicted, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class StoreFacts:
    """What is known about all samples of a store.

    Attributes:
        recipe: what was read, and how; its digest is the store's key.
        what: a description for the user.
        notes: what was left out, for the user.
        warning: is printed whenever the store is used; empty: there is none.
        documents: `joined`, `separate` or `alone`.
        class_names: of the classes 0, 1, ...
        class_kind: where they come from, see `Classes`; empty: there are none.
        side: pixels per side of the images.
        begins: the number of the first sample of each record batch, and the number of all samples.
    """

    recipe: dict[str, Any]
    what: str
    notes: list[str]
    warning: str = ""
    documents: str = "alone"
    class_names: list[str] = field(default_factory=list)
    class_kind: str = ""
    side: int = 0
    begins: list[int] = field(default_factory=lambda: [0])


class ArrowColumn(NamedTuple):
    """A column of a record batch: its name, where each sample begins, the values of all."""

    name: str
    begins: memoryview
    values: NDArray[Any]


class Store:
    """An open store."""

    def __init__(self, path: Path) -> None:
        """Maps the file into memory.

        Raises:
            DamageError: it is missing or unreadable.
        """
        import pyarrow as pa

        self.path = path
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # Arrow's own memory_map would read each batch as a whole, ahead, for one row of it.
            self._reader = pa.ipc.open_file(pa.py_buffer(mapped))
            last = self._reader.get_batch_with_custom_metadata(self._reader.num_record_batches - 1)
            self.facts = StoreFacts(**json.loads(last.custom_metadata[FACTS]))
        except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
            raise DamageError(
                f"{path}: this store cannot be read: {error}.",
                f"rm -f {quoted(path)}  # then prepare again",
            ) from None
        self._names = self.facts.class_names
        self._class_of: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return self.facts.begins[-1]

    def number_as(self, names: list[str]) -> None:
        """Gives the classes the numbers that they have in a list of names."""
        import numpy as np

        number = {name: index for index, name in enumerate(names)}
        own = [number[name] for name in self._names]
        self._class_of = np.array([*own, IGNORED], dtype=np.int64)  # its last one is at -1
        self.facts = replace(self.facts, class_names=names)

    def columns(self, number: int) -> list[ArrowColumn]:
        """The columns of a record batch."""
        # `to_numpy` would import pandas, in each rank.
        import numpy as np

        batch, columns = self._reader.get_batch(number), []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            _, offsets, _, buffer = column.buffers()
            values = np.frombuffer(buffer, np.dtype(str(column.type.value_type)))
            if name == "labels" and self._class_of is not None:
                values = self._class_of[np.where(values == IGNORED, -1, values)]
            columns.append(ArrowColumn(name, memoryview(offsets).cast("i"), values))
        return columns


@dataclass(frozen=True)
class SamplePlace:
    """One sequence of a step.

    Attributes:
        index: its number in the store.
        epoch: which pass over the store this is; -1 in an evaluation. Masking depends on both.
    """

    index: int
    epoch: int


def sample_rng(seed: int, sample: SamplePlace) -> np.random.Generator:
    """The random numbers of one sample in one epoch (-1: evaluation): the same on any rank, any
    time.
    """
    import numpy as np

    return np.random.default_rng([seed, 1, sample.epoch + 1, sample.index])


class Stores:
    """Several stores as one. The samples are numbered one store after the other."""

    def __init__(self, parts: Sequence[Store]) -> None:
        self.parts = tuple(parts)
        begins = [pairwise(store.facts.begins) for store in self.parts]
        sizes = (end - begin for batches in begins for begin, end in batches)
        self._begins = list(accumulate(sizes, initial=0))
        self._batches = [(s, n) for s in self.parts for n in range(len(s.facts.begins) - 1)]
        self._columns: dict[int, list[ArrowColumn]] = {}

    @property
    def facts(self) -> StoreFacts:
        """The facts of the first store. `check_together` has compared those that must be equal."""
        return self.parts[0].facts

    def __len__(self) -> int:
        return self._begins[-1]

    def row(self, index: int) -> Sample:
        """Returns a sample by its number: column -> values."""
        number = bisect_right(self._begins, index) - 1
        if number not in self._columns:
            store, inner = self._batches[number]
            self._columns[number] = store.columns(inner)
        place = index - self._begins[number]
        return {
            name: values[begins[place] : begins[place + 1]]
            for name, begins, values in self._columns[number]
        }

    def rows(self, indices: Sequence[int], of: Callable[[Sequence[Sample], StoreFacts], R]) -> R:
        """Returns samples by their numbers, as what a task makes of them: `Objective.rows`."""
        return of([self.row(index) for index in indices], self.facts)

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Returns the number of tokens of each of these samples; of images, of values."""
        return [len(next(iter(self.row(index).values()))) for index in indices]


def write_store(path: Path, samples: Generator[Sample, None, StoreFacts]) -> StoreFacts:
    """Writes samples as they come, a record batch at a time.

    Args:
        path: of the new file.
        samples: column -> values; all samples have the same columns and dtypes. It returns the
            facts, and raises where there is no sample.
    """
    import pyarrow as pa

    facts, begins, writer = None, [0], None

    def collected() -> Iterator[Sample]:
        nonlocal facts
        facts = yield from samples

    with open(path, "wb") as file:
        for batch in map(_record_batch, _in_batches(collected())):
            writer = writer or pa.ipc.new_file(file, batch.schema)
            writer.write_batch(batch)
            begins.append(begins[-1] + len(batch))
        assert facts is not None and writer is not None
        facts = replace(facts, begins=begins)
        writer.write_batch(batch.slice(0, 0), {FACTS: json.dumps(asdict(facts))})
        writer.close()
        file.flush()
        os.fsync(file.fileno())
    return facts


def _in_batches(
    samples: Iterator[Sample],
) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    size = 0
    for sample in samples:
        batch.append(sample)
        size += sum(values.nbytes for values in sample.values())
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _record_batch(samples: list[Sample]) -> Any:
    # `pa.array` would import pandas.
    import numpy as np
    import pyarrow as pa

    columns = {}
    for name in samples[0]:
        values = np.concatenate([sample[name] for sample in samples])
        begins = np.cumsum([0, *(len(sample[name]) for sample in samples)], dtype=np.int32)
        kind = pa.from_numpy_dtype(values.dtype)
        inner = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
        buffers = [None, pa.py_buffer(begins)]
        columns[name] = pa.Array.from_buffers(
            pa.list_(kind), len(samples), buffers, children=[inner]
        )
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


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
