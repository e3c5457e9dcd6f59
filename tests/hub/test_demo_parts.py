"""The files that scripts/demo serves, and its effect on its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.lib.demo.demo import MARKER, DemoError, prepare_folder


def test_a_folder_that_is_not_a_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    thesis = tmp_path / "cluster" / "thesis.tex"
    thesis.write_text("years of work")
    with pytest.raises(DemoError, match="left alone"):
        prepare_folder(tmp_path)
    assert thesis.read_text() == "years of work"
    with pytest.raises(DemoError, match="is a file"):
        prepare_folder(thesis)


def test_an_earlier_demo_is_emptied_and_nothing_beside_it(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "out")
    (tmp_path / "out" / "laptop" / "old").write_text("x")
    (tmp_path / "out" / "notes").write_text("mine")
    prepare_folder(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        MARKER,
        "notes",
        "hub",
        "laptop",
        "cluster",
    }
    assert list((tmp_path / "out" / "laptop").iterdir()) == []
