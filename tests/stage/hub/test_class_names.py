"""Class names that a card declares are those of `datasets`, and they fit the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import Result

from stage.bundle.bundle import Bundle
from stage.serve.catalogue import Catalogue
from tests.stage.hub.raw_dataset import ID, arrow, card, manifest, rows
from tests.support.servers.hubs import TestHub


def class_label(*names: str) -> dict[str, Any]:
    return {
        "dtype": {
            "class_label": {"names": {str(number): name for number, name in enumerate(names)}}
        }
    }


FEELINGS = ("negative", "positive", "no idea")
FEATURES = [
    {"name": "text", "dtype": "string"},
    {"name": "label", **class_label(*FEELINGS)},
    {"name": "feeling", **class_label(*FEELINGS)},
]
MISFITS = [
    {"name": "stars", **class_label("one", "two")},
    {"name": "share", **class_label("a", "b")},
    {"name": "gone", **class_label("a", "b")},
    {"name": "tags", "sequence": class_label("a", "b")["dtype"]},
]


@pytest.mark.parametrize("how", ["csv", "jsonl", "arrow"])
def test_class_names_of_a_card_are_what_datasets_makes_of_them(
    hub: TestHub, stage: Callable[..., Result], how: str
) -> None:
    import datasets

    table = pa.table({"text": ["a", "b", "c", "d"], "label": [1, 0, -1, None]})
    table = table.append_column("feeling", [["positive", " no idea", "0", "negative"]])
    files = {
        "csv": b"text,label,feeling\na,1,positive\nb,0, no idea\nc,-1,0\nd,,negative\n",
        "jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in table.to_pylist()),
        "arrow": arrow(table),
    }
    hub.commit(
        "datasets",
        ID,
        {"README.md": card(dataset_info={"features": FEATURES}), f"train.{how}": files[how]},
    )
    manifest()
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert (
        "raw: default: `feeling` has the class names of the card: negative, positive, no idea"
        in said
    )
    Path("repository").mkdir()
    Path("repository/README.md").write_bytes(card(dataset_info={"features": FEATURES}))
    Path("repository", f"train.{how}").write_bytes(files[how])
    theirs = datasets.load_dataset("repository", cache_dir="cache", split="train")
    ours = datasets.Dataset.from_parquet("b/data/datasets/raw/default/*.parquet", cache_dir="cache")
    assert ours.features == theirs.features and ours[:] == theirs[:]
    assert ours.features["label"].names == list(FEELINGS) and rows("train")[1]["feeling"] == 2


def test_class_names_that_rows_do_not_fit_are_reported_and_change_nothing(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    row = {"stars": 2, "share": 0.5, "tags": [1]}
    readme = card(dataset_info={"features": MISFITS})
    hub.commit("datasets", ID, {"README.md": readme, "train.jsonl": json.dumps(row).encode()})
    manifest()
    said = stage("fetch", "m.yaml", "-o", "b").output
    for column, why in {
        "stars": "it holds 2, and the 2 names are one, two",
        "share": "it is a column of double, not of whole numbers or text",
        "gone": "there is no such column",
        "tags": "they are of what is inside of a list or struct",
    }.items():
        assert f"the card's class names for `{column}` are ignored: {why}" in said
    assert rows("train") == [row]


def test_folders_name_the_classes_of_images_whatever_the_card_says(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    readme = card(dataset_info={"features": [{"name": "label", **class_label("dog", "cat")}]})
    hub.commit("datasets", ID, {"README.md": readme, "cat/1.png": b"PNG", "dog/2.png": b"PNG"})
    manifest()
    said = stage("fetch", "m.yaml", "-o", "b", "--no-offline-check").output
    assert "`label` are ignored: its folders are cat, dog, and `datasets` uses the folders" in said
    assert [row["label"] for row in rows("train")] == [0, 1]
    served = (
        Catalogue.of(Bundle.open(Path("b")))
        .repositories["datasets", ID]
        .versions[0]
        .files["README.md"]
    )
    assert b"dog" not in bytes(served.content), "a client would call the cat a dog"
