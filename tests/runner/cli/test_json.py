"""What `--json` prints: one document, with the keys that docs/reference/exit-codes.md names."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import runner.cli
import stage.cli
from tests.runner.conftest import RUN
from tests.runner.folders import run_folder

PAGE = Path(__file__).parents[3] / "docs/reference/exit-codes.md"


def documented(command: str) -> tuple[set[str], set[str]]:
    """The keys of a command's document: those that are always there, and the others."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text("utf-8").splitlines()]
    (row,) = (row for row in rows if row and row[0].strip() == f"`{command}`")
    always, sometimes = (set(re.findall("`([^`]+)`", cell)) for cell in row[2:])
    return always, sometimes


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("stage verify bundle", 0),
        ("stage verify damaged", 1),
        ("stage verify nowhere", 2),
        ("stage show bundle", 0),
        ("stage show nowhere", 2),
        ("runner check run.yaml", 0),
        ("runner check wrong.yaml", 2),
        ("runner status output/made", 0),
        ("runner status", 0),
        ("runner status nowhere", 2),
    ],
)
def test_json_is_one_document_with_the_documented_keys(
    command: str, code: int, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "bundle").symlink_to(bundle)
    if "damaged" in command:
        shutil.copytree(bundle, tmp_path / "damaged")
        (tmp_path / "damaged/data/files/notes/notes.txt").write_text("other bytes")
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in RUN.items())
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "wrong.yaml").write_text(f"{text}epoch: 3\n")
    run_folder(tmp_path / "output" / "made")
    program, name, *rest = command.split()
    main = {"stage": stage.cli.main, "runner": runner.cli.main}[program]
    done = CliRunner().invoke(main, [name, *rest, "--json"])
    assert done.exit_code == code, done.output
    document = json.loads(done.stdout)
    if code == 2 and name != "check":
        assert set(document) == {"format", "exit_code", "error"}
        assert document["exit_code"] == code and set(document["error"]) == {"message", "remedy"}
        return
    always, sometimes = documented(f"{program} {name}")
    for found in document["runs"] if command == "runner status" else [document]:
        assert always <= set(found) <= always | sometimes
    assert document.get("exit_code", code) == code
