"""Files that patterns leave out are judged by the folder of the weights."""

from __future__ import annotations

import pytest

from stage.fetch.prechecks import Omitted, omitted_files
from stage.lock.model import NOT_INCLUDED, LeftOut, LockedAsset, LockedFile, Source
from stage.lock.write import Lockfile
from stage.verify.load_test import LoadReport, _way_out
from stage.verify.report import Finding

SENTENCES = (
    "config.json modules.json 1_Pooling/config.json tokenizer.json vocab.txt "
    "onnx/config.json onnx/vocab.txt"
)


def model(taken: str, left: str) -> LockedAsset:
    return LockedAsset(
        name="m",
        kind="model",
        request={"model": "a/b", "include": ["*.safetensors"]},
        source=Source("hub", "a/b"),
        files=tuple(
            LockedFile(f"data/models/m/{path}", 1, None, None, path) for path in taken.split()
        ),
        left_out=tuple(LeftOut(path, 1, NOT_INCLUDED) for path in left.split()),
    )


@pytest.mark.parametrize(
    ("taken", "left", "needed"),
    [
        ("model.safetensors", SENTENCES, ["config.json"]),
        ("model.safetensors config.json", "modules.json 2_Dense/config.json", []),
        (
            "2_Dense/model.safetensors config.json",
            "modules.json 2_Dense/config.json",
            ["2_Dense/config.json"],
        ),
        (
            "vae/model.safetensors",
            "model_index.json vae/config.json unet/config.json",
            ["vae/config.json"],
        ),
        (
            "x/model-00001-of-00002.safetensors x/config.json",
            "x/model-00002-of-00002.safetensors x/model.safetensors.index.json "
            "model-00002-of-00002.safetensors",
            ["x/model.safetensors.index.json", "x/model-00002-of-00002.safetensors"],
        ),
    ],
)
def test_the_config_left_out_is_reported_whatever_else_the_repository_has(
    taken: str, left: str, needed: list[str]
) -> None:
    assert list(omitted_files(model(taken, left)).needed) == needed


def test_a_tokenizer_left_out_is_reported_in_a_repository_of_modules_too() -> None:
    assert omitted_files(model("model.safetensors", SENTENCES)).notes == (
        "its tokenizer (tokenizer.json, vocab.txt)",
    )
    pipeline = omitted_files(model("unet/config.json", "model_index.json tokenizer/vocab.json"))
    assert pipeline == Omitted((), ("its tokenizer (tokenizer/vocab.json)",))


PATHS = ("data/models/m/model.safetensors", "data/datasets/d/c/train.parquet")


def test_another_revision_is_no_remedy_for_a_file_left_out() -> None:
    lock = Lockfile("x", {"m": model("model.safetensors", SENTENCES)})
    finding = Finding(
        "data/models/m/config.json", "unloadable", "a config beside the weights", "nothing"
    )
    assert (
        _way_out(lock, LoadReport((finding,), ()))
        == 'Add to `include` (or remove from `exclude`): "config.json".'
    )
    advice = {
        path: _way_out(lock, LoadReport((Finding(path, "unloadable", "a", "b"),), ()))
        for path in PATHS
    }
    assert all("another revision" in said for said in advice.values())
    assert ["`exclude`" in said for said in advice.values()] == [True, False], (
        "advice for an entry that takes none"
    )
