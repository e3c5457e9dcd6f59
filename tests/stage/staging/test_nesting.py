"""Forbidden folders for a bundle, and names of local files: refused before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.staging import run_here


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a manifest that takes `raw`, and one that takes the whole folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("a\n")
    (tmp_path / "raw.yaml").write_text("format: 1\nname: raw\nassets:\n  r: {path: raw}\n")
    (tmp_path / "all.yaml").write_text("format: 1\nname: all\nassets:\n  a: {path: .}\n")
    return tmp_path


def test_a_bundle_inside_a_bundle_is_refused(folder: Path) -> None:
    run_here("fetch", "raw.yaml", "-o", "outer")
    done = run_here("fetch", "raw.yaml", "-o", "outer/data/in", code=2)
    assert "lies inside the bundle" in done.stderr and "-o" in done.stderr
    run_here("verify", "outer")


@pytest.mark.parametrize(
    ("manifest", "target"),
    [("all.yaml", "b"), ("raw.yaml", "raw/b"), ("raw.yaml", "raw"), ("all.yaml", "raw/b")],
)
def test_a_bundle_inside_what_it_takes_in_is_refused(
    folder: Path, manifest: str, target: str
) -> None:
    done = run_here("fetch", manifest, "-o", target, code=2)
    assert f"{manifest}:4: " in done.stderr and "is copied into the bundle" in done.stderr
    assert not (folder / target / "stage.lock").exists()
