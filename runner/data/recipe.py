"""What decides the content of a store: the recipe, and the key that names what was made of it. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from runner.config import RunConfig
from runner.data_config import KEYS, LANGUAGE, DatasetConfig
from runner.errors import UsageError
from runner.fields import Choice
from runner.inputs import Inputs, ModelInput, SplitInput

STORE_FORMAT = 3
IMAGE_STORE_FORMAT = 4  # has a number of its own: texts need not be prepared again for what is mended in images
# Model types of transformers that keep documents apart under a block-diagonal mask with positions that begin anew:
# tests/runner/test_apart.py holds each of them to it. RoBERTa's positions begin after the padding index.
KEEPS_APART = frozenset({
    "bert", "roberta", "xlm-roberta", "camembert", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "phi3",
})  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What decides the content of a store, for one split of one dataset.

    Attributes:
        documents: `joined`, `separate` or `alone`; `alone` for images.
    """

    task: str
    sequence_length: int
    split: SplitInput
    dataset: DatasetConfig
    limit: int | None
    model: ModelInput
    documents: str = "joined"

    def to_json(self) -> dict[str, Any]:
        """The recipe as data: what the key is the digest of."""
        columns = self.dataset.columns(self.task)
        settings = {key: getattr(self.dataset, key) for key, tasks in KEYS.items() if self.task in tasks}
        recipe = {
            "format": STORE_FORMAT,
            "task": self.task,
            "columns": columns,
            **settings,
            "limit": self.limit,
            "data": list(self.split.digests),
        }
        if self.task == "image-classification":
            # Of the model only the size of its images counts.
            return recipe | {"format": IMAGE_STORE_FORMAT, "side": image_side(self.dataset, self.model)}
        return recipe | {
            "sequence_length": self.sequence_length,
            "documents": self.documents,
            "tokenizer": self.model.tokenizer_digests,
        }

    @property
    def key(self) -> str:
        """Names the store: 24 hex digits."""
        return _digest(self.to_json())


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:24]


def recipes(config: RunConfig, inputs: Inputs, sequence_length: int) -> dict[str, tuple[Recipe, ...]]:
    """The stores a run needs: `train`, one a dataset, and `validation` if any dataset has one."""
    documents = documents_of(config, inputs.model, sequence_length).value

    def of(role: str) -> tuple[Recipe, ...]:
        splits = [(data, data.train if role == "train" else data.validation) for data in inputs.datasets]
        return tuple(
            Recipe(
                config.task, sequence_length, split, data.settings, data.settings.limit.get(role), inputs.model,
                str(documents),
            )
            for data, split in splits
            if split is not None
        )  # fmt: skip

    return {role: found for role in ("train", "validation") if (found := of(role))}


def data_key(train: tuple[Recipe, ...]) -> str:
    """Names the training data of a run: what it is made of, and in what proportion."""
    if len(train) == 1 and train[0].dataset.weight == 1:
        return train[0].key
    return _digest([[recipe.key, recipe.dataset.weight] for recipe in train])


def documents_of(config: RunConfig, model: ModelInput, sequence_length: int) -> Choice:
    """How documents become sequences, and why.

    Raises:
        UsageError: the task or the model cannot have it so.
    """
    wanted, task, kind = config.packing.documents, config.task, str(model.settings.get("model_type"))
    key, why_not = "packing.documents", _why_not_apart(model, sequence_length)
    if task == "image-classification":
        if wanted not in ("auto", "alone"):
            raise UsageError(f"{config.path}: {key}: {wanted}: images are not packed.", "Leave it out.")
        return Choice(key, "alone", "images are not packed")
    if wanted == "joined" and task == "instruction":
        raise UsageError(
            f"{config.path}: {key}: joined would cut samples in two and show one to another.",
            f"Set {key}: separate, or alone.",
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
    """Why documents cannot lie side by side in a sequence without seeing each other; None: they can."""
    settings = model.settings
    if (kind := settings.get("model_type")) not in KEEPS_APART:
        return f"models known to keep documents apart are {', '.join(sorted(KEEPS_APART))}; this one is `{kind}`"
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    if isinstance(window, int) and sequence_length > window:
        return f"the model looks back {window} tokens at most, the mask would let it look back {sequence_length}"
    return None


def image_side(dataset: DatasetConfig, model: ModelInput) -> int:
    """Pixels of the square that images are stored as: as asked for, else the model's own, else 224.

    Smaller images than that are not blown up in the store, if nobody asked for it.
    """
    if dataset.image_size != "auto":
        return dataset.image_size
    own = model.settings.get("image_size")
    own = own[0] if isinstance(own, list) and own else own
    if not isinstance(own, int):
        size = model.preprocessing.get("crop_size") or model.preprocessing.get("size") or {}
        sides = [
            size[k] for k in ("height", "shortest_edge") if isinstance(size, dict) and isinstance(size.get(k), int)
        ]
        own = size if isinstance(size, int) else sides[0] if sides else 224
    return own
