"""From `stage verify` to the verdict a reader opens at most six files."""

from __future__ import annotations

import ast
from pathlib import Path

import stage
from stage.bundle import verifier

ROOT = Path(stage.__file__).parent
MOST = 6


def imports(file: Path) -> set[Path]:
    """The files of `stage` that a file imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stage"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [node.module or "", *names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.startswith("stage.")]
        else:
            continue
        for module in modules:
            path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
            found |= {path} if path.is_file() else set()
    return found


def test_the_verdict_is_six_files_away_at_most() -> None:
    """The command's own two files, and all that is imported on the way to the verdict."""
    to_read = [ROOT / "bundle" / "verify.py"]
    read = {ROOT / "cli" / "verify.py", ROOT / "bundle" / "shown.py"}
    while to_read:
        file = to_read.pop()
        read.add(file)
        to_read += imports(file) - read
    assert Path(verifier.__file__) in read and len(read) <= MOST, sorted(read)


def test_the_verifier_imports_nothing_of_stage() -> None:
    assert imports(Path(verifier.__file__)) == set()
