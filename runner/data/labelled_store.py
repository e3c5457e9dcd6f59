"""The memory-mapped store of samples with classes.

A store is a folder `<key>/` with these files:

- `store.json`: see `LabelledFacts`.
- `tokens.bin`: token ids, little-endian uint16 or uint32, sample after sample, no padding.
- `rows.bin`: uint64, where each sample begins, and the end.
- `segments.bin`: uint8 per token, 1 for the first text and 2 for the second.
- `labels.bin`: int32, a class for each sample; of words: for each token, -100 where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.classes import Classes, classes_of, listed, united
from runner.data.labelled_samples import IGNORED, Tally, samples
from runner.data.recipe import Recipe
from runner.data.store import FACTS, ROWS, TOKENS, map_arrays, unreadable_store
from runner.data.table import reading
from runner.data.tokenizing import load_tokenizer
from runner.errors import UsageError, human_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SEGMENTS, LABELS = "segments.bin", "labels.bin"
COLUMNS = "`stage show BUNDLE` lists the columns."
FEW = 10  # of fewer texts, each can have a class of its own


@dataclass(frozen=True)
class LabelledFacts:
    """The content of `store.json`.

    Attributes:
        num_sequences: samples in the store.
        dtype: of the token ids.
        num_tokens: in the store; there is no padding.
        num_words: words that have a class; of texts, the samples.
        class_names: of the classes 0, 1, ...
        kind: where they come from, see `Classes`.
        recipe: what was read, and how; its digest is the store's key.
        dropped: omitted rows: no text or no class.
        cut: samples that were shortened.
        cut_words: the words that were lost by it.
    """

    num_sequences: int
    dtype: str
    num_tokens: int
    num_words: int
    class_names: list[str]
    kind: str
    recipe: dict[str, Any]
    dropped: int = 0
    cut: int = 0
    cut_words: int = 0

    @property
    def documents(self) -> str:
        """Always `alone`: samples are not packed."""
        return "alone"

    @property
    def of_words(self) -> bool:
        """Whether each word has a class, not each sample."""
        return bool(self.recipe["task"] == "token-classification")


class LabelledRow(NamedTuple):
    """One sample: int64 arrays of shape (length,); `labels` has one element for a text."""

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    labels: NDArray[np.int64]


class LabelledRows(NamedTuple):
    """A batch: int64 arrays of shape (number, longest); `labels` of texts: (number,).

    `documents` is 0 behind the end of a sample, 1 in its first text and 2 in its second.
    """

    ids: NDArray[np.int64]
    documents: NDArray[np.int64]
    labels: NDArray[np.int64]
    layout: str = "alone"


class LabelledStore:
    """An open store of samples with classes."""

    def __init__(self, folder: Path, facts: LabelledFacts, arrays: dict[str, NDArray[Any]]) -> None:
        self.folder, self.facts, self._arrays = folder, facts, arrays
        self._own_names = facts.class_names
        self._class_of: NDArray[np.int64] | None = None

    @staticmethod
    def open(folder: Path) -> LabelledStore:
        """Maps the files of a store into memory.

        Raises:
            DamageError: a file is missing or unreadable, or the files do not fit each other.
        """
        try:
            facts = LabelledFacts(**json.loads((folder / FACTS).read_text()))
            kinds = {
                TOKENS: (facts.dtype, facts.num_tokens),
                ROWS: ("uint64", facts.num_sequences + 1),
                SEGMENTS: ("uint8", facts.num_tokens),
                LABELS: ("int32", facts.num_tokens if facts.of_words else facts.num_sequences),
            }
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise unreadable_store(folder, str(error)) from None
        return LabelledStore(folder, facts, map_arrays(folder, kinds))

    def __len__(self) -> int:
        return self.facts.num_sequences

    def number_as(self, names: list[str]) -> None:
        """Gives the classes the numbers that they have in a list of names."""
        import numpy as np

        number = {name: index for index, name in enumerate(names)}
        own = [number[name] for name in self._own_names]
        self._class_of = np.array([*own, IGNORED], dtype=np.int64)  # its last one is at -1
        self.facts = replace(self.facts, class_names=names)

    def _bounds(self, index: int) -> tuple[int, int]:
        return int(self._arrays[ROWS][index]), int(self._arrays[ROWS][index + 1])

    def row(self, index: int) -> LabelledRow:
        """Returns a sample by its number."""
        import numpy as np

        begin, end = self._bounds(index)
        mine = slice(begin, end) if self.facts.of_words else slice(index, index + 1)
        labels = np.asarray(self._arrays[LABELS][mine], np.int64)
        if self._class_of is not None:
            labels = self._class_of[np.where(labels == IGNORED, -1, labels)]
        return LabelledRow(
            np.asarray(self._arrays[TOKENS][begin:end], np.int64),
            np.asarray(self._arrays[SEGMENTS][begin:end], np.int64),
            labels,
        )

    def stack(self, rows: Sequence[LabelledRow]) -> LabelledRows:
        """Returns samples as one batch, each padded to the longest."""
        import numpy as np

        longest = max(len(row.ids) for row in rows)
        ids, documents = (np.zeros((len(rows), longest), np.int64) for _ in range(2))
        labels = np.full((len(rows), longest if self.facts.of_words else 1), IGNORED, np.int64)
        for number, row in enumerate(rows):
            size = len(row.ids)
            ids[number, :size], documents[number, :size] = row.ids, row.documents
            labels[number, : len(row.labels)] = row.labels
        return LabelledRows(ids, documents, labels if self.facts.of_words else labels[:, 0])

    def rows(self, indices: Sequence[int]) -> LabelledRows:
        """Returns a batch of samples by their numbers."""
        return self.stack([self.row(index) for index in indices])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Returns the number of tokens of each of these samples."""
        return [end - begin for begin, end in map(self._bounds, indices)]


