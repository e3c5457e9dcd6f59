"""Image classification: which of the classes is on it, by ViT, ResNet or what `AutoModelForImageClassification` knows.

In training each image is moved by up to an eighth of its side (black comes in) and mirrored every second time, as for
CIFAR in He et al. (arXiv:1512.03385, 4.2): drawn from the sample's own random numbers, so the same on any rank. Pixels
travel to the device as bytes and are scaled there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from runner.config import RunConfig
from runner.data.images import ImageFacts, Pictures
from runner.data.recipe import image_side
from runner.data_config import DatasetConfig
from runner.inputs import ModelInput
from runner.training.batches import Sample, sample_rng
from runner.training.tasks.base import Batch, load_model

HALF = (0.5, 0.5, 0.5)  # ViT's own mean and deviation; what a model without preprocessor_config.json gets


class ImageClassification:
    """Image classification; a head for another number of classes is drawn anew."""

    def __init__(self, config: RunConfig, model: ModelInput, facts: ImageFacts) -> None:
        from transformers import AutoModelForImageClassification

        self._seed = config.seed
        names = facts.class_names or [str(number) for number in range(facts.num_classes)]
        self.model, origin = load_model(
            AutoModelForImageClassification,
            config,
            model,
            fresh=("classifier", "head", "fc"),
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
        )
        mean, deviation = (tuple(model.preprocessing.get(f"image_{what}", HALF)) for what in ("mean", "std"))
        side = image_side(DatasetConfig(asset=""), model) if "image_size" in model.settings else facts.side
        self.module: nn.Module = _Classify(self.model, side, mean, deviation)
        scaled = f" (scaled to {side} on the device)" if side != facts.side else ""
        self.note = (
            f"{origin}; {facts.num_classes} classes; {facts.side} pixels{scaled}, less {mean}, by {deviation}; "
            "moved and mirrored"
        )

    def collate(self, rows: Pictures, samples: list[Sample]) -> Batch:
        """`pixels`: uint8 (number, 3, side, side); `labels`: int64 (number,). Nothing is drawn in evaluation."""
        pixels = np.stack(
            [
                image if sample.epoch < 0 else augmented(image, sample_rng(self._seed, sample))
                for image, sample in zip(rows.pixels, samples, strict=True)
            ]
        )
        return {
            "pixels": torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))),
            "labels": torch.from_numpy(rows.labels.copy()),
        }

    def num_predictions(self, batch: Batch) -> int:
        """Images, but those that only fill up a batch of an evaluation."""
        return int((batch["labels"] != -100).sum())

    def num_tokens(self, batch: Batch) -> int:
        """Images: they are what this task counts."""
        return self.num_predictions(batch)

    def metrics(self, sums: list[float], count: float) -> dict[str, float]:
        """Loss, and the share of images whose class was found."""
        return {"validation_loss": sums[0] / count, "validation_accuracy": sums[1] / count}


def augmented(image: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """An image moved by up to an eighth of its side, and mirrored or not: uint8 (side, side, 3), as it was."""
    side = image.shape[0]
    margin = side // 8
    padded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)))
    top, left = random.integers(0, 2 * margin + 1, 2)
    moved = padded[top : top + side, left : left + side]
    return moved[:, ::-1] if random.random() < 0.5 else moved


class _Classify(nn.Module):
    def __init__(self, model: Any, side: int, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
        super().__init__()
        self.model, self._side, self._mean, self._deviation = model, side, mean, deviation

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mean, deviation = (
            torch.tensor(values, device=pixels.device).view(1, 3, 1, 1) for values in (self._mean, self._deviation)
        )
        scaled = (pixels.float() / 255 - mean) / deviation
        if scaled.shape[-1] != self._side:
            scaled = interpolate(scaled, (self._side, self._side), mode="bilinear", align_corners=False)
        logits = self.model(pixel_values=scaled.to(self.model.dtype)).logits.float()
        loss = cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        if self.training:
            return loss
        return torch.stack([loss, (logits.argmax(-1) == labels).sum().float()])
