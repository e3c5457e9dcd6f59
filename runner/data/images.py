"""Images decoded once, outside the ranks: parquet -> squares of uint8 pixels in a memory-mapped store.

A folder `<key>/`: `pixels.bin` (uint8, shape (number, side, side, 3), red green blue), `labels.bin` (little-endian
int64) and `store.json`. Decoded, because a rank then needs no image library and no time for it, and any sample can be
read alone; see adr/0037.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.data.recipe import Recipe, image_side
from runner.data.store import FACTS, unreadable
from runner.data.table import columns
from runner.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

PIXELS, LABELS = "pixels.bin", "labels.bin"
IMAGES_AT_ONCE = 100
CHANNELS = 3
ORIENTATION = 274


@dataclass(frozen=True)
class ImageFacts:
    """What `store.json` says.

    Attributes:
        side: pixels of the square.
        num_classes: one more than the largest label, or the number of names if the dataset has them.
        class_names: of the labels 0, 1, ...; empty where the dataset has none.
    """

    num_sequences: int
    side: int
    num_classes: int
    class_names: list[str]
    recipe: dict[str, Any]

    @property
    def documents(self) -> str:
        """Each image is alone."""
        return "alone"


class Picture(NamedTuple):
    """One sample: uint8, shape (side, side, 3); and its label."""

    pixels: NDArray[np.uint8]
    label: int


class Pictures(NamedTuple):
    """A batch: uint8, shape (number, side, side, 3); int64, shape (number,)."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


class ImageStore:
    """An open store of images."""

    def __init__(self, folder: Path, facts: ImageFacts, pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        self.folder, self.facts, self._pixels, self._labels = folder, facts, pixels, labels

    @staticmethod
    def open(folder: Path) -> ImageStore:
        """Maps a store.

        Raises:
            DamageError: its files do not fit each other.
        """
        import numpy as np

        try:
            facts = ImageFacts(**json.loads((folder / FACTS).read_text()))
            shape = (facts.num_sequences, facts.side, facts.side, CHANNELS)
            pixels = np.memmap(folder / PIXELS, dtype=np.uint8, mode="r", shape=shape)
            labels = np.memmap(folder / LABELS, dtype="<i8", mode="r", shape=(facts.num_sequences,))
        except (OSError, ValueError, TypeError) as error:
            raise unreadable(folder, str(error)) from None
        if (folder / PIXELS).stat().st_size != pixels.nbytes or (folder / LABELS).stat().st_size != labels.nbytes:
            raise unreadable(folder, "its files have the wrong size")
        return ImageStore(folder, facts, pixels, labels)

    def __len__(self) -> int:
        return self.facts.num_sequences

    def row(self, index: int) -> Picture:
        """A sample by number."""
        return Picture(self._pixels[index], int(self._labels[index]))

    def stack(self, rows: Sequence[Picture]) -> Pictures:
        """Samples as a batch."""
        import numpy as np

        return Pictures(np.stack([row.pixels for row in rows]), np.array([row.label for row in rows], dtype=np.int64))

    def rows(self, indices: Sequence[int]) -> Pictures:
        """Samples by number."""
        return self.stack([self.row(index) for index in indices])

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """All images are as long as each other."""
        return [1] * len(indices)


def write(recipe: Recipe, folder: Path) -> ImageFacts:
    """Decodes a split into `pixels.bin` and `labels.bin`.

    Raises:
        UsageError: a row that is no image, or has no label from 0 on.
    """
    import numpy as np

    names = class_names(recipe)
    side, number, largest = image_side(recipe.dataset, recipe.model), 0, -1
    is_asked_for = recipe.dataset.image_size != "auto"
    with open(folder / PIXELS, "wb") as pixels, open(folder / LABELS, "wb") as labels:
        for image, label in _rows(recipe):
            where = f"split `{recipe.split.name}`, row {number}"
            if not isinstance(label, int) or label < 0 or (names and label >= len(names)):
                known = f"0 to {len(names) - 1}" if names else "0 on"
                raise UsageError(f"{where}: label {label}; classes count from {known}.", "Leave such rows out.")
            if number == 0 and not is_asked_for:
                side = min(side, *opened(image, where).size)
            pixels.write(decode(image, side, where).tobytes())
            labels.write(np.array(label, dtype="<i8").tobytes())
            number, largest = number + 1, max(largest, label)
    if number == 0:
        raise UsageError(f"split `{recipe.split.name}` has no rows.")
    return ImageFacts(number, side, len(names) or largest + 1, names, recipe.to_json())


def _rows(recipe: Recipe) -> Iterator[tuple[Any, Any]]:
    image, label = recipe.dataset.image, recipe.dataset.label
    for values in columns(recipe.split, [image, label], recipe.limit, IMAGES_AT_ONCE):
        yield from zip(values[image], values[label], strict=True)


def class_names(recipe: Recipe) -> list[str]:
    """Names of the classes, from the note by which `datasets` knows them; empty without one."""
    import pyarrow.parquet as pq

    note = (pq.read_schema(recipe.split.files[0]).metadata or {}).get(b"huggingface")
    try:
        names = json.loads(note or b"{}")["info"]["features"][recipe.dataset.label]["names"]
    except (ValueError, KeyError, TypeError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def opened(value: Any, where: str) -> Image.Image:
    """An image file's bytes, or {bytes, path}, as an image in red, green and blue, upright as its EXIF data say.

    Raises:
        UsageError: it is no image, lies outside of the dataset, or does not say what its white is.
    """
    from PIL import Image, UnidentifiedImageError

    data = value.get("bytes") if isinstance(value, dict) else value
    if not data:
        raise UsageError(f"{where}: the image is not in the dataset, only its name.", "Stage it with `imagefolder`.")
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _in_8_bits(_upright(image), image.format, where).convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{where}: not an image that can be decoded: {error}.", "Leave such rows out.") from None


def _upright(image: Image.Image) -> Image.Image:
    """An image turned as its EXIF data say: tag 274, Orientation (Exif 2.32, 4.6.4), as `datasets` turns it.

    Pillow's `exif_transpose` also writes the other tags anew, and fails at a photo whose tags are damaged.
    """
    from PIL.Image import Transpose

    image.load()  # by which a TIFF is turned, and says so, before it is asked
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
    }  # fmt: skip
    turn = turns.get(image.getexif().get(ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _in_8_bits(image: Image.Image, format: str | None, where: str) -> Image.Image:
    """Greyscale of more than 8 bits scaled so that white stays white; Pillow would cut it off at 255.

    Args:
        format: Pillow's name of the file format. PNG and PGM say how many bits they have, whatever the mode is called.
    """
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format in ("PNG", "PPM")):
        # The upper byte, as Pillow does with the colours of 16 bits.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        bits = "whole numbers" if image.mode == "I" else "fractions"
        raise UsageError(
            f"{where}: greyscale in {bits} of 32 bits (mode {image.mode}): which of them is white, nothing says.",
            "Convert such images to 8 or 16 bits before you stage them, or leave such rows out.",
        )
    return image


def decode(value: Any, side: int, where: str) -> NDArray[np.uint8]:
    """An image as pixels, uint8 (side, side, 3): its shorter side scaled to `side`, the middle cut out.

    Raises:
        UsageError: as for `opened`.
    """
    import numpy as np
    from PIL import Image

    image = opened(value, where)
    width, height = image.size
    if (width, height) != (side, side):
        scale = side / min(width, height)
        wide, high = max(side, round(width * scale)), max(side, round(height * scale))
        left, top = (wide - side) // 2, (high - side) // 2
        image = image.resize((wide, high), Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
    return np.asarray(image, dtype=np.uint8)
