"""The wheel and the sdist: built, installed in a clean environment, and used there."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from stage.version import __version__
from tests.support.light import make_requirements
from tests.support.servers.hubs import TestHub
from tests.support.staging import MANIFEST, Laptop

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "https://host.example/acme/airlift"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = ["scripts/package", "--url", f"{ADDRESS}.git"]
    done = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"airlift_hpc-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, and the packages that pyproject.toml declares."""
    folder = tmp_path_factory.mktemp("clean") / "environment"
    make_requirements(folder)
    install = [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--offline", "-q"]
    subprocess.run([*install, "--python", folder / "bin/python", wheel], check=True)
    return folder / "bin"


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    with ExitStack() as stack:
        hub = TestHub(tmp_path_factory.mktemp("hub"), stack)
        made = Laptop(tmp_path_factory.mktemp("laptop"), hub)
        made.publish(100_000)
        made.write(MANIFEST)
        yield made


def run(laptop: Laptop, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=laptop.folder, env=laptop.environment(), capture_output=True, text=True
    )


def test_the_wheel_fetches_from_a_hub_and_verifies(installed: Path, laptop: Laptop) -> None:
    fetched = run(
        laptop, installed / "stage", "fetch", "tiny.yaml", "-o", "bundle", "--no-offline-check"
    )
    assert fetched.returncode == 0, fetched.stderr
    verified = run(laptop, installed / "stage", "verify", "bundle")
    assert verified.returncode == 0 and "sound" in verified.stdout, verified.stderr
    by_the_other_name = run(laptop, installed / "airlift", "stage", "show", "bundle")
    assert by_the_other_name.stdout == run(laptop, installed / "stage", "show", "bundle").stdout


def test_the_wheel_holds_both_packages_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"airlift_hpc-{__version__}.dist-info"
    tracked = subprocess.check_output(["git", "ls-files", "stage", "runner"], cwd=ROOT, text=True)
    wanted = {path for path in tracked.splitlines() if (ROOT / path).is_file()}
    assert wanted - names == set()
    assert f"{info}/licenses/LICENSE" in names
    assert {name.split("/")[0] for name in names} == {"stage", "runner", info}


def test_the_sdist_holds_what_the_wheel_was_built_from(built: Path) -> None:
    with tarfile.open(built / f"airlift_hpc-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "stage/cli/__init__.py"} <= names


@pytest.mark.parametrize("name", ["stage", "runner"])
def test_windows_is_sent_to_its_linux(name: str) -> None:
    code = f"import os, {name}.__main__ as program; os.name = 'nt'; program.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "wsl --install" in done.stderr
