"""Decodes images once, outside the ranks: parquet -> squares of uint8 pixels."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from runner.data.classes import class_of, is_blank, listed, read_classes
from runner.data.recipe import Recipe, image_side
from runner.data.store import Facts, Sample
from runner.data.table import columns, row_of
from runner.errors import UsageError, human_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

IMAGES_AT_ONCE = 100
ORIENTATION = 274  # number of the EXIF tag


def samples(recipe: Recipe) -> Generator[Sample, None, Facts]:
    """Yields the decoded images of a split and their classes: `pixels` and `labels`.

    Raises:
        UsageError: a row has no image that can be decoded, or its label is no class; or no row is
            left.
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
    return Facts(
        recipe.to_json(),
        f"{human_count(number, 'image')} of {side} x {side} pixels in {len(classes.names)} "
        f"classes: {listed(classes.names)}",
        [f"{left_out}: no image or no label"] if dropped else [],
        class_names=classes.names,
        class_kind=classes.kind,
        side=side,
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
