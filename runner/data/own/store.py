"""The memory-mapped store of the samples that a task of one's own makes.

A store is a folder `<key>/`: `store.json` (see `OwnFacts`), and for each name of a sample
`<name>.bin`: little-endian int64 or float32, sample after sample. Where the value is a list,
`<name>.rows.bin` (uint64) says where each sample begins, and the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from runner.data.own.code import own_task, their_code
from runner.data.recipe import Recipe
from runner.data.store import FACTS, map_arrays, unreadable_store
from runner.data.table import columns, row_of
from runner.errors import UsageError, human_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

Sample = Mapping[str, Any]
LENGTH = "ids"
"""The value whose length is that of a sample; else the first list."""
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class OwnFacts:
    """The content of `store.json`.

    Attributes:
        num_sequences: samples in the store.
        sizes: name -> numbers in its file.
        lists: names whose values are lists.
        fractions: names whose values are no whole numbers.
        recipe: what was read, and how; its digest is the store's key.
        dropped: rows that the task left out.
    """

    num_sequences: int
    sizes: dict[str, int]
    lists: list[str]
    fractions: list[str]
    recipe: dict[str, Any]
    dropped: int = 0

    @property
    def documents(self) -> str:
        """Always `alone`: samples are not packed."""
        return "alone"


class OwnStore:
    """An open store of samples."""

    def __init__(self, folder: Path, facts: OwnFacts, arrays: dict[str, NDArray[Any]]) -> None:
        self.folder, self.facts, self._arrays = folder, facts, arrays
        names = [name for name in (LENGTH, *facts.lists) if name in facts.lists]
        self._measured = names[0] if names else None

    @staticmethod
    def open(folder: Path) -> OwnStore:
        """Maps the files of a store into memory.

        Raises:
            DamageError: a file is missing or unreadable, or the files do not fit each other.
        """
        import numpy as np

        try:
            facts = OwnFacts(**json.loads((folder / FACTS).read_text()))
            kinds = {
                f"{name}.bin": ("float32" if name in facts.fractions else "int64", size)
                for name, size in facts.sizes.items()
            }
            empty: dict[str, NDArray[Any]] = {
                name: np.empty(0) for name, (_, size) in kinds.items() if size == 0
            }
            kinds = {name: kind for name, kind in kinds.items() if name not in empty}
            kinds |= {f"{n}.rows.bin": ("uint64", facts.num_sequences + 1) for n in facts.lists}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise unreadable_store(folder, str(error)) from None
        return OwnStore(folder, facts, map_arrays(folder, kinds) | empty)

    def __len__(self) -> int:
        return self.facts.num_sequences

    def _bounds(self, name: str, index: int) -> tuple[int, int]:
        rows = self._arrays[f"{name}.rows.bin"]
        return int(rows[index]), int(rows[index + 1])

    def row(self, index: int) -> dict[str, Any]:
        """Returns a sample by its number: arrays and numbers by name."""
        import numpy as np

        found: dict[str, Any] = {}
        for name in self.facts.sizes:
            values = self._arrays[f"{name}.bin"]
            if name in self.facts.lists:
                found[name] = np.array(values[slice(*self._bounds(name, index))])
            else:
                found[name] = values[index].item()
        return found

    def stack(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns samples as a batch: the task itself puts them together."""
        return list(rows)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns a batch of samples by their numbers."""
        return [self.row(index) for index in indices]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Returns the length of each of these samples: of `ids`, or of their first list."""
        if self._measured is None:
            return [1] * len(indices)
        return [end - begin for begin, end in (self._bounds(self._measured, i) for i in indices)]


