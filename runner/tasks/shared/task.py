"""What all code asks of a task.

A run file is read, checked and planned where there is no torch, often not even numpy, and within
tenths of a second. So a task's file imports torch, transformers, numpy, pyarrow and
`runner.training` in its functions alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.run_config import RunConfig
from runner.data.classes import Classes
from runner.data.recipe import Recipe, SampleTask
from runner.data.tokenizing import Frame, end_of_text
from runner.inputs import Inputs, ModelInput, SplitInput
from runner.tasks.shared.guess import Chosen, choose_columns
from runner.tasks.shared.objective import Objective

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

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
