"""A lock of format 1 keeps its bundle id. A new lock has format 2, whose id covers more.

By `path:` alone: no Hub is needed. What a Hub's large file does is in the last test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.lib.hub.loopback_hub import LoopbackHub
from stage.bundle.bundle import Bundle
from stage.lock.read import read_lock
from stage.lock.write import Lockfile
from stage.util.digests import sha256_of_bytes
from stage.verify.verify import verify
from tests.stage.locks import in_format_1
from tests.support.staging import run_here

LARGE = 65 * 2**20  # bytes; above 64 MiB
BIN = "data/files/large/large.bin"
MANIFEST = "format: 1\nname: made\nassets:\n  large: {path: large.bin}\n"


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text(MANIFEST)
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(LARGE)
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def fetch(*options: str, code: int = 0) -> str:
    return run_here(
        "fetch", "m.yaml", "-o", "bundle", "--no-offline-check", *options, code=code
    ).output


def lock() -> Lockfile:
    return read_lock(Path("m.lock").read_bytes(), "m.lock")


@pytest.fixture
def first(laptop: Path) -> Lockfile:
    """The complete lock of format 1 that an earlier version wrote."""
    run_here("lock", "m.yaml")
    old = in_format_1(lock())
    assert old.is_complete
    Path("m.lock").write_bytes(old.to_json())
    return old


def test_what_is_new_gets_format_2_and_its_id_covers_the_block_list(laptop: Path) -> None:
    fetch()
    entry = next(file for file in lock().files if file.path == BIN)
    assert lock().format == 2 and lock().is_complete
    assert Path("bundle/stage.lock").read_bytes() == Path("m.lock").read_bytes()
    blocks = Path("bundle/blocks", str(entry.sha256)).read_bytes()
    assert entry.blocks == sha256_of_bytes(blocks)


@pytest.mark.parametrize("options", [(), ("--locked",)])
def test_a_complete_lock_of_format_1_is_followed_to_its_id(
    first: Lockfile, options: tuple[str, ...]
) -> None:
    text = Path("m.lock").read_bytes()
    assert "format 2" not in fetch(*options)
    assert Path("m.lock").read_bytes() == Path("bundle/stage.lock").read_bytes() == text
    assert Bundle.open("bundle").id == first.id and verify(Path("bundle")).ok
    assert "nothing to do" in fetch(*options)
    run_here("lock", "m.yaml")
    assert Path("m.lock").read_bytes() == text


def test_an_update_writes_format_2_and_fetches_nothing_again(first: Lockfile) -> None:
    fetch()
    said = fetch("--update")
    assert "was of format 1, becomes format 2" in said and "0 bytes fetched" in said.replace(
        "0 B ", "0 bytes "
    )
    assert (
        lock().format == 2
        and lock().is_complete
        and Bundle.open("bundle").id == lock().id != first.id
    )
    assert verify(Path("bundle"), bundle_id=lock().id).ok


def test_a_new_asset_makes_it_format_2_and_keeps_the_pins_of_the_others(first: Lockfile) -> None:
    fetch()
    Path("notes.txt").write_text("a note\n")
    Path("m.yaml").write_text(MANIFEST + "  notes: {path: notes.txt}\n")
    assert "--locked" in fetch("--locked", code=2)
    assert "becomes format 2" in fetch()
    assert lock().format == 2 and lock().is_complete
    assert lock().assets["large"].files[0].sha256 == first.assets["large"].files[0].sha256
    assert verify(Path("bundle"), bundle_id=lock().id).ok


def test_a_lock_of_format_1_that_no_bundle_was_made_of_becomes_format_2(laptop: Path) -> None:
    Path("m.yaml").write_text(MANIFEST + "  bert: {model: acme/bert}\n")
    with LoopbackHub(laptop / "hub") as hub:
        hub.repositories.commit(
            "models", "acme/bert", {"config.json": b"{}", "model.safetensors": b"1"}
        )
        run_here("lock", "m.yaml", "--endpoint", hub.endpoint)
        old = in_format_1(lock())
        assert not old.is_complete, "nobody publishes the sha256 of config.json"
        Path("m.lock").write_bytes(old.to_json())
        fetch("--locked", "--endpoint", hub.endpoint)
    assert lock().format == 2 and lock().is_complete and verify(Path("bundle")).ok


def test_a_lock_whose_block_list_is_a_lie_makes_no_bundle(laptop: Path) -> None:
    run_here("lock", "m.yaml")
    document = json.loads(Path("m.lock").read_bytes())
    document["assets"]["large"]["files"][0]["blocks"] = "ab" * 32
    Path("m.lock").write_text(json.dumps(document))
    said = fetch(code=1)
    assert "the lock's `blocks` is not the digest of its block list" in said
    assert not Path("bundle/tagmanifest-sha256.txt").exists()
    assert json.loads(Path("m.lock").read_bytes()) == document


def test_of_a_hubs_large_file_the_lock_learns_the_block_list_from_the_download(
    laptop: Path,
) -> None:
    """`stage lock` knows size and sha256; `stage fetch` adds the digest of the block list."""
    Path("m.yaml").write_text("format: 1\nname: made\nassets:\n  bert: {model: acme/bert}\n")
    with LoopbackHub(laptop / "hub") as hub:
        weights = laptop / "large.bin"
        hub.repositories.commit(
            "models", "acme/bert", {"config.json": b"{}", "model.safetensors": weights}
        )
        run_here("lock", "m.yaml", "--endpoint", hub.endpoint)
        entry = next(file for file in lock().files if file.has_blocks)
        assert entry.sha256 is not None and entry.blocks is None and not lock().is_complete
        assert '"blocks": null' in Path("m.lock").read_text()
        fetch("--endpoint", hub.endpoint)
        complete = lock()
        assert complete.is_complete and Bundle.open("bundle").id == complete.id
        shutil.rmtree("bundle")
        fetch("--locked", "--endpoint", hub.endpoint)
        assert Bundle.open("bundle").id == complete.id
        fetch("--update", "--endpoint", hub.endpoint)
        assert lock() == complete, "the very same, resolved again, keeps what was learnt"
