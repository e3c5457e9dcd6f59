"""The recipe of a store: everything that decides its content, and the store's key. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

from runner.config.data import DatasetConfig
from runner.config.fields import Choice, found_tasks
from runner.config.run_config import RunConfig
from runner.config.task_keys import TaskKeys
from runner.data.store import Sample, StoreFacts
from runner.from_stage import UsageError
from runner.inputs import Inputs, ModelInput, SplitInput

# Model types of transformers that keep documents apart with a block-diagonal mask and positions
# that restart per document. tests/runner/tasks/test_documents_apart.py tests each of them.
# RoBERTa's positions begin after the padding index.
KEEPS_APART = frozenset({
    "bert", "roberta", "xlm-roberta", "camembert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2",
    "qwen3", "phi3",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SampleTask(TaskKeys):
    """A task, as the preparation of data sees it: how rows become samples.

    Attributes:
        format: of its samples. A fix in one task leaves stores and checkpoints of others valid.
        packing: the ways in which its documents can become sequences; the first that the model
            allows is `auto`.
        why_alone: the reason where `alone` is the only way.
    """

    format: int = 1
    packing: tuple[str, ...] = ("alone",)
    why_alone: str = "each sample has its own class, or classes"

    def decides_samples(self, recipe: Recipe) -> dict[str, Any]:
        """Returns what decides the samples beside the rows and the keys of the dataset."""
        return {
            "sequence_length": recipe.sequence_length,
            "documents": recipe.documents,
            "tokenizer": recipe.model.tokenizer_digests,
        }

    def samples(self, recipe: Recipe) -> Generator[Sample, None, StoreFacts]:
        """Yields the samples of a split; returns what is known about all of them.

        Raises:
            UsageError: the tokenizer lacks a token that the task needs, a row cannot be read, or
                there is nothing to train on.
        """
        raise NotImplementedError


def sample_task(name: str) -> SampleTask:
    """Returns how the task for a run file's `task` makes samples."""
    task: SampleTask = found_tasks()[name]
    return task


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the content of the store of one split of one dataset.

    Attributes:
        task: as in the run file.
        sequence_length: tokens per sequence.
        split: the files.
        dataset: what the run file sets for the dataset.
        limit: the most rows to read; None: all.
        model: its tokenizer is used, or the size of its images.
        documents: `joined`, `separate` or `alone`; `joined` and `separate` for texts and chats.
    """

    task: str
    sequence_length: int
    split: SplitInput
    dataset: DatasetConfig
    limit: int | None
    model: ModelInput
    documents: str = "joined"

    def to_json(self) -> dict[str, Any]:
        """Returns the recipe as data. The key is its digest."""
        task = sample_task(self.task)
        settings = {
            key: value for key in task.dataset_keys if (value := getattr(self.dataset, key)) != {}
        }
        recipe = {
            "format": task.format,
            "task": self.task,
            "columns": task.columns(self.dataset),
            **settings,
            "limit": self.limit,
            "data": list(self.split.digests),
        }
        if self.split.part is not None:
            recipe["part"] = asdict(self.split.part)
        return recipe | task.decides_samples(self)

    @property
    def key(self) -> str:
        """The name of the store: 24 hex digits."""
        return _digest(self.to_json())


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:24]


def recipes(
    config: RunConfig, inputs: Inputs, sequence_length: int
) -> dict[str, tuple[Recipe, ...]]:
    """Returns the stores that a run needs.

    Returns:
        `train` -> one recipe per dataset; `validation` -> the same, if a dataset has that split.
    """
    documents = documents_of(config, inputs.model, sequence_length).value

    def of(role: str) -> tuple[Recipe, ...]:
        splits = [
            (data, data.train if role == "train" else data.validation) for data in inputs.datasets
        ]
        return tuple(
            Recipe(
                task=config.task,
                sequence_length=sequence_length,
                split=split,
                dataset=data.settings,
                limit=data.settings.limit.get(role),
                model=inputs.model,
                documents=str(documents),
            )
            for data, split in splits
            if split is not None
        )

    return {role: found for role in ("train", "validation") if (found := of(role))}


def data_key(train: tuple[Recipe, ...]) -> str:
    """Returns the name of a run's training data: a digest of its recipes and their weights."""
    if len(train) == 1 and train[0].dataset.weight == 1:
        return train[0].key
    return _digest([[recipe.key, recipe.dataset.weight] for recipe in train])


def documents_of(config: RunConfig, model: ModelInput, sequence_length: int) -> Choice:
    """Decides how documents become sequences, with the reason.

    Raises:
        UsageError: the run file asks for a way that the task or the model does not allow.
    """
    wanted, ways = config.packing.documents, sample_task(config.task).packing
    kind = str(model.settings.get("model_type"))
    key, why_not = "packing.documents", _why_not_apart(model, sequence_length)
    if ways == ("alone",):
        if wanted not in ("auto", "alone"):
            raise UsageError(
                f"{config.path}: {key}: {wanted}: samples of {config.task} are not packed.",
                "Omit it.",
            )
        return Choice(key, "alone", sample_task(config.task).why_alone)
    if wanted == "joined" and "joined" not in ways:
        raise UsageError(
            f"{config.path}: {key}: joined would cut samples in two and show one to another.",
            f"Set {key}: alone." if why_not else f"Set {key}: separate, or alone.",
        )
    if wanted == "separate" and why_not:
        others = "alone or joined" if "joined" in ways else "alone"
        raise UsageError(f"{config.path}: {key}: separate: {why_not}.", f"Set {key}: {others}.")
    if wanted != "auto":
        return Choice(key, wanted, "as the run file says")
    if "joined" in ways:
        return Choice(key, "joined", "no token is padding, and no mask is needed")
    if why_not:
        return Choice(key, "alone", why_not)
    return Choice(key, "separate", f"whole samples side by side; {kind} keeps them apart")


def _why_not_apart(model: ModelInput, sequence_length: int) -> str | None:
    """Returns why the model lets documents in a sequence see each other; None: it does not."""
    settings = model.settings
    if (kind := settings.get("model_type")) not in KEEPS_APART:
        known = ", ".join(sorted(KEEPS_APART))
        return f"models known to keep documents apart are {known}; this one is `{kind}`"
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    if isinstance(window, int) and sequence_length > window:
        return (
            f"the model looks back {window} tokens at most, "
            f"the mask would let it look back {sequence_length}"
        )
    return None
