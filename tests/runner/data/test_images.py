"""Images are decoded once; a rank augments them in the same way at each place and time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps

from runner.config.data import DatasetConfig
from runner.data.prepare import prepare
from runner.data.recipe import Recipe
from runner.data.store import Stores
from runner.from_stage import UsageError
from runner.inputs import ModelInput, SplitInput
from runner.tasks.image_classification import Pictures, augmented, decode, image_side
from runner.training.components.batches import SamplePlace, sample_rng
from tests.runner.data.test_prepare import digest

MODEL = ModelInput(
    asset="vit", path=Path("vit"), source="", commit=None, digests={}, settings={"image_size": 16}
)


def png(
    width: int, height: int, colour: tuple[int, ...] = (10, 200, 30), mode: str = "RGB"
) -> bytes:
    sink = io.BytesIO()
    Image.new(mode, (width, height), colour if mode == "RGB" else colour[0]).save(sink, "PNG")
    return sink.getvalue()


def store_of(
    folder: Path,
    images: list[Any],
    labels: list[Any],
    names: list[str] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Stores:
    import pyarrow.parquet as pq

    table = pa.table({"image": images, "label": pa.array(labels, pa.int64())})
    if names:
        note = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(note)})
    path = folder / f"{len(list(folder.iterdir()))}.parquet"
    pq.write_table(table, path)
    split = SplitInput("train", (path,), (digest(path),), len(labels), {})
    recipe = Recipe(
        "image-classification", 1, split, DatasetConfig(asset="a"), None, MODEL, "alone"
    )
    return Stores([prepare(recipe, folder / "stores", say)])


def test_pixels_are_those_of_the_image_and_labels_have_names(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    sink = io.BytesIO()
    Image.fromarray(noise).save(sink, "PNG")
    images = [{"bytes": sink.getvalue(), "path": "a.png"}, {"bytes": png(16, 16), "path": None}]
    store = store_of(tmp_path, images, [2, 0], ["cat", "dog", "ship", "frog"])
    rows = store.rows([0, 1], Pictures.of)
    assert (rows.pixels[0] == noise).all() and (rows.pixels[1] == (10, 200, 30)).all()
    assert rows.labels.tolist() == [2, 0]
    assert store.facts.class_names == ["cat", "dog", "ship", "frog"]


def photo(orientation: int, format: str = "JPEG") -> bytes:
    """Bright above and dark below as the sensor has it, and a tag that says how it was held."""
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    pixels[:8], pixels[:8, :8] = 120, 240
    sink, image = io.BytesIO(), Image.fromarray(pixels)
    exif = image.getexif()
    exif[274] = orientation
    image.save(sink, format, exif=exif, **({"quality": 100} if format == "JPEG" else {}))
    return sink.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
def test_photos_are_not_learned_sideways(format: str) -> None:
    """As `datasets` and transformers turn them, with every orientation there is."""
    seen = set()
    for orientation in range(1, 9):
        data = photo(orientation, format)
        expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        assert (decode(data, 16, "here") == expected).all(), orientation
        seen.add(expected.tobytes())
    assert len(seen) == 8


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_grey_images_of_16_bits_do_not_become_white(format: str) -> None:
    sink, grey = io.BytesIO(), np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    Image.fromarray(grey).save(sink, format)
    assert (decode(sink.getvalue(), 16, "here") == np.arange(256).reshape(16, 16, 1)).all()


def grey_tiff(kind: type[np.generic]) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.ones((16, 16), dtype=kind)).save(sink, "TIFF")
    return sink.getvalue()


BAD: dict[str, tuple[Any, Any, str]] = {
    "no image": (b"not an image", 0, "row 1: not an image that can be decoded"),
    "cut in the middle": (png(64, 64)[:60], 0, "row 1: not an image"),
    "a name instead of an image": (
        {"bytes": None, "path": "/data/cat.png"},
        0,
        "row 1: the image is not in the data",
    ),
    "grey without a white": (
        grey_tiff(np.int32),
        0,
        "row 1: greyscale in whole numbers of 32 bits .mode I.: the value of white",
    ),
    "grey in fractions": (
        grey_tiff(np.float32),
        0,
        "row 1: greyscale in fractions of 32 bits .mode F.: the value of white",
    ),
    "a hidden label": (png(16, 16), -1, "the labels in `label` are -1 to 1; classes count from 0"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, bad: str) -> None:
    image, label, words = BAD[bad]
    good = {"bytes": png(16, 16), "path": None} if isinstance(image, dict) else png(16, 16)
    with pytest.raises(UsageError, match=words):
        store_of(tmp_path, [good, image], [1, label])
    assert not list((tmp_path / "stores").iterdir())


def test_rows_without_an_image_or_a_label_are_left_out_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    images, labels = [png(16, 16), None, png(16, 16), png(16, 16)], [0, 1, None, 2]
    store = store_of(tmp_path, images, labels, say=said.append)
    assert store.rows([0, 1], Pictures.of).labels.tolist() == [0, 2]
    assert "2 images of 16 x 16 pixels in 3 classes: 0, 1, 2 (" in said[0]
    assert "2 rows left out: no image or no label" in said[0]
    with pytest.raises(
        UsageError, match="has no rows: 2 rows left out, without an image or a label"
    ):
        store_of(tmp_path, [None, None], [0, 1])


@pytest.mark.parametrize(
    ("settings", "preprocessing", "wanted", "side"),
    [
        ({"image_size": 32}, {"size": {"height": 64}}, "auto", 32),
        ({"image_size": [48, 48]}, {}, "auto", 48),
        ({}, {"size": {"shortest_edge": 64}}, "auto", 64),
        (
            {},
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}},
            "auto",
            224,
        ),
        ({}, {"size": 96}, "auto", 96),
        ({}, {}, "auto", 224),
        ({"image_size": 32}, {}, 64, 64),
    ],
)
def test_the_square_is_what_the_model_takes(
    settings: Any, preprocessing: Any, wanted: Any, side: int
) -> None:
    model = ModelInput("vit", Path("vit"), "", None, {}, settings, preprocessing)
    assert image_side(DatasetConfig(asset="a", image_size=wanted), model) == side


def test_augmentation_belongs_to_the_sample() -> None:
    image = np.random.default_rng(0).integers(1, 256, (32, 32, 3), dtype=np.uint8)

    def seen(index: int, epoch: int) -> bytes:
        made = augmented(image, sample_rng(42, SamplePlace(index, epoch)))
        assert made.shape == image.shape and made.dtype == np.uint8
        return made.tobytes()

    assert seen(3, 1) == seen(3, 1)
    assert len({seen(index, epoch) for index in range(5) for epoch in range(4)}) > 15


@pytest.mark.parametrize("size", [(16, 16), (40, 16), (16, 33), (7, 9), (1, 300)])
def test_images_of_any_shape_become_the_square(size: tuple[int, int]) -> None:
    pixels = decode(png(*size), 16, "here")
    assert pixels.shape == (16, 16, 3) and (pixels == (10, 200, 30)).all()
