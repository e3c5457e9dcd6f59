"""Class names that a card declares: raw files keep their values, folders of images have theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from stage.bundle.bundle import Bundle
from stage.serve.catalogue import Catalogue
from tests.stage.hub.raw_dataset import ID, card, manifest, rows
from tests.support.servers.hubs import TestHub


def class_label(*names: str) -> dict[str, Any]:
    return {
        "dtype": {
            "class_label": {"names": {str(number): name for number, name in enumerate(names)}}
        }
    }


@pytest.mark.parametrize("how", ["csv", "jsonl"])
def test_class_names_of_a_card_change_no_value_and_the_fetch_says_so(
    hub: TestHub, stage: Callable[..., Result], how: str
) -> None:
    features = [
        {"name": "text", "dtype": "string"},
        {"name": "feeling", **class_label("bad", "good")},
    ]
    files = {
        "csv": b"text,feeling\na,good\n",
        "jsonl": b'{"text": "a", "feeling": "good"}\n',
    }
    readme = card(dataset_info={"features": features})
    hub.commit("datasets", ID, {"README.md": readme, f"train.{how}": files[how]})
    manifest()
    said = stage("fetch", "m.yaml", "-o", "b").output
    assert (
        "raw: default: `feeling` is as in the files: class names of the card are not used" in said
    )
    assert "`text` is as in" not in said and rows("train") == [{"text": "a", "feeling": "good"}]


def test_folders_name_the_classes_of_images_whatever_the_card_says(
    hub: TestHub, stage: Callable[..., Result]
) -> None:
    readme = card(dataset_info={"features": [{"name": "label", **class_label("dog", "cat")}]})
    hub.commit("datasets", ID, {"README.md": readme, "cat/1.png": b"PNG", "dog/2.png": b"PNG"})
    manifest()
    said = stage("fetch", "m.yaml", "-o", "b", "--no-offline-check").output
    assert "class names of the card" not in said  # `load_dataset` uses the folders too
    assert [row["label"] for row in rows("train")] == [0, 1]
    served = (
        Catalogue.of(Bundle.open(Path("b")))
        .repositories["datasets", ID]
        .versions[0]
        .files["README.md"]
    )
    assert b"dog" not in bytes(served.content), "a client would call the cat a dog"
