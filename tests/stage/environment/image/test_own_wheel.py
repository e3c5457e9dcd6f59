"""airlift travels in every environment: as a wheel of what is running, the same bytes each time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from stage import __version__
from stage.environment.image.own_wheel import airlift_wheel


def test_made_twice_it_is_the_same_bytes_and_holds_every_file_of_both_packages(
    tmp_path: Path,
) -> None:
    first, second = airlift_wheel(tmp_path / "1"), airlift_wheel(tmp_path / "2")
    assert first.read_bytes() == second.read_bytes()
    assert first.name == f"airlift_hpc-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(first) as wheel:
        inside = set(wheel.namelist())
    assert {
        "stage/cli/__init__.py",
        "runner/cli/__init__.py",
        "stage/templates/bootstrap.sh",
        "stage/templates/activate.sh",
    } <= inside
    assert not any("__pycache__" in name for name in inside)


def test_pip_installs_it_and_it_starts(tmp_path: Path) -> None:
    wheel = airlift_wheel(tmp_path)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        tmp_path / "lib",
        wheel,
    ]
    subprocess.run([*command, "--quiet"], check=True, capture_output=True)
    code = "import stage.cli; stage.cli.main(['--version'])"
    settings = {"PYTHONPATH": str(tmp_path / "lib")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"stage, version {__version__}", done.stderr
    scripts = {path.name for path in (tmp_path / "lib/bin").iterdir()}
    assert {"stage", "runner", "airlift"} <= scripts
    shutil.rmtree(tmp_path / "lib")