def read_classes(recipe: Recipe) -> Classes:
    """Finds the classes of a split. The arguments and errors are those of `classes_of`."""
    of_words = recipe.task == "token-classification"
    column = recipe.dataset.tags if of_words else recipe.dataset.label
    is_limited = recipe.limit is not None and recipe.limit < recipe.split.rows
    return classes_of(recipe.split, column, is_limited=is_limited)


def write(recipe: Recipe, folder: Path) -> LabelledFacts:
    """Tokenises a split with its classes into a folder.

    Args:
        recipe: what to read, and how.
        folder: an empty folder.

    Returns:
        The content of `store.json`, which is not written here.

    Raises:
        UsageError: a label is no class, numbers of words and tags differ, or no row is left.
    """
    import numpy as np

    tokenizer = load_tokenizer(recipe.model)
    dtype = np.dtype("<u2") if len(tokenizer) <= 2**16 else np.dtype("<u4")
    classes = read_classes(recipe)
    tally, number, end, words = Tally(), 0, 0, 0
    with ExitStack() as stack:
        tokens, begins, segments, labels = (
            stack.enter_context(open(folder / name, "wb"))
            for name in (TOKENS, ROWS, SEGMENTS, LABELS)
        )
        begins.write(end.to_bytes(8, "little"))
        for sample in samples(recipe, tokenizer, classes, tally):
            number, end = number + 1, end + len(sample.ids)
            words += sum(label != IGNORED for label in sample.labels)
            tokens.write(np.array(sample.ids, dtype).tobytes())
            begins.write(end.to_bytes(8, "little"))
            segments.write(bytes(sample.segments))
            labels.write(np.array(sample.labels, "<i4").tobytes())
    if number == 0 or words == 0:
        raise UsageError(
            f"split `{recipe.split.name}`: nothing to train on: "
            f"{human_count(tally.dropped, 'row')} without a text or a label.",
            "Look at the columns, or choose another split.",
        )
    return LabelledFacts(
        num_sequences=number,
        dtype="uint16" if dtype.itemsize == 2 else "uint32",
        num_tokens=end,
        num_words=words,
        class_names=classes.names,
        kind=classes.kind,
        recipe=recipe.to_json(),
        dropped=tally.dropped,
        cut=tally.cut,
        cut_words=tally.cut_words,
    )


def unite(train: Sequence[LabelledStore], others: Sequence[LabelledStore]) -> None:
    """Gives the classes of all stores of a run the same numbers.

    Raises:
        UsageError: their classes do not go together; see `united`.
    """
    names = united(
        *(
            [Classes(s.facts.class_names, s.facts.kind) for s in several]
            for several in (train, others)
        )
    )
    for store in (*train, *others):
        store.number_as(names)


def describe(facts: LabelledFacts, size: str) -> str:
    """A line for the user on what a store holds.

    Args:
        size: of its files.
    """
    notes = []
    if facts.dropped:
        notes.append(f"{human_count(facts.dropped, 'row')} left out: no text or no label")
    if facts.cut:
        lost = f", {human_count(facts.cut_words, 'word')} lost" if facts.of_words else ""
        longest = facts.recipe["sequence_length"]
        notes.append(f"{facts.cut} cut to {longest} tokens{lost}")
    what = human_count(facts.num_sequences, "sentence" if facts.of_words else "text")
    words = f", {human_count(facts.num_words, 'word')}" if facts.of_words else ""
    names = f"{len(facts.class_names)} classes: {listed(facts.class_names)}"
    return f"{what}{words} in {names} ({'; '.join([size, *notes])})"


def doubt(recipe: Recipe, classes: Classes, dropped: int = 0) -> str:
    """What is doubtful where nearly each text has a class of its own; empty: nothing.

    The classes are those of all rows of the files, so they are compared with all of these rows.

    Args:
        recipe: what is read.
        classes: those that were found.
        dropped: rows that were left out.
    """
    import pyarrow.parquet as pq

    if recipe.task == "token-classification" or classes.kind == "names":
        return ""
    texts = -dropped
    for path in recipe.split.files:
        with reading(path):
            texts += pq.read_metadata(path).num_rows
    if texts < FEW or len(classes.names) * 2 <= texts:
        return ""
    return (
        f"split `{recipe.split.name}`: {len(classes.names)} classes in {texts} texts, nearly one "
        f"for each: is `dataset.label: {recipe.dataset.label}` the right column?"
    )
