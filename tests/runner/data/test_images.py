"""Images are decoded once; a rank augments them in the same way at each place and time."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps

from runner.config.data import DatasetConfig
from runner.data.images import decode
from runner.data.prepare import check_together, prepare
from runner.data.recipe import FORMATS, Recipe, image_side
from runner.data.store import Stores
from runner.errors import UsageError
from runner.inputs import ModelInput, SplitInput
from runner.training.components.batches import Sample, sample_rng
from runner.training.tasks.image_classification import augmented
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
    rows = store.rows([0, 1])
    assert (rows.pixels[0] == noise).all() and (rows.pixels[1] == (10, 200, 30)).all()
    assert rows.labels.tolist() == [2, 0]
    assert store.facts.class_names == ["cat", "dog", "ship", "frog"]


def test_classes_without_names_are_counted(tmp_path: Path) -> None:
    assert store_of(tmp_path, [png(16, 16)] * 2, [5, 0]).facts.class_names == [*"012345"]


@pytest.mark.parametrize("size", [(16, 16), (40, 16), (16, 33), (7, 9), (1, 300)])
def test_images_of_any_shape_become_the_square(size: tuple[int, int]) -> None:
    pixels = decode(png(*size), 16, "here")
    assert pixels.shape == (16, 16, 3) and (pixels == (10, 200, 30)).all()


def test_small_images_are_not_blown_up_in_the_store(tmp_path: Path) -> None:
    store = store_of(tmp_path, [png(9, 12), png(40, 40)], [0, 1])
    assert store.facts.side == 9
    assert (store.rows([0, 1]).pixels == (10, 200, 30)).all()


def test_grey_images_have_three_channels() -> None:
    assert (decode(png(16, 16, (77,), "L"), 16, "here") == 77).all()


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


def test_a_photo_with_damaged_exif_is_an_image_all_the_same() -> None:
    """Pillow's own transposition rewrites the tags, and fails at about one in 300 of these."""
    image, sink = Image.new("RGB", (16, 16), (10, 200, 30)), io.BytesIO()
    exif = image.getexif()
    exif[274], exif[271], exif[282] = 6, "a maker", 72.5
    good, random = exif.tobytes(), np.random.default_rng(0)
    for _ in range(300):
        damaged = np.frombuffer(good, np.uint8).copy()
        damaged[random.integers(6, len(good), 4)] = random.integers(0, 256, 4)
        sink.seek(0)
        image.save(sink, "JPEG", exif=damaged.tobytes())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about them
            assert decode(sink.getvalue(), 16, "here").shape == (16, 16, 3)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_grey_images_of_16_bits_do_not_become_white(format: str) -> None:
    sink, grey = io.BytesIO(), np.arange(256, dtype=np.uint16).reshape(16, 16) * 257
    Image.fromarray(grey).save(sink, format)
    assert (decode(sink.getvalue(), 16, "here") == np.arange(256).reshape(16, 16, 1)).all()


def test_a_store_of_another_format_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = store_of(tmp_path, [photo(6)] * 2, [0, 1]).parts[0].path
    monkeypatch.setitem(FORMATS, "images", 0)
    assert store_of(tmp_path, [photo(6)] * 2, [0, 1]).parts[0].path != current


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
    assert store.rows([0, 1]).labels.tolist() == [0, 2]
    assert "2 images of 16 x 16 pixels in 3 classes: 0, 1, 2 (" in said[0]
    assert "2 rows left out: no image or no label" in said[0]
    with pytest.raises(
        UsageError, match="has no rows: 2 rows left out, without an image or a label"
    ):
        store_of(tmp_path, [None, None], [0, 1])


def test_a_label_beyond_the_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are 2 to 2; classes count from 0 to 1"):
        store_of(tmp_path, [png(16, 16)], [2], ["cat", "dog"])


def test_a_validation_split_with_classes_of_its_own_is_refused(tmp_path: Path) -> None:
    train, validation = (
        store_of(tmp_path, [png(16, 16)] * 2, [0, label]).parts for label in (1, 4)
    )
    with pytest.raises(UsageError, match="that the training split does not have: 2, 3, 4"):
        check_together({"train": train, "validation": validation})
    check_together({"train": validation, "validation": train})


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
        made = augmented(image, sample_rng(42, Sample(index, epoch)))
        assert made.shape == image.shape and made.dtype == np.uint8
        return made.tobytes()

    assert seen(3, 1) == seen(3, 1)
    assert len({seen(index, epoch) for index in range(5) for epoch in range(4)}) > 15


def test_augmentation_moves_and_mirrors_and_does_nothing_else() -> None:
    image = np.random.default_rng(1).integers(1, 256, (16, 16, 3), dtype=np.uint8)
    mirrored = 0
    for seed in range(40):
        made = augmented(image, np.random.default_rng(seed))
        found = [
            flip
            for flip in (False, True)
            for top in range(-2, 3)
            for left in range(-2, 3)
            if _moved(image, top, left, flip=flip).tobytes() == made.tobytes()
        ]
        assert len(found) == 1
        mirrored += found[0]
    assert 8 < mirrored < 32


def _moved(image: Any, top: int, left: int, *, flip: bool) -> Any:
    result = np.zeros_like(image)
    for y in range(16):
        for x in range(16):
            if 0 <= y + top < 16 and 0 <= x + left < 16:
                result[y, x] = image[y + top, x + left]
    return result[:, ::-1] if flip else result
