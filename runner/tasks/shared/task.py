"""What all code asks of a task, and how a task guesses its columns.

A run file is read, checked and planned where there is no torch, often not even numpy, and within
tenths of a second. So a task's file imports torch, transformers, numpy, pyarrow and
`runner.training` in its functions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from runner.config.run_config import RunConfig
from runner.config.task_keys import Column
from runner.data.recipe import Recipe, SampleTask
from runner.data.sequences import Frame
from runner.data.store import IGNORED, Sample, SamplePlace, StoreFacts
from runner.data.table import Classes
from runner.data.table import columns as read_columns
from runner.data.tokenizing import Tokenizer, end_of_text
from runner.inputs import Inputs, ModelInput, SplitInput

if TYPE_CHECKING:
    import torch
    from torch import nn


Batch: TypeAlias = "dict[str, torch.Tensor]"
R = TypeVar("R")


class Objective(Generic[R]):
    """A model with its loss; `R` is what a batch is made of.

    `module(**batch)` returns the loss *summed* over the predictions of the batch, a float32 scalar.
    The loop divides it by the number of predictions of the whole step, so a step is the same
    however it is split. In evaluation it may be a vector: the loss, then what else `metrics` needs
    summed.

    Attributes:
        module: has the loss; the engine runs it.
        model: the transformers model inside.
        note: where the weights come from, for printing.
        logits_at_predictions: logits are computed only where something is predicted.
        rows: makes arrays of samples of a store, padded to the longest of them.
    """

    module: nn.Module
    model: Any
    note: str
    logits_at_predictions: bool = True
    rows: Callable[[Sequence[Sample], StoreFacts], R]

    def collate(self, rows: R, samples: list[SamplePlace]) -> Batch:
        """Makes the keyword arguments of `module`.

        Args:
            rows: those of these samples.
            samples: which they are.

        Returns:
            Tensors by name. `labels` is int64 with samples along its first dimension, and -100
            where nothing is predicted.
        """
        raise NotImplementedError

    def num_predictions(self, batch: Batch) -> int:
        """How many predictions a batch's loss is the sum of."""
        return int((batch["labels"] != IGNORED).sum())

    def num_tokens(self, batch: Batch) -> int:
        """Tokens of a batch without padding; images where there are no tokens."""
        for name in ("attention_mask", "documents"):
            if name in batch:
                return int((batch[name] > 0).sum())
        return batch["input_ids"].numel()

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """The measures of an evaluation.

        Args:
            sums: what `module` gave in evaluation, summed over the whole split.
            count: predictions of the whole split.
        """
        raise NotImplementedError


ROWS = 1000  # of the training split are looked at


class Chosen(NamedTuple):
    """The columns that `runner init` chooses for a task.

    Attributes:
        columns: key of the run file -> its column, or `format` -> a text with columns; empty: none
            fit the task.
        others: key -> other columns that it could be.
        unusual: the keys whose column does not have a usual name.
    """

    columns: dict[str, str]
    others: dict[str, list[str]]
    unusual: tuple[str, ...]


def choose_columns(
    wanted: Mapping[str, Column], split: SplitInput, known: Mapping[str, str] | None = None
) -> Chosen:
    """Chooses a column for each key.

    Args:
        wanted: key -> what its column must hold.
        split: the training split; its rows are read only where names do not decide.
        known: keys whose columns are chosen already.

    Raises:
        DamageError: a file cannot be read.
    """
    chosen = dict(known or {})
    others: dict[str, list[str]] = {}
    unusual: list[str] = []
    for key, column in wanted.items():
        if key in chosen:
            continue
        able = [name for name in column.fitting(split.columns) if name not in chosen.values()]
        if not able:
            return Chosen({}, {}, ())
        chosen[key] = _best(column, able, split)
        others[key] = [name for name in able if name != chosen[key]]
        if not column.is_usual(chosen[key]):
            unusual.append(key)
    return Chosen(chosen, others, tuple(unusual))


def _best(column: Column, able: Sequence[str], split: SplitInput) -> str:
    """The column with a usual name; else the one whose values are the most likely."""
    usual = [name for name in able if column.is_usual(name)]
    if usual or len(able) == 1 or column.unlikely is None:
        return (usual or able)[0]
    values: dict[str, list[Any]] = {name: [] for name in able}
    for batch in read_columns(split, list(able), ROWS):
        for name, some in batch.items():
            values[name] += [value for value in some if value is not None]
    unlikely = column.unlikely
    return min(able, key=lambda name: unlikely(values[name]))


TEXT = "A rehearsal."


@dataclass(frozen=True, kw_only=True)
class Task(SampleTask):
    """A task of a run file, with all that the launcher and the ranks ask.

    Attributes:
        place: among the others in lists, as in the documentation.
        auto: the class of transformers that loads its models.
        table: the middle of the name of transformers' table of its model types,
            `MODEL_FOR_..._MAPPING_NAMES` (transformers/models/auto/modeling_auto.py).
        model_types: the keys of that table. They are copied, because to read them needs torch;
            tests/runner/config/test_model_types.py compares them.
        pipeline: the Hub's name for it.
        peft_type: peft's name for it, if it has one.
        example: the run file of runner/examples that `runner init` begins with.
        chosen: those of `reads` for which `runner init` must find a column.
        ambiguous: those of `chosen` whose columns only their names tell apart.
        writes_chats: whether rows become texts by a chat template, a format, or as prompt and
            response, so that `check` writes the first ones.
        draws_tokens: whether any token of the vocabulary can become an input.
    """

    place: int
    auto: str
    table: str
    model_types: frozenset[str] = field(repr=False)
    pipeline: str
    peft_type: str | None = None
    example: str
    chosen: tuple[str, ...]
    ambiguous: tuple[str, ...] = ()
    writes_chats: bool = False
    draws_tokens: bool = False

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

    def choose(self, split: SplitInput) -> Chosen:
        """Chooses a column for each key that the task needs: by its name, else by what it holds.

        Args:
            split: the training split; its rows are read only where names do not decide.

        Raises:
            DamageError: a file cannot be read.
        """
        return choose_columns({key: self.reads[key] for key in self.chosen}, split)

    # From rows to samples.

    def frame(self, tokenizer: Tokenizer) -> Frame:
        """Returns the special tokens of a sequence: the end-of-text token between documents.

        Raises:
            UsageError: the tokenizer lacks a token that the task needs.
        """
        return Frame([], end_of_text(self.name, tokenizer), [])

    # What `runner check` asks.

    def check_tokenizer(self, config: RunConfig, inputs: Inputs, tokenizer: Tokenizer) -> list[str]:
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

    def try_first_rows(self, recipe: Recipe, tokenizer: Tokenizer) -> str:
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
