"""A run imports nothing from PYTHONPATH, `~/.local` or the current folder; a user's script does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runner.isolation import isolate
from tests.runner.conftest import Cluster
from tests.runner.exec.test_exec import BIN, node

__all__ = ["node"]

LIAR = (
    "import os\nos.close(os.open({mark!r}, os.O_CREAT))\nraise ImportError('a liar was imported')\n"
)
STOLEN = (
    "torch",
    "transformers",
    "numpy",
    "random",
    "struct",
    "copy",
    "tempfile",
    "multiprocessing",
    "json",
    "http",
)


def plant(folder: Path) -> Path:
    """Writes modules that many programs import; returns the file that their import creates."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder.parent / f"{folder.name}-spoke"
    for name in STOLEN:
        (folder / f"{name}.py").write_text(LIAR.format(mark=str(mark)))
    for name in ("runner", "stage"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(LIAR.format(mark=str(mark)))
    return mark


def test_a_run_trains_with_its_own_packages_whatever_is_around(cluster: Cluster) -> None:
    cluster.write(steps=2)
    mark = plant(cluster.folder)
    done = subprocess.run(
        [BIN / "runner", "train", "tiny.yaml", "--processes", "1", "--bundle", cluster.bundle],
        cwd=cluster.folder,
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not mark.exists() and (cluster.output() / "model").is_dir()


NOT, USER, ONLY = (
    "not imported from: ",
    " (pip install --user)",
    ", because the packages in it are needed",
)
EXEC = "; `runner exec` keeps it for your own scripts"


@pytest.mark.parametrize(
    ("has", "named", "path", "kept", "said"),
    [
        (
            {"stale": "torch", "user": "torch", "own": "torch"},
            ["", "stale", "stale"],
            ["own"],
            [],
            [f"{NOT}{{}}/stale (PYTHONPATH){EXEC}", f"{NOT}{{}}/user{USER}"],
        ),
        # A site with torch in PYTHONPATH.
        (
            {"stale": "torch"},
            ["stale"],
            ["stale", "own"],
            ["stale"],
            [f"imported from: {{}}/stale (PYTHONPATH){ONLY}", f"{NOT}{{}}/user{USER}"],
        ),
        # A laptop with everything installed by `--user`.
        (
            {"user": "torch"},
            ["stale"],
            ["user", "own"],
            [],
            [f"{NOT}{{}}/stale (PYTHONPATH){EXEC}", f"imported from: {{}}/user{ONLY}"],
        ),
        # EasyBuild before 5 has a folder for each: without numpy torch is no use.
        (
            {"stale": "numpy", "site": "torch"},
            ["stale", "site"],
            ["stale", "site", "own"],
            ["stale", "site"],
            [f"imported from: {{}}/stale, {{}}/site (PYTHONPATH){ONLY}", f"{NOT}{{}}/user{USER}"],
        ),
    ],
    ids=["all have it", "only PYTHONPATH", "only the user's", "each module in its own folder"],
)  # fmt: skip
def test_only_what_is_nowhere_else_is_imported_from_elsewhere_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: dict[str, str], named: list[str],
    path: list[str], kept: list[str], said: list[str],
) -> None:  # fmt: skip
    def at(names: list[str]) -> list[str]:
        return [str(tmp_path / name) if name else "" for name in names]

    for name in ("stale", "site", "user", "own"):
        (tmp_path / name).mkdir()
    for name, module in has.items():
        (tmp_path / name / f"{module}.py").touch()
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path / "user"))
    environ, lines = {"PYTHONPATH": os.pathsep.join(at(named)), "PYTHONOPTIMIZE": ""}, list[str]()
    found = at([*dict.fromkeys(filter(None, named)), "user", "own"])
    isolate(environ, lines.append, found)
    assert lines == [line.format(*[tmp_path] * 2) for line in said]
    isolate(environ, lines.append, found)
    assert found == at(path) and not [line for line in lines[len(said) :] if NOT in line]
    ours = {"PYTHONPATH": os.pathsep.join(at(kept))} if kept else {}
    ours |= {} if "user" in path else {"PYTHONNOUSERSITE": "1"}
    assert environ == {"PYTHONSAFEPATH": "1", **ours}
