"""Files that are missing, cut off, closed, or not what their name says: A, R and O of the list."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.first_job.harness import (
    Change,
    Found,
    Said,
    as_nobody,
    assert_found,
    assert_silent,
    bundle_of_variants,
    check,
    edit,
    fetch,
    remove,
    run_stage,
    write_run,
)
from tests.stage.staging.test_load_test import shard, sound
from tests.support.servers.hubs import STRANGER_TOKEN, TestHub

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n"
GPT2 = {"task": "causal-lm", "model": {"asset": "gpt2"}}
AN_INDEX = {"weight_map": {"h.0.attn.c_attn.weight": "model-00002-of-00002.safetensors"}}


def text(name: str, content: str) -> Change:
    """Writes a file of a folder."""
    return lambda folder: (folder / name).write_text(content)


# ---- a folder beside the manifest, as somebody cloned or copied it

IN_A_FOLDER: dict[str, tuple[Change, Found]] = {
    "A1": (text("model.safetensors", POINTER), Found(("is a Git LFS pointer",), "lfs pull")),
    "A2": (
        lambda folder: os.truncate(folder / "model.safetensors", 9000),
        Found(("model.safetensors", "a safetensors file"), "Correct the file at its source", 1),
    ),
    "A3": (text("pytorch_model.bin", POINTER), Found(("is a Git LFS pointer",), "lfs pull")),
}


@pytest.mark.parametrize("entry", IN_A_FOLDER)
def test_a_faulty_folder_does_not_leave_the_laptop(
    bundle: Path, tmp_path: Path, entry: str
) -> None:
    change, found = IN_A_FOLDER[entry]
    shutil.copytree(bundle / "data/models/tiny-gpt2", tmp_path / "model")
    change(tmp_path / "model")
    assert_found(fetch(tmp_path, {"gpt2": {"path": "./model"}}), found)


# ---- a Hub

CODE = {
    "config.json": b'{"model_type": "mine", "auto_map": {"AutoModel": "acme/code--mine.Model"}}',
    "model.safetensors": shard("a"),
}
LLAVA = {
    "config.json": b'{"model_type": "bert", "mm_vision_tower": "acme/clip-large"}',
    "model.safetensors": shard("a"),
}
THIRTY = {"weight_map": {f"w{n}": f"model-{n:05d}-of-00030.safetensors" for n in range(1, 31)}}
# entry -> files of the repository, keys of the manifest, options, what `fetch` must say
ON_A_HUB: dict[str, tuple[dict[str, bytes], dict[str, Any], tuple[str, ...], Found]] = {
    "A5": (
        sound(),
        {"exclude": ["model-00002-of-00002.safetensors"]},
        (),
        Found(("1 of 2 weight files are missing",), "If a pattern of `exclude` takes it"),
    ),
    "A6": (
        {**sound(), "model.safetensors.index.json": json.dumps(THIRTY).encode()},
        {},
        ("--offline-check",),
        Found(("an index of the shards here", "model-00003-of-00030"), "another revision", 1),
    ),
    "A8": (
        sound(),
        {"exclude": ["*.index.json"]},
        (),
        Found(("its weights will not load",), '"model.safetensors.index.json"'),
    ),
    "A9": (
        {"config.json": b'{"model_type": "bert"}', "pytorch_model.bin": b"pickle" * 100},
        {},
        (),
        Found(("pytorch_model.bin",), "--allow-pickle", 3),
    ),
    "O3": (LLAVA, {}, (), Found(("mm_vision_tower: acme/clip-large", "manifest"), "", 0)),
    "O4": (CODE, {}, (), Found(("code",), "allow_code: true", 3)),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHub]:
    """A Hub on loopback."""
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        hub.commit("models", "acme/code", {"mine.py": b"class Model: pass\n"})
        yield hub


def fetched(folder: Path, hub: TestHub, asset: dict[str, Any], *options: str, **more: str) -> Said:
    (folder / "tiny.yaml").write_text(
        json.dumps({"format": 1, "name": "tiny", "assets": {"m": asset}})
    )
    command = ("fetch", "tiny.yaml", "-o", "bundle", "--endpoint", hub.endpoint, *options)
    return run_stage(folder, *command, HF_HUB_DOWNLOAD_TIMEOUT="2", **more)


@pytest.mark.parametrize("entry", ON_A_HUB)
def test_a_faulty_repository_does_not_leave_the_laptop(
    hub: TestHub, tmp_path: Path, entry: str
) -> None:
    files, keys, options, found = ON_A_HUB[entry]
    hub.commit("models", f"acme/{entry.lower()}", files)
    said = fetched(tmp_path, hub, {"model": f"acme/{entry.lower()}", **keys}, *options)
    assert_found(said, found)


GATED = {"R1": ("", "HF_TOKEN"), "R2": (STRANGER_TOKEN, "https://huggingface.co/acme/gated")}


@pytest.mark.parametrize("entry", GATED)
def test_a_gated_model_is_told_before_a_download(hub: TestHub, tmp_path: Path, entry: str) -> None:
    token, remedy = GATED[entry]
    hub.commit("models", "acme/gated", sound())
    hub.configure("models", "acme/gated", gated="manual", members=("tester",))
    variables = {"HF_TOKEN": token} if token else {}
    said = fetched(tmp_path, hub, {"model": "acme/gated"}, **variables)
    assert_found(said, Found(("gated",), remedy))


# ---- the bundle after its journey

GONE: dict[str, tuple[str, Found]] = {
    "A5": ("model.safetensors", Found(("model.safetensors (missing)",), "stage verify", 1)),
    "A2": ("model.safetensors", Found(("model.safetensors (mismatched)",), "stage verify", 1)),
}


@pytest.mark.parametrize("entry", GONE)
def test_what_a_copy_lost_is_found_on_the_login_node(
    bundle: Path, tmp_path: Path, entry: str
) -> None:
    name, found = GONE[entry]
    shutil.copytree(bundle, tmp_path / "carried")
    path = tmp_path / "carried/data/models/tiny-bert" / name
    if entry == "A5":
        path.unlink()
    else:
        os.truncate(path, 1000)
    run: dict[str, Any] = {"dataset": {"asset": "reference"}}
    assert_found(check(tmp_path, tmp_path / "carried", **run), found)
    said = run_stage(tmp_path, "verify", "carried")
    assert said.code == 1 and name in said.out + said.err


VARIANTS: dict[str, tuple[Change, Found]] = {
    "A4": (remove("*.safetensors"), Found(("has no weights in this bundle",), "stage the weights")),
    "A7": (
        text("model.safetensors.index.json", json.dumps(AN_INDEX)),
        Found(("names model-00002-of-00002.safetensors, which is not here",), "the whole model"),
    ),
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Path:
    """A bundle with a faulty model for each entry, and a sound `gpt2`."""
    gpt2 = bundle / "data/models/tiny-gpt2"
    sources = {entry.lower(): (gpt2, change) for entry, (change, _) in VARIANTS.items()}
    sources["gpt2"] = (gpt2, edit("config.json", lambda _: None))
    return bundle_of_variants(tmp_path_factory.mktemp("variants"), sources)


@pytest.mark.parametrize("entry", VARIANTS)
def test_a_model_without_its_weights_is_found_on_the_login_node(
    variants: Path, tmp_path: Path, entry: str
) -> None:
    run = GPT2 | {"model": {"asset": entry.lower()}}
    assert_found(check(tmp_path, variants, **run), VARIANTS[entry][1])


# ---- rights


@pytest.fixture
def shared(variants: Path) -> Iterator[Path]:
    """A folder that every user can enter, with a bundle that nobody but root can write."""
    folder = Path(tempfile.mkdtemp(prefix="airlift-test-"))
    shutil.copytree(variants, folder / "bundle")
    for path in (folder, folder / "bundle", *(folder / "bundle").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (folder / "mine").mkdir()
    (folder / "mine").chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def checked_as_nobody(shared: Path, output: str) -> Said:
    write_run(shared / "mine", **GPT2)
    command = ("check", "tiny.yaml", "--bundle", "../bundle", "--processes", "2")
    return as_nobody(shared / "mine", *command, "--output", output)


def test_a_bundle_that_you_may_only_read_is_enough(shared: Path) -> None:
    (shared / "bundle/.locks").mkdir(mode=0o700)
    shutil.rmtree(shared / "bundle/.locks")
    assert_silent(checked_as_nobody(shared, "out"))
