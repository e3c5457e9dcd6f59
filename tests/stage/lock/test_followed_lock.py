"""A complete lock is followed as it is; what a fetch learnt is kept.

By `path:` alone: no Hub is needed. What a Hub's files do is in the last test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stage.bundle.bundle import Bundle
from stage.bundle.verify import verify
from stage.lock.read import read_lock
from stage.lock.write import Lockfile
from tests.support.staging import run_here

MANIFEST = "format: 1\nname: made\nassets:\n  plain: {path: plain.bin}\n"


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text(MANIFEST)
    (tmp_path / "plain.bin").write_bytes(bytes(1000))
    return tmp_path


def fetch(*options: str, code: int = 0) -> str:
    return run_here(
        "fetch", "m.yaml", "-o", "bundle", "--no-offline-check", *options, code=code
    ).output


def lock() -> Lockfile:
    return read_lock(Path("m.lock").read_bytes(), "m.lock")


@pytest.mark.parametrize("options", [(), ("--locked",)])
def test_a_complete_lock_is_followed_to_its_id(laptop: Path, options: tuple[str, ...]) -> None:
    run_here("lock", "m.yaml")
    text = Path("m.lock").read_bytes()
    fetch(*options)
    assert Path("m.lock").read_bytes() == Path("bundle/stage.lock").read_bytes() == text
    assert Bundle.open("bundle").id == lock().id and verify(Path("bundle")).ok
    assert "nothing to do" in fetch(*options)
    run_here("lock", "m.yaml")
    assert Path("m.lock").read_bytes() == text
