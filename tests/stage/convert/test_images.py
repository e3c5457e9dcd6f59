"""Folders of images and CIFAR batches become parquet that `datasets` decodes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stage.convert.convert import convert
from stage.errors import DamageError
from stage.hub.layout import splits_of_names


def picture(color: int) -> bytes:
    from PIL import Image

    sink = io.BytesIO()
    Image.new("RGB", (3, 2), (color, 2, 3)).save(sink, "PNG")
    return sink.getvalue()


IMAGE_FOLDERS: dict[str, dict[str, bytes]] = {
    "labels": {
        "train/dog/2.png": picture(1),
        "train/cat/1.png": picture(2),
        "test/cat/3.png": picture(3),
    },
    "one folder": {"pictures/1.png": picture(1), "pictures/2.png": picture(2)},
    "at the top": {"1.png": picture(1), "2.PNG": picture(2)},
    "folders of several depths": {
        "a/1.png": picture(1),
        "b/c/2.png": picture(2),
        "3.png": picture(3),
    },
    "metadata.csv": {
        "metadata.csv": b"caption,file_name,n\nzwei,a/2.png,2\neins,1.png,1\n",
        "1.png": picture(1),
        "a/2.png": picture(2),
        "not-named.png": picture(9),
    },
    "metadata.jsonl in every split": {
        "train/metadata.jsonl": b'{"file_name": "1.png", "boxes": [[1, 2]]}\n'
        b'{"file_name": "2.png", "boxes": []}\n',
        "train/1.png": picture(1),
        "train/2.png": picture(2),
        "test/metadata.jsonl": b'{"file_name": "3.png", "boxes": [[3, 4]]}\n',
        "test/3.png": picture(3),
    },
}


@pytest.mark.parametrize("name", IMAGE_FOLDERS)
def test_a_folder_of_images_is_what_it_is_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The same rows, columns and features as `load_dataset` makes of the folder itself."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "in"
    for path, data in IMAGE_FOLDERS[name].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    files = {path: folder / path for path in IMAGE_FOLDERS[name]}
    made = convert("imagefolder", files, splits_of_names, tmp_path / "out")
    expected = datasets.load_dataset(str(folder))
    assert set(made) == set(expected)
    for split, part in made.items():
        ours = datasets.Dataset.from_parquet(
            [str(s) for s in part.shards], cache_dir=str(tmp_path / "own")
        )
        assert str(ours.features) == str(expected[split].features).replace(
            "large_string", "string"
        )  # pandas' word
        assert sorted(map(str, _pixels(ours))) == sorted(map(str, _pixels(expected[split])))


def _pixels(rows: Any) -> list[dict[str, Any]]:
    """Rows with the pixels of each image, without its path."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.tobytes() if hasattr(value, "tobytes") else value

    return [{name: plain(value) for name, value in row.items()} for row in rows]


def cifar(protocol: int = 2, rows: int = 6) -> dict[str, bytes]:
    """A small CIFAR-10, in the layout of its python version."""
    noise = np.random.default_rng(1)
    folder = "cifar-10-batches-py"
    files = {
        f"{folder}/batches.meta": {
            b"label_names": [b"airplane", b"automobile", b"bird"],
            b"num_vis": 3072,
        }
    }
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        data = noise.integers(0, 256, (rows, 3072), dtype=np.uint8)
        labels = [int(x) for x in noise.integers(0, 3, rows)]
        names = [f"{name}_{i}.png".encode() for i in range(rows)]
        files[f"{folder}/{name}"] = {
            b"data": data,
            b"labels": labels,
            b"filenames": names,
            b"batch_label": b"x",
        }
    return {path: pickle.dumps(value, protocol) for path, value in files.items()} | {
        f"{folder}/readme.html": b"hi"
    }


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_cifar_pixels_and_labels(
    converted: Callable[..., dict[str, pa.Table]], protocol: int
) -> None:
    from PIL import Image

    files = cifar(protocol)
    tables = converted("cifar", files)
    assert {split: table.num_rows for split, table in tables.items()} == {"train": 30, "test": 6}
    batch = pickle.loads(files["cifar-10-batches-py/data_batch_2"])
    row = tables["train"].slice(6 + 3, 1).to_pylist()[0]
    pixels = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
    assert np.array_equal(pixels, batch[b"data"][3].reshape(3, 32, 32).transpose(1, 2, 0))
    assert row["label"] == batch[b"labels"][3] and row["image"]["path"] == "data_batch_2_3.png"


def test_cifar_100_has_a_fine_and_a_coarse_label(
    converted: Callable[..., dict[str, pa.Table]],
) -> None:
    batch = pickle.dumps(
        {
            b"data": np.zeros((2, 3072), np.uint8),
            b"fine_labels": [1, 0],
            b"coarse_labels": [0, 2],
            b"filenames": [b"a.png"],
        },
        2,
    )
    meta = {b"fine_label_names": [b"apple", "bear"], b"coarse_label_names": [b"x", b"y", b"z"]}
    tables = converted("cifar", {"c/train": batch, "c/test": batch, "c/meta": pickle.dumps(meta)})
    assert [
        (row["fine_label"], row["coarse_label"], row["image"]["path"])
        for split in ("train", "test")
        for row in tables[split].to_pylist()
    ] == [(1, 0, "a.png"), (0, 2, None)] * 2


BATCH, META = "data_batch_2", "batches.meta"
ODD: dict[str, tuple[str, dict[bytes, Any], str]] = {
    "fewer labels than rows": (BATCH, {b"labels": [0, 1]}, "not a list of 6 labels"),
    "a label without a name": (BATCH, {b"labels": [0, 1, 2, 0, 1, 3]}, "labels from 0 to 2"),
    "a label below 0": (BATCH, {b"labels": [0, 1, 2, 0, 1, -1]}, "labels from 0 to 2"),
    "true for a label": (BATCH, {b"labels": [0, 1, 2, 0, 1, True]}, "labels from 0 to 2"),
    "rows of another size": (BATCH, {b"data": np.zeros((6, 3071), np.uint8)}, "rows of 3072 bytes"),
    "no rows": (BATCH, {b"data": None}, "rows of 3072 bytes"),
    "labels that are no list": (BATCH, {b"labels": 7}, "not a list of 6 labels"),
    "no names": (META, {b"label_names": None}, "no list of names under label_names"),
    "names that are numbers": (META, {b"label_names": [b"a", 7]}, "no list of names"),
}


@pytest.mark.parametrize("name", ODD)
def test_labels_and_pixels_that_do_not_fit_are_refused_by_the_batch(
    converted: Callable[..., dict[str, pa.Table]], name: str
) -> None:
    files, (file, change, words) = cifar(), ODD[name]
    path = f"cifar-10-batches-py/{file}"
    files[path] = pickle.dumps({**pickle.loads(files[path]), **change}, 2)
    with pytest.raises(DamageError, match=f"{file}.*{words}"):
        converted("cifar", files)
