"""What once broke a parser does not again. scripts/fuzz searches for more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stage.fuzzing import CORPUS, PARSERS, survives

FILES = [(target, path.name) for target in PARSERS for path in sorted((CORPUS / target).iterdir())]


@pytest.mark.parametrize(("target", "name"), FILES, ids=lambda part: part)
def test_what_once_broke_a_parser_does_not_again(target: str, name: str, tmp_path: Path) -> None:
    survives(target, (CORPUS / target / name).read_bytes(), tmp_path)
