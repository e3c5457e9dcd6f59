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


def found_in(*folders: Path) -> list[str]:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return [str(folder) for folder in folders]


def test_pythonpath_and_the_users_own_packages_are_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, user, own = found_in(tmp_path / "stale", tmp_path / "user", tmp_path / "own")
    for folder in (stale, user, own):
        (Path(folder) / "torch.py").touch()
    monkeypatch.setattr("site.getusersitepackages", lambda: user)
    environ, path, said = {"PYTHONPATH": f":{stale}:{stale}"}, [stale, user, own], list[str]()
    isolate(environ, said.append, path)
    assert path == [own] and "PYTHONPATH" not in environ and environ["PYTHONNOUSERSITE"] == "1"
    assert len(said) == 2 and stale in said[0] and user in said[1]
    isolate(environ, said.append, path)
    assert len(said) == 2, "said twice"


@pytest.mark.parametrize("only", ["stale", "user"])
def test_what_is_nowhere_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: str
) -> None:
    """A site with torch in PYTHONPATH; a laptop with everything installed by `--user`."""
    stale, user, own = found_in(tmp_path / "stale", tmp_path / "user", tmp_path / "own")
    (tmp_path / only / "torch.py").touch()
    monkeypatch.setattr("site.getusersitepackages", lambda: user)
    environ, path, said = {"PYTHONPATH": stale}, [stale, user, own], list[str]()
    isolate(environ, said.append, path)
    assert path == [str(tmp_path / only), own]
    assert (environ.get("PYTHONPATH") == stale) == (only == "stale")
    assert ("PYTHONNOUSERSITE" in environ) == (only == "stale")
    assert any("because the packages in it are needed" in line for line in said)


def test_where_each_module_has_a_folder_of_its_own_all_of_pythonpath_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EasyBuild before 5 puts torch and numpy into two folders: without numpy torch is no use."""
    torch, numpy, own = found_in(tmp_path / "torch", tmp_path / "numpy", tmp_path / "own")
    (Path(torch) / "torch.py").touch()
    (Path(numpy) / "numpy.py").touch()
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path / "user"))
    text = os.pathsep.join((numpy, torch))
    environ, path, said = {"PYTHONPATH": text}, [numpy, torch, own], list[str]()
    isolate(environ, said.append, path)
    assert path == [numpy, torch, own] and environ["PYTHONPATH"] == text
    assert len(said) == 1 and f"imported from: {numpy}, {torch} (PYTHONPATH)" in said[0]
