"""What is refused or said before a download: files that patterns omit, and files too large."""

from __future__ import annotations

import pytest

from stage.lock.model import NOT_INCLUDED, LeftOut, LockedAsset, LockedFile, Source
from stage.staging.resolve import Omitted, omitted_files

SENTENCES = (
    "config.json modules.json 1_Pooling/config.json tokenizer.json vocab.txt "
    "onnx/config.json onnx/vocab.txt"
)


def model(key: str, taken: str, left: str) -> LockedAsset:
    return LockedAsset(
        name="m",
        kind="model",
        request={"model": "a/b", key: ["*.safetensors"]},
        source=Source("hub", "a/b"),
        files=tuple(
            LockedFile(f"data/models/m/{path}", 1, None, None, path) for path in taken.split()
        ),
        left_out=tuple(LeftOut(path, 1, NOT_INCLUDED) for path in left.split()),
    )


@pytest.mark.parametrize(
    ("key", "taken", "left", "needed", "notes"),
    [
        ("revision", "model.safetensors", SENTENCES, (), ()),
        ("exclude", "model.safetensors", SENTENCES, ("config.json",), ()),
        (
            "include",
            "model.safetensors",
            SENTENCES,
            ("config.json",),
            ("its tokenizer (tokenizer.json, vocab.txt)",),
        ),
        ("include", "model.safetensors config.json", "modules.json 2_Dense/config.json", (), ()),
        ("include", "model.safetensors vocab.txt", "tokenizer.json", (), ()),
        (
            "include",
            "2_Dense/model.safetensors config.json",
            "modules.json 2_Dense/config.json 2_Dense/vocab.txt 3_Dense/vocab.txt",
            ("2_Dense/config.json",),
            ("its tokenizer (2_Dense/vocab.txt)",),
        ),
        (
            "include",
            "vae/model.safetensors",
            "model_index.json vae/config.json unet/config.json tokenizer/vocab.json",
            ("vae/config.json",),
            ("its tokenizer (tokenizer/vocab.json)",),
        ),
        (
            "include",
            "config.json",
            "model.safetensors model.bf16.safetensors model-2.safetensors x/model.safetensors",
            (),
            (
                "its weights (model-2.safetensors, model.safetensors): "
                "without them it can only be trained from scratch",
            ),
        ),
        (
            "include",
            "x/model-00001-of-00002.safetensors x/config.json",
            "x/model-00002-of-00002.safetensors x/model.safetensors.index.json "
            "model-00002-of-00002.safetensors",
            ("x/model.safetensors.index.json", "x/model-00002-of-00002.safetensors"),
            (),
        ),
    ],
)
def test_the_config_left_out_is_reported_whatever_else_the_repository_has(
    key: str, taken: str, left: str, needed: tuple[str, ...], notes: tuple[str, ...]
) -> None:
    assert omitted_files(model(key, taken, left)) == Omitted(needed, notes)
