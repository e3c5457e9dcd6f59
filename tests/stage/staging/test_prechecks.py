"""What is refused or said before a download: files that patterns omit, and files too large."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from stage.lock.model import NOT_INCLUDED, LeftOut, LockedAsset, LockedFile, Source
from stage.staging.prechecks import Omitted, omitted_files
from tests.support.servers.hubs import TestHub
from tests.support.staging import safetensors

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


def test_a_file_too_large_for_http_is_refused_with_the_lines_that_bring_it(
    hub: TestHub, stage: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage.staging.prechecks.HTTP_LIMIT", 1_000_000)
    weights = safetensors(1_000_001)
    files = {"config.json": b'{"model_type": "bert"}', "model.safetensors": weights}
    commit = hub.commit("models", "acme/large", files)
    hub.commit("datasets", "acme/rows", {"train.csv": b"a\n" + b"1\n" * 600_000})
    entries = {"large": {"model": "acme/large"}, "rows": {"dataset": "acme/rows"}}
    Path("m.yaml").write_text(json.dumps({"format": 1, "name": "m", "assets": entries}))
    said = stage("fetch", "m.yaml", "-o", "b", code=2).output
    assert "`large`: acme/large has files above 1 MB" in said and "model.safetensors (1" in said
    assert f"hf download acme/large --revision {commit} --local-dir large-files" in said
    assert "hf download --repo-type dataset acme/rows" in said and not Path("b/data").exists()
    assert "large: {path: large-files}" in said
    Path("large-files").mkdir()
    for name, content in files.items():
        Path("large-files", name).write_bytes(content)
    Path("m.yaml").write_text("format: 1\nassets:\n  large: {path: large-files}\n")
    stage("fetch", "m.yaml", "-o", "b")
    assert Path("b/data/files/large/model.safetensors").read_bytes() == weights