def write(recipe: Recipe, folder: Path) -> OwnFacts:
    """Lets a task make its samples of a split, into a folder.

    Args:
        recipe: what to read, and the task's code.
        folder: an empty folder.

    Returns:
        The content of `store.json`, which is not written here.

    Raises:
        UsageError: a sample is not numbers and lists of numbers, or none is left.
        StageError: the code failed.
    """
    assert recipe.code is not None
    task = own_task(recipe.code, recipe.model, recipe.sequence_length)
    names = list(recipe.split.columns)
    dropped = row = 0
    with _Files(folder) as files:
        for values in columns(recipe.split, names, recipe.limit):
            for each in zip(*(values[name] for name in names), strict=True):
                where = row_of(recipe.split, row)
                with their_code(recipe.code, where):
                    sample = task.sample(dict(zip(names, each, strict=True)))
                if sample is None:
                    dropped += 1
                else:
                    files.add(sample, where)
                row += 1
    if files.number == 0:
        raise UsageError(
            f"split `{recipe.split.name}`: nothing to train on: the task left out "
            f"{human_count(dropped, 'row')}.",
            "Look at its `sample`, or choose another split.",
        )
    return OwnFacts(
        files.number, files.sizes, files.lists, files.fractions, recipe.to_json(), dropped
    )


class _Files:
    """Writes the files of a store. The first sample decides which names there are, and of what."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.number = folder, 0
        self.sizes: dict[str, int] = {}
        self.lists: list[str] = []
        self.fractions: list[str] = []
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def add(self, sample: Sample, where: str) -> None:
        """Writes one sample.

        Raises:
            UsageError: it is not numbers and lists of numbers, or not of the names of the first.
        """
        import numpy as np

        if not isinstance(sample, Mapping):
            raise _no_sample(where, f"it is {type(sample).__name__}")
        arrays = {name: _array(name, value, where) for name, value in sample.items()}
        if self.number == 0:
            self._begin(arrays, where)
        if set(arrays) != set(self.sizes):
            odd = ", ".join(sorted(set(arrays) ^ set(self.sizes)))
            raise _no_sample(where, f"it has other names than the first one: {odd}")
        for name, array in arrays.items():
            if (array.ndim == 1) != (name in self.lists):
                raise _no_sample(where, f"`{name}` is a list in one sample and a number in another")
            if array.dtype.kind == "f" and name not in self.fractions:
                raise _no_sample(where, f"`{name}` has fractions; in the first one it had none")
            kind = "<f4" if name in self.fractions else "<i8"
            self._files[f"{name}.bin"].write(array.astype(kind).tobytes())
            self.sizes[name] += array.size
            if name in self.lists:
                end = np.array(self.sizes[name], "<u8")
                self._files[f"{name}.rows.bin"].write(end.tobytes())
        self.number += 1

    def _begin(self, arrays: Mapping[str, NDArray[Any]], where: str) -> None:
        if not arrays or not all(map(_NAME.fullmatch, arrays)):
            raise _no_sample(where, f"its names are {list(arrays)}")
        self.sizes = dict.fromkeys(arrays, 0)
        self.lists = [name for name, array in arrays.items() if array.ndim == 1]
        self.fractions = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        for name in arrays:
            self._open(f"{name}.bin")
        for name in self.lists:
            self._open(f"{name}.rows.bin").write(bytes(8))

    def _open(self, name: str) -> BinaryIO:
        path = self._folder / name
        self._files[name] = self._stack.enter_context(path.open("wb"))
        return self._files[name]


def _array(name: str, value: Any, where: str) -> NDArray[Any]:
    """A number or a list of numbers, as an array of one dimension or none."""
    import numpy as np

    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.ndim > 1 or array.dtype.kind not in "biuf":
        raise _no_sample(where, f"`{name}` is {type(value).__name__}: {str(value)[:60]}")
    return array.astype(np.int64) if array.dtype.kind in "biu" else array


def _no_sample(where: str, why: str) -> UsageError:
    return UsageError(
        f"{where}: what `sample` returned is no sample: {why}.",
        "A sample is a dict: name -> a number, or a list of numbers; the same names for each row.",
    )


def describe(facts: OwnFacts, size: str) -> str:
    """A line for the user on what a store holds.

    Args:
        size: of its files.
    """
    left = f"; {human_count(facts.dropped, 'row')} left out by the task" if facts.dropped else ""
    names = ", ".join(facts.sizes)
    return f"{human_count(facts.num_sequences, 'sample')} of {names} ({size}{left})"
