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
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from runner.config.data import DatasetConfig
from runner.config.run_config import RunConfig
from runner.data.recipe import image_side
from runner.data.store import Facts, Pictures
from runner.inputs import ModelInput
from runner.training.components.batches import Sample, sample_rng
from runner.training.components.speed import wants_reference
from runner.training.tasks.base import Batch, load_model

HALF = (0.5, 0.5, 0.5)
"""Mean and deviation of ViT, and of models without preprocessor_config.json."""


class ImageClassification:
    """The task image-classification. A head for another number of classes is new."""

    logits_at_predictions = True

    def __init__(self, config: RunConfig, model: ModelInput, facts: Facts) -> None:
        from transformers import AutoModelForImageClassification

        self._seed = config.seed
        self._channels_last = torch.cuda.is_available() and not wants_reference(os.environ)
        names = facts.class_names
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
        self.module: nn.Module = _Classify(
            self.model, side, mean, deviation, config.label_smoothing
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

    def num_predictions(self, batch: Batch) -> int:
        """Images, without those that only fill up a batch of an evaluation."""
        return int((batch["labels"] != -100).sum())

    def num_tokens(self, batch: Batch) -> int:
        """Images: this task has no tokens."""
        return self.num_predictions(batch)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss, and the share of images whose class was predicted correctly."""
        return {"validation_loss": sums[0] / count, "validation_accuracy": sums[1] / count}


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


class _Classify(nn.Module):
    def __init__(
        self,
        model: Any,
        side: int,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
        smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self._smoothing = smoothing
        self.model, self._side, self._scale = model, side, torch.tensor([mean, deviation])

    def forward(self, labels: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        if self._scale.device != pixels.device:  # once: each copy to a GPU waits for it
            self._scale = self._scale.to(pixels.device)
        mean, deviation = self._scale.view(2, 1, 3, 1, 1)
        scaled = (pixels.float() / 255 - mean) / deviation
        if scaled.shape[-1] != self._side:
            scaled = interpolate(
                scaled, (self._side, self._side), mode="bilinear", align_corners=False
            )
        logits = self.model(pixel_values=scaled.to(self.model.dtype)).logits.float()
        smoothing = self._smoothing if self.training else 0.0
        loss = cross_entropy(
            logits, labels, reduction="sum", ignore_index=-100, label_smoothing=smoothing
        )
        if self.training:
            return loss
        return torch.stack([loss, (logits.argmax(-1) == labels).sum().float()])
