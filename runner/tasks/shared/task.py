"""What all code asks of a task.

A run file is read, checked and planned where there is no torch, often not even numpy, and within
tenths of a second. So a task's file imports torch, transformers, numpy, pyarrow and
`runner.training` in its functions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.columns import Column
from runner.config.data import DatasetConfig
from runner.config.run_config import RunConfig
from runner.data.classes import Classes
from runner.data.recipe import Recipe
from runner.data.store import Facts, Sample
from runner.data.tokenizing import Frame, end_of_text
from runner.errors import Lines, Mistakes, Place, UsageError, Where, suggest
from runner.inputs import Inputs, ModelInput, SplitInput
from runner.tasks.shared.guess import Chosen, choose_columns
from runner.tasks.shared.objective import Objective

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

TEXT = "A rehearsal."
OF_TOKENS = ("sequence_length", "add_tokens", "add_special_tokens")
"""The keys of the run file that all tasks with tokens have."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of a run file.

    Attributes:
        name: in the run file.
        place: among the others in lists, as in the documentation.
        auto: the class of transformers that loads its models.
        table: the middle of the name of transformers' table of its model types,
            `MODEL_FOR_..._MAPPING_NAMES` (transformers/models/auto/modeling_auto.py).
        model_types: the keys of that table. They are copied, because to read them needs torch;
            tests/runner/config/test_model_types.py compares them.
        pipeline: the Hub's name for it.
        peft_type: peft's name for it, if it has one.
        example: the run file of runner/examples that `runner init` begins with.
        reads: key of a dataset -> what its column must hold.
        settings: its other keys of a dataset.
        own_keys: its other keys of the run file, beside `OF_TOKENS`.
        chosen: those of `reads` for which `runner init` must find a column.
        ambiguous: those of `chosen` whose columns only their names tell apart.
        format: of its samples. A fix in one task leaves stores and checkpoints of others valid.
        packing: the ways in which its documents can become sequences; the first that the model
            allows is `auto`.
        why_alone: the reason where `alone` is the only way.
        class_key: the key of the column with its classes; empty: it has none.
        has_tokens: False: it reads images.
        writes_chats: whether rows become texts by a chat template, a format, or as prompt and
            response, so that `check` writes the first ones.
        draws_tokens: whether any token of the vocabulary can become an input.
    """

    name: str
    place: int
    auto: str
    table: str
    model_types: frozenset[str] = field(repr=False)
    pipeline: str
    peft_type: str | None = None
    example: str
    reads: Mapping[str, Column] = field(repr=False)
    settings: tuple[str, ...] = ()
    own_keys: tuple[str, ...] = ()
    chosen: tuple[str, ...]
    ambiguous: tuple[str, ...] = ()
    format: int = 1
    packing: tuple[str, ...] = ("alone",)
    why_alone: str = "each sample has its own class, or classes"
    class_key: str = ""
    has_tokens: bool = True
    writes_chats: bool = False
    draws_tokens: bool = False

    @property
    def dataset_keys(self) -> tuple[str, ...]:
        """The keys of a dataset that belong to this task, and not to every task."""
        return (*self.reads, *self.settings)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the run file and of its datasets that not every task has."""
        of_tokens = OF_TOKENS if self.has_tokens else ()
        return (*self.dataset_keys, *self.own_keys, *of_tokens)

    @property
    def has_classes(self) -> bool:
        """Whether it learns classes; the head of its model is new for other ones."""
        return bool(self.class_key)

    def model_class(self) -> Any:
        """The class of transformers that loads its models."""
        import transformers

        return getattr(transformers, self.auto)

    def sees_ahead(self, settings: Mapping[str, Any]) -> bool:
        """Whether a model's tokens see those that they have to guess.

        Args:
            settings: the model's config.json.
        """
        return False

    # The columns of a dataset.

    def columns(self, dataset: DatasetConfig) -> dict[str, str]:
        """Returns key of the run file -> the column that is read."""
        return {key: column for key in self.reads if (column := getattr(dataset, key))}

    def expected(self, key: str, dataset: DatasetConfig) -> Column:
        """Returns what the column of a key must hold."""
        return self.reads[key]

    def hint_for_missing(self, key: str, columns: Mapping[str, str]) -> str:
        """Returns what may help where the column of a key is missing: a sentence, or nothing.

        Args:
            columns: name -> Arrow type, of the split.
        """
        return ""

    def check_dataset(self, dataset: DatasetConfig, where: Where, lines: Lines) -> None:
        """Refuses keys of a dataset that contradict each other.

        Args:
            where: the keys that lead to it.

        Raises:
            UsageError: with file:line.
        """

    def check_columns(
        self,
        dataset: DatasetConfig,
        columns: Mapping[str, str],
        split: str,
        where: Callable[[str], Place],
        mistakes: Mistakes,
        unknown: Set[str] = frozenset(),
    ) -> None:
        """Finds the columns of a split that are missing or have another type.

        Args:
            dataset: what the run file sets for the dataset.
            columns: name -> Arrow type, of the split.
            split: name of the split.
            where: key of the dataset -> its place, which names it.
            mistakes: keeps what is found, as UsageErrors that list the columns.
            unknown: keys of the dataset whose values are not known; they are not checked.
        """
        for named, column in self.columns(dataset).items():
            if named.partition(":")[0] in unknown or not column:  # missing: found without a bundle
                continue
            with mistakes:
                self._check_column(dataset, (named, column), columns, split, where)

    def _check_column(
        self,
        dataset: DatasetConfig,
        named: tuple[str, str],
        columns: Mapping[str, str],
        split: str,
        where: Callable[[str], Place],
    ) -> None:
        """Refuses one column: `named` is its key in the run file, and its name."""
        name, column = named
        key = name.partition(":")[0]
        expected = self.expected(key, dataset)
        if column not in columns:
            raise UsageError(
                f"the split `{split}` of `{dataset.asset}` has no such column.",
                suggest(
                    column,
                    columns,
                    f"Its columns: {', '.join(f'{c} ({t})' for c, t in columns.items())}."
                    + self.hint_for_missing(key, columns),
                ),
                place=where(name if key == "format" else f"{key}: {column}"),
            )
        if not expected.fits(columns[column]):
            others = ", ".join(expected.fitting(columns)) or "none"
            raise UsageError(
                f"that column of `{dataset.asset}` holds {columns[column]}, not {expected.what}.",
                f"Columns of {expected.what}: {others}." + expected.hint(columns[column]),
                place=where(f"{key}: {column}"),
            )

    def choose(self, split: SplitInput) -> Chosen:
        """Chooses a column for each key that the task needs: by its name, else by what it holds.

        Args:
            split: the training split; its rows are read only where names do not decide.

        Raises:
            DamageError: a file cannot be read.
        """
        return choose_columns({key: self.reads[key] for key in self.chosen}, split)

    # From rows to samples.

    def decides_samples(self, recipe: Recipe) -> dict[str, Any]:
        """Returns what decides the samples beside the rows and the keys of the dataset."""
        return {
            "sequence_length": recipe.sequence_length,
            "documents": recipe.documents,
            "tokenizer": recipe.model.tokenizer_digests,
        }

    def samples(self, recipe: Recipe) -> Generator[Sample, None, Facts]:
        """Yields the samples of a split; returns what is known about all of them.

        Raises:
            UsageError: the tokenizer lacks a token that the task needs, a row cannot be read, or
                there is nothing to train on.
        """
        raise NotImplementedError

    def frame(self, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """Returns the special tokens of a sequence: the end-of-text token between documents.

        Raises:
            UsageError: the tokenizer lacks a token that the task needs.
        """
        return Frame([], end_of_text(self.name, tokenizer), [])

    # What `runner check` asks.

    def check_tokenizer(
        self, config: RunConfig, inputs: Inputs, tokenizer: PreTrainedTokenizerBase
    ) -> list[str]:
        """Returns lines about the use of a tokenizer.

        Raises:
            UsageError: it lacks what the task needs.
        """
        self.frame(tokenizer)
        return []

    def check_rows(self, recipe: Recipe) -> None:
        """Looks at the first rows of a split, without a tokenizer.

        Raises:
            UsageError: a row cannot be read.
        """

    def try_first_rows(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str:
        """Returns why none of the first rows has something to learn; empty: some have."""
        return ""

    def doubt(self, recipe: Recipe, classes: Classes, dropped: int = 0) -> str:
        """Returns what is doubtful about the classes of a split; empty: nothing.

        Args:
            dropped: rows that were left out.
        """
        return ""

    # In a rank, or beside one.

    def objective(self, config: RunConfig, model: ModelInput, facts: Any) -> Objective[Any]:
        """Loads the model, with the loss that is trained.

        Args:
            config: the run file, with its precision decided.
            model: the bundle's model.
            facts: those of the training store.
        """
        raise NotImplementedError

    def trial_inputs(self, model: Any, folder: Path) -> dict[str, torch.Tensor]:
        """Returns the inputs of one forward pass.

        Args:
            model: the transformers model.
            folder: it was loaded from.
        """
        import torch
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return {"input_ids": torch.tensor([tokenizer(TEXT)["input_ids"]])}
