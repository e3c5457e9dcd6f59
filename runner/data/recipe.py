"""The recipe of a store: everything that decides its content, and the store's key. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from runner.config.data import LANGUAGE, DatasetConfig, data_of, keys_of_task
from runner.config.fields import Choice
from runner.config.run_config import RunConfig
from runner.errors import UsageError
from runner.inputs import Inputs, ModelInput, SplitInput

# Each kind of data has its own number: a fix in one kind leaves stores and checkpoints of the
# others valid.
FORMATS = {"texts": 1, "chats": 2, "labelled": 1, "images": 1}
# Model types of transformers that keep documents apart with a block-diagonal mask and positions
# that restart per document. tests/runner/training/tasks/test_documents_apart.py tests each of them.
# RoBERTa's positions begin after the padding index.
KEEPS_APART = frozenset({
    "bert", "roberta", "xlm-roberta", "camembert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2",
    "qwen3", "phi3",
})  # fmt: skip


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
        columns = self.dataset.columns(self.task)
        settings = {
            key: value
            for key in keys_of_task(self.task)
            if (value := getattr(self.dataset, key)) != {}
        }
        recipe = {
            "format": FORMATS[data_of(self.task)],
            "task": self.task,
            "columns": columns,
            **settings,
            "limit": self.limit,
            "data": list(self.split.digests),
        }
        if self.split.part is not None:
            recipe["part"] = asdict(self.split.part)
        if self.task == "image-classification":
            # Only the size of the model's images decides the content.
            return recipe | {"side": image_side(self.dataset, self.model)}
        return recipe | {
            "sequence_length": self.sequence_length,
            "documents": self.documents,
            "tokenizer": self.model.tokenizer_digests,
        }

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
    wanted, task = config.packing.documents, config.task
    kind = str(model.settings.get("model_type"))
    key, why_not = "packing.documents", _why_not_apart(model, sequence_length)
    if data_of(task) in ("images", "labelled"):
        if wanted not in ("auto", "alone"):
            raise UsageError(
                f"{config.path}: {key}: {wanted}: samples of {task} are not packed.", "Omit it."
            )
        return Choice(key, "alone", "each sample has its own class, or classes")
    if wanted == "joined" and task == "instruction":
        raise UsageError(
            f"{config.path}: {key}: joined would cut samples in two and show one to another.",
            f"Set {key}: alone." if why_not else f"Set {key}: separate, or alone.",
        )
    if wanted == "separate" and why_not:
        others = "alone" if task == "instruction" else "alone or joined"
        raise UsageError(f"{config.path}: {key}: separate: {why_not}.", f"Set {key}: {others}.")
    if wanted != "auto":
        return Choice(key, wanted, "as the run file says")
    if task in LANGUAGE:
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


def image_side(dataset: DatasetConfig, model: ModelInput) -> int:
    """Returns the side (pixels) of the square that images are stored as.

    It is the run file's value, else the model's, else 224. If the run file gives none, images that
    are smaller are not enlarged in the store.
    """
    if dataset.image_size != "auto":
        return dataset.image_size
    own = model.settings.get("image_size")
    size = model.preprocessing.get("crop_size") or model.preprocessing.get("size")
    known = [*own[:1]] if isinstance(own, list) else [own]
    known += (
        [size.get(k) for k in ("height", "shortest_edge")] if isinstance(size, dict) else [size]
    )
    return next((side for side in known if isinstance(side, int)), 224)
