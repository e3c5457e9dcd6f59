"""Decodes images once, outside the ranks: parquet -> a memory-mapped store of uint8 pixels.

A store is a folder `<key>/`: `pixels.bin` (uint8, shape (number, side, side, 3), red green blue),
`labels.bin` (little-endian int64) and `store.json`. Images are stored decoded, so a rank needs no
image library and no time to decode, and it can read any sample alone (docs/adr/0015).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.recipe import Recipe, image_side
from runner.data.store import FACTS, unreadable_store
from runner.data.table import columns, reading, row_of
from runner.errors import UsageError, human_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

PIXELS, LABELS = "pixels.bin", "labels.bin"
IMAGES_AT_ONCE = 100
CHANNELS = 3
ORIENTATION = 274  # number of the EXIF tag


@dataclass(frozen=True)
class ImageFacts:
    """The content of an image store's `store.json`.

    Attributes:
        num_sequences: number of images.
        side: pixels per side of the square.
        num_classes: number of names if the dataset has them, else one more than the largest label.
        class_names: of the labels 0, 1, ...; empty: the dataset has no names.
        recipe: what was read, and how; its digest is the store's key.
        dropped: omitted rows: the image or the label is null.
    """

    num_sequences: int
    side: int
    num_classes: int
    class_names: list[str]
    recipe: dict[str, Any]
    dropped: int = 0

    @property
    def documents(self) -> str:
        """Always `alone`: images are not packed."""
        return "alone"


class Picture(NamedTuple):
    """One sample: pixels (uint8, shape (side, side, 3)) and its label."""

    pixels: NDArray[np.uint8]
    label: int


class Pictures(NamedTuple):
    """A batch: pixels (uint8, shape (number, side, side, 3)), labels (int64, shape (number,))."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


class ImageStore:
    """An open store of images."""

    def __init__(
        self, folder: Path, facts: ImageFacts, pixels: NDArray[np.uint8], labels: NDArray[np.int64]
    ) -> None:
        self.folder, self.facts, self._pixels, self._labels = folder, facts, pixels, labels

    @staticmethod
    def open(folder: Path) -> ImageStore:
        """Maps the files of a store into memory.

        Raises:
            DamageError: a file is missing or unreadable, or the files do not fit each other.
        """
        import numpy as np

        try:
            facts = ImageFacts(**json.loads((folder / FACTS).read_text()))
            shape = (facts.num_sequences, facts.side, facts.side, CHANNELS)
            pixels = np.memmap(folder / PIXELS, dtype=np.uint8, mode="r", shape=shape)
            labels = np.memmap(folder / LABELS, dtype="<i8", mode="r", shape=(facts.num_sequences,))
        except (OSError, ValueError, TypeError) as error:
            raise unreadable_store(folder, str(error)) from None
        for name, array in ((PIXELS, pixels), (LABELS, labels)):
            if (folder / name).stat().st_size != array.nbytes:
                raise unreadable_store(folder, f"{name} has the wrong size")
        return ImageStore(folder, facts, pixels, labels)

    def __len__(self) -> int:
        return self.facts.num_sequences

    def row(self, index: int) -> Picture:
        """Returns a sample by its number."""
        return Picture(self._pixels[index], int(self._labels[index]))

    def stack(self, rows: Sequence[Picture]) -> Pictures:
        """Returns samples as a batch."""
        import numpy as np

        return Pictures(
            np.stack([row.pixels for row in rows]),
            np.array([row.label for row in rows], dtype=np.int64),
        )

    def rows(self, indices: Sequence[int]) -> Pictures:
        """Returns a batch of samples by their numbers."""
        return self.stack([self.row(index) for index in indices])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Returns 1 per image: all have the same size."""
        return [1] * len(indices)


def write(recipe: Recipe, folder: Path) -> ImageFacts:
    """Decodes a split into `pixels.bin` and `labels.bin`.

    Args:
        recipe: what to read, and how.
        folder: an empty folder.

    Returns:
        The content of `store.json`, which is not written here.

    Raises:
        UsageError: a row has no image that can be decoded, or no label from 0 on; or no row is
            left.
    """
    import numpy as np

    names = class_names(recipe)
    side, number, largest, dropped = image_side(recipe.dataset, recipe.model), 0, -1, 0
    with open(folder / PIXELS, "wb") as pixels, open(folder / LABELS, "wb") as labels:
        for row, (image, label) in enumerate(_rows(recipe)):
            if image is None or label is None:
                dropped += 1
                continue
            where = row_of(recipe.split, row)
            _check_label(label, names, where)
            if number == 0 and recipe.dataset.image_size == "auto":
                side = min(side, *open_image(image, where).size)
            pixels.write(decode(image, side, where).tobytes())
            labels.write(np.array(label, dtype="<i8").tobytes())
            number, largest = number + 1, max(largest, label)
    if number == 0:
        left_out = (
            f": {human_count(dropped, 'row')} left out, without an image or a label"
            if dropped
            else ""
        )
        raise UsageError(
            f"split `{recipe.split.name}` has no rows{left_out}.",
            "Look at the columns, or choose another split.",
        )
    return ImageFacts(number, side, len(names) or largest + 1, names, recipe.to_json(), dropped)


def _check_label(label: Any, names: Sequence[str], where: str) -> None:
    if not isinstance(label, int) or label < 0 or (names and label >= len(names)):
        known = f"0 to {len(names) - 1}" if names else "0 on"
        raise UsageError(
            f"{where}: label {label}; classes count from {known}.",
            "Stage it again with null for such a label: these rows are left out.",
        )


def _rows(recipe: Recipe) -> Iterator[tuple[Any, Any]]:
    image, label = recipe.dataset.image, recipe.dataset.label
    for values in columns(recipe.split, [image, label], recipe.limit, IMAGES_AT_ONCE):
        yield from zip(values[image], values[label], strict=True)


def class_names(recipe: Recipe) -> list[str]:
    """Returns the names of the classes, from the metadata of `datasets` in the parquet file.

    Returns:
        The names; empty: the file has none.
    """
    import pyarrow.parquet as pq

    with reading(recipe.split.files[0]):
        metadata = (pq.read_schema(recipe.split.files[0]).metadata or {}).get(b"huggingface")
    try:
        names = json.loads(metadata or b"{}")["info"]["features"][recipe.dataset.label]["names"]
    except (ValueError, KeyError, TypeError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


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
