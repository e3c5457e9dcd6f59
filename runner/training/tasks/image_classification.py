"""Image classification with ViT, ResNet or any model that `AutoModelForImageClassification` loads.

In training each image is moved by up to an eighth of its side (black fills the gap) and mirrored
with probability one half, as for CIFAR in He et al. (arXiv:1512.03385, 4.2). This uses the sample's
own random numbers, so it is the same on any rank. Pixels go to the device as bytes and are scaled
there.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from runner.config.data import DatasetConfig
from runner.config.run_config import RunConfig
from runner.data.recipe import image_side
from runner.data.store import Facts, Pictures
from runner.inputs import ModelInput
from runner.training.components.batches import Sample, sample_rng
from runner.training.components.device import wants_reference
from runner.training.tasks.base import Batch, Task, load_model
from runner.training.tasks.classification import Classify, scores

HALF = (0.5, 0.5, 0.5)
"""Mean and deviation of ViT, and of models without preprocessor_config.json."""


class ImageClassification(Task):
    """The task image-classification. A head for another number of classes is new."""

    def __init__(self, config: RunConfig, model: ModelInput, facts: Facts) -> None:
        from transformers import AutoModelForImageClassification

        self._seed = config.seed
        self._channels_last = torch.cuda.is_available() and not wants_reference(os.environ)
        names = self._names = facts.class_names
        self.model, origin = load_model(
            AutoModelForImageClassification,
            config,
            model,
            fresh=("classifier", "head", "fc"),
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
        )
        mean, deviation = (
            tuple(model.preprocessing.get(f"image_{what}", HALF)) for what in ("mean", "std")
        )
        side = (
            image_side(DatasetConfig(asset=""), model)
            if "image_size" in model.settings
            else facts.side
        )
        self.module = _ClassifyImages(
            self.model, len(names), side, mean, deviation, config.label_smoothing
        )
        scaled = f" (scaled to {side} on the device)" if side != facts.side else ""
        self.note = (
            f"{origin}; {len(names)} classes; {facts.side} pixels{scaled}, "
            f"less {mean}, by {deviation}; moved and mirrored"
        )

    def collate(self, rows: Pictures, samples: list[Sample]) -> Batch:
        """`pixels`: uint8 (number, 3, side, side); `labels`: int64 (number,).

        In evaluation nothing is random. For GPUs the channels stay last in memory.
        """
        pixels = np.stack(
            [
                image if sample.epoch < 0 else augmented(image, sample_rng(self._seed, sample))
                for image, sample in zip(rows.pixels, samples, strict=True)
            ]
        )
        pixels = pixels.transpose(0, 3, 1, 2)
        return {
            "pixels": torch.from_numpy(
                pixels if self._channels_last else np.ascontiguousarray(pixels)
            ),
            "labels": torch.from_numpy(rows.labels.copy()),
        }

    def num_tokens(self, batch: Batch) -> int:
        """Images: this task has no tokens."""
        return self.num_predictions(batch)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss, and the share of images whose class was predicted correctly."""
        found = scores(sums, count, len(self._names))
        return {name: found[name] for name in ("validation_loss", "validation_accuracy")}


def augmented(image: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Moves an image by up to an eighth of its side, and mirrors it or not.

    Args:
        image: uint8 (side, side, 3).
        random: the sample's random numbers.

    Returns:
        An image of the same shape.
    """
    side = image.shape[0]
    margin = side // 8
    padded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)))
    top, left = random.integers(0, 2 * margin + 1, 2)
    moved = padded[top : top + side, left : left + side]
    return moved[:, ::-1] if random.random() < 0.5 else moved


class _ClassifyImages(Classify):
    def __init__(
        self,
        model: Any,
        num_classes: int,
        side: int,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(model, num_classes, smoothing)
        self._side, self._scale = side, torch.tensor([mean, deviation])

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        pixels = inputs["pixels"]
        if self._scale.device != pixels.device:  # once: each copy to a GPU waits for it
            self._scale = self._scale.to(pixels.device)
        mean, deviation = self._scale.view(2, 1, 3, 1, 1)
        scaled = (pixels.float() / 255 - mean) / deviation
        if scaled.shape[-1] != self._side:
            scaled = interpolate(
                scaled, (self._side, self._side), mode="bilinear", align_corners=False
            )
        return super().forward(labels, pixel_values=scaled.to(self.model.dtype))
