"""Decodes images once, outside the ranks: image files -> squares of uint8 pixels."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from runner.config.data import DatasetConfig
from runner.errors import UsageError
from runner.inputs import ModelInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

ORIENTATION = 274  # number of the EXIF tag


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
