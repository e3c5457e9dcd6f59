"""Folders that may not be written: the folder is named, and nobody is told to try again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stage.bundle.verify import verify
from tests.stage.bundles import make_bundle, tiny
from tests.support.rights import as_another_user


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with a bundle in it, a damage report of it, and a patch of sorts."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    bundle = make_bundle(shelf / "bundle", big=False, files=tiny()).root
    (bundle / "data/files/notes/a").write_bytes(b"x")
    (shelf / "report.json").write_text(json.dumps(verify(bundle).to_json()))
    (bundle / "data/files/notes/a").write_bytes(tiny()["data/files/notes/a"])
    (shelf / "patch").mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", shelf / "key"], check=True)
    return shelf


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("sign bundle --key key", "bundle"),
        ("apply bundle patch", "bundle"),
        ("patch bundle --report report.json -o new", ""),
        ("init a/b --endpoint http://127.0.0.1:9", ""),
    ],
    ids=["sign", "apply", "patch", "init"],
)
def test_a_folder_that_may_not_be_written_is_named(shelf: Path, command: str, folder: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in shelf.rglob("*")}
    (shelf / "bundle").chmod(0o555)
    shelf.chmod(0o555)
    done = subprocess.run(
        [*as_another_user(), sys.executable, "-m", "stage", *command.split()],
        cwd=shelf,
        capture_output=True,
        text=True,
        timeout=60,
    )
    shelf.chmod(0o755)
    named = {folder} if folder else {".", str(shelf)}
    assert done.returncode == 2, done.stderr
    assert any(done.stderr.startswith(f"error: {name}: Permission denied.") for name in named), (
        done.stderr
    )
    assert "same command again" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in shelf.rglob("*")} == before
