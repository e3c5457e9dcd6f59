"""Image classification with ViT, ResNet or any model that `AutoModelForImageClassification` loads.

Images are decoded once, outside the ranks, into squares of uint8 pixels.

In training each image is moved by up to an eighth of its side (black fills the gap) and mirrored
with probability one half, as for CIFAR in He et al. (arXiv:1512.03385, 4.2). This uses the sample's
own random numbers, so it is the same on any rank. Pixels go to the device as bytes and are scaled
there.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.config.data import DatasetConfig
from runner.config.run_config import RunConfig
from runner.config.task_keys import Column
from runner.data.recipe import Recipe
from runner.data.store import Sample, SamplePlace, StoreFacts, sample_rng
from runner.data.table import class_of, columns, is_blank, listed, read_classes, row_of
from runner.from_stage import UsageError, human_count
from runner.inputs import ModelInput
from runner.tasks.shared.kinds import LABEL, ClassTask, numbered, scores
from runner.tasks.shared.task import Batch, Objective

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from PIL import Image


HALF = (0.5, 0.5, 0.5)
"""Mean and deviation of ViT, and of models without preprocessor_config.json."""

IMAGES_AT_ONCE = 100  # files of photos that are in memory at a time
ORIENTATION = 274  # number of the EXIF tag
CHANNELS = 3

MODEL_TYPES = """
    beit bit clip convnext convnextv2 cvt data2vec-vision deit dinat dinov2
    dinov2_with_registers donut-swin efficientnet focalnet hgnet_v2 hiera ijepa imagegpt levit
    metaclip_2 mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 perceiver poolformer pp_lcnet pvt
    pvt_v2 regnet resnet segformer shieldgemma2 siglip siglip2 swiftformer swin swinv2 textnet
    timm_wrapper vit vit_msn
"""


def _is_image(kind: str) -> bool:
    """Returns whether an Arrow type holds image files.

    It is a struct with the file's bytes, as `datasets` and our conversions write it, or the bytes.
    """
    return kind in ("binary", "large_binary") or (kind.startswith("struct<") and "bytes: " in kind)


class ImageClassification(ClassTask):
    """A class for each image."""

    def decides_samples(self, recipe: Recipe) -> dict[str, Any]:
        """Only the size of the model's images decides them."""
        return {"side": image_side(recipe.dataset, recipe.model)}

    def samples(self, recipe: Recipe) -> Generator[Sample, None, StoreFacts]:
        """Yields the decoded images of a split and their classes: `pixels` and `labels`.

        Raises:
            UsageError: a row has no image that can be decoded, or its label is no class; or no row
                is left.
        """
        import numpy as np

        classes, side = read_classes(recipe), image_side(recipe.dataset, recipe.model)
        numbers, number, dropped = classes.numbers, 0, 0
        for row, (image, label) in enumerate(_rows(recipe)):
            if image is None or is_blank(label):
                dropped += 1
                continue
            where = row_of(recipe.split, row)
            labels = np.array([class_of(label, numbers, recipe.split, row)], np.int32)
            if number == 0 and recipe.dataset.image_size == "auto":
                side = min(side, *open_image(image, where).size)
            yield {"pixels": decode(image, side, where).reshape(-1), "labels": labels}
            number += 1
        left_out = f"{human_count(dropped, 'row')} left out"
        if number == 0:
            raise UsageError(
                f"split `{recipe.split.name}` has no rows"
                + (f": {left_out}, without an image or a label." if dropped else "."),
                "Look at the columns, or choose another split.",
            )
        return StoreFacts(
            recipe.to_json(),
            f"{human_count(number, 'image')} of {side} x {side} pixels in {len(classes.names)} "
            f"classes: {listed(classes.names)}",
            [f"{left_out}: no image or no label"] if dropped else [],
            class_names=classes.names,
            class_kind=classes.kind,
            side=side,
        )

    def objective(self, config: RunConfig, model: ModelInput, facts: StoreFacts) -> ImageObjective:
        return ImageObjective(self.model_class(), config, model, facts)

    def trial_inputs(self, model: Any, folder: Path) -> dict[str, torch.Tensor]:
        """A black image."""
        import torch

        side = getattr(model.config, "image_size", None) or 224
        return {"pixel_values": torch.zeros(1, CHANNELS, side, side)}


TASK = ImageClassification(
    name="image-classification",
    place=6,
    auto="AutoModelForImageClassification",
    table="IMAGE_CLASSIFICATION",
    model_types=frozenset(MODEL_TYPES.split()),
    pipeline="image-classification",
    example="cifar10-ddp.yaml",
    reads={
        "image": Column("images ({bytes, path})", _is_image, usual=("image", "img")),
        "label": LABEL,
    },
    settings=("image_size",),
    chosen=("image", "label"),
    has_tokens=False,
    class_key="label",
)


def _rows(recipe: Recipe) -> Iterator[tuple[Any, Any]]:
    image, label = recipe.dataset.image, recipe.dataset.label
    for values in columns(recipe.split, [image, label], recipe.limit, IMAGES_AT_ONCE):
        yield from zip(values[image], values[label], strict=True)


def open_image(value: Any, where: str) -> Image.Image:
    """Decodes an image into red, green and blue, upright as its EXIF data say.

    Args:
        value: the bytes of an image file, or {bytes, path}.
        where: split and row, for the message.

    Raises:
        UsageError: it is no image, it is outside the dataset, or its white level is not known.
    """
    from PIL import Image, UnidentifiedImageError

    data = value.get("bytes") if isinstance(value, dict) else value
    if not data:
        raise UsageError(
            f"{where}: the image is not in the dataset, only its name.",
            "Stage it with `imagefolder`.",
        )
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _in_8_bits(_upright(image), image.format, where).convert("RGB")
    except (
        UnidentifiedImageError,
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:
        raise UsageError(
            f"{where}: not an image that can be decoded: {error}.", "Leave such rows out."
        ) from None


def _upright(image: Image.Image) -> Image.Image:
    """Rotates an image by its EXIF tag 274, Orientation (Exif 2.32, 4.6.4), as `datasets` does.

    Pillow's `exif_transpose` also writes the other tags again, and fails with a photo whose tags
    are damaged.
    """
    from PIL.Image import Transpose

    image.load()  # this rotates a TIFF and resets its tag, so it must come before the tag is read
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(image.getexif().get(ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _in_8_bits(image: Image.Image, format: str | None, where: str) -> Image.Image:
    """Scales greyscale of more than 8 bits so that white stays white. Pillow would clip it at 255.

    Args:
        image: of any mode.
        format: Pillow's name of the file format. PNG and PGM files state their number of bits,
            which the mode alone does not show.
        where: split and row, for the message.

    Raises:
        UsageError: 32 bits, in which the value of white is not known.
    """
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format in ("PNG", "PPM")):
        # The upper byte, as Pillow does with the colours of 16 bits.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        bits = "whole numbers" if image.mode == "I" else "fractions"
        raise UsageError(
            f"{where}: greyscale in {bits} of 32 bits (mode {image.mode}): "
            "the value of white is not known.",
            "Convert such images to 8 or 16 bits before you stage them, or leave such rows out.",
        )
    return image


def decode(value: Any, side: int, where: str) -> NDArray[np.uint8]:
    """Decodes an image into pixels: scales its shorter side to `side` and cuts out the middle.

    Args:
        value, where: as for `open_image`.
        side: pixels per side of the square.

    Returns:
        uint8, shape (side, side, 3).

    Raises:
        UsageError: as for `open_image`.
    """
    import numpy as np
    from PIL import Image

    image = open_image(value, where)
    width, height = image.size
    if (width, height) != (side, side):
        scale = side / min(width, height)
        wide, high = max(side, round(width * scale)), max(side, round(height * scale))
        left, top = (wide - side) // 2, (high - side) // 2
        image = image.resize((wide, high), Image.Resampling.BICUBIC).crop(
            (left, top, left + side, top + side)
        )
    return np.asarray(image, dtype=np.uint8)


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


class Pictures(NamedTuple):
    """A batch: pixels (uint8, shape (number, side, side, 3)), labels (int64, shape (number,))."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    @staticmethod
    def of(samples: Sequence[Sample], facts: StoreFacts) -> Pictures:
        """Samples of a store, whose images have one size."""
        import numpy as np

        pixels = np.stack([sample["pixels"] for sample in samples])
        labels = np.concatenate([sample["labels"] for sample in samples], dtype=np.int64)
        return Pictures(pixels.reshape(-1, facts.side, facts.side, CHANNELS), labels)


class ImageObjective(Objective[Pictures]):
    """The classes of images. A head for another number of classes is new."""

    rows = staticmethod(Pictures.of)

    def __init__(self, auto: Any, config: RunConfig, model: ModelInput, facts: StoreFacts) -> None:
        import torch

        from runner.training.components.classify import Classify
        from runner.training.components.device import wants_reference
        from runner.training.loading import load_model

        self._seed = config.seed
        self._channels_last = torch.cuda.is_available() and not wants_reference(os.environ)
        names = self._names = facts.class_names
        self.model, origin = load_model(
            auto, config, model, fresh=("classifier", "head", "fc"), **numbered(names)
        )
        mean, deviation = (
            tuple(model.preprocessing.get(f"image_{what}", HALF)) for what in ("mean", "std")
        )
        side = (
            image_side(DatasetConfig(asset=""), model)
            if "image_size" in model.settings
            else facts.side
        )
        self.module = Classify(
            self.model,
            len(names),
            config.label_smoothing,
            prepare=_Scaling(side, torch.tensor([mean, deviation])),
        )
        scaled = f" (scaled to {side} on the device)" if side != facts.side else ""
        self.note = (
            f"{origin}; {len(names)} classes; {facts.side} pixels{scaled}, "
            f"less {mean}, by {deviation}; moved and mirrored"
        )

    def collate(self, rows: Pictures, samples: list[SamplePlace]) -> Batch:
        """`pixels`: uint8 (number, 3, side, side); `labels`: int64 (number,).

        In evaluation nothing is random. For GPUs the channels stay last in memory.
        """
        import numpy as np
        import torch

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


class _Scaling:
    """Scales pixels on the device: their values, and their number where the model has one.

    Args:
        side: pixels per side that the model takes.
        scale: mean and deviation of each colour, shape (2, 3).
    """

    def __init__(self, side: int, scale: torch.Tensor) -> None:
        self._side, self._scale = side, scale

    def __call__(self, model: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The model's inputs from uint8 pixels, shape (number, 3, side, side)."""
        from torch.nn.functional import interpolate

        if self._scale.device != pixels.device:  # once: each copy to a GPU waits for it
            self._scale = self._scale.to(pixels.device)
        mean, deviation = self._scale.view(2, 1, 3, 1, 1)
        scaled = (pixels.float() / 255 - mean) / deviation
        if scaled.shape[-1] != self._side:
            scaled = interpolate(
                scaled, (self._side, self._side), mode="bilinear", align_corners=False
            )
        return {"pixel_values": scaled.to(model.dtype)}


def augmented(image: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """Moves an image by up to an eighth of its side, and mirrors it or not.

    Args:
        image: uint8 (side, side, 3).
        random: the sample's random numbers.

    Returns:
        An image of the same shape.
    """
    import numpy as np

    side = image.shape[0]
    margin = side // 8
    padded = np.pad(image, ((margin, margin), (margin, margin), (0, 0)))
    top, left = random.integers(0, 2 * margin + 1, 2)
    moved = padded[top : top + side, left : left + side]
    return moved[:, ::-1] if random.random() < 0.5 else moved
