"""The other ways to the same packages on the cluster, and what is built on the laptop before they travel."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

import stage
from stage.environment.packages import Package
from stage.errors import IncompleteError, StageError, UsageError
from stage.progress import Reporter
from stage.sources.environment.conda import write_lookalike
from stage.sources.environment.sdists import build_wheel
from tests.support.environments import EnvironmentLaptop, run
from tests.support.staging import bundle_id

BACKEND = """
import os, time, zipfile

def build_wheel(folder, settings=None, metadata=None):
    if "{tag}" == "broken":
        raise SystemExit("this sdist cannot be built")
    name = "made-1.0-{tag}.whl"
    date = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))[:6]
    files = {{
        "made.py": repr(sorted({{"a", "b", "c", "d"}}, key=hash)),
        "made-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: made\\nVersion: 1.0\\n",
        "made-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {tag}\\n",
    }}
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(zipfile.ZipInfo(path, date), text)
        wheel.writestr(zipfile.ZipInfo("made-1.0.dist-info/RECORD", date), "".join(f"{{p}},,\\n" for p in files))
    return name
"""


def sdist(folder: Path, tag: str) -> Path:
    """A source distribution whose build needs nothing, and gives a wheel of the given tag."""
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "made"\nversion = "1.0"\n',
        "backend.py": BACKEND.format(tag=tag),
        "PKG-INFO": "Metadata-Version: 2.1\nName: made\nVersion: 1.0\n",
    }
    path = folder / "made-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"made-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def package(path: Path) -> Package:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package(
        name="made", version="1.0", manager="pip", url=path.as_uri(), sha256=sha256, path=f"sdists/{path.name}"
    )


def test_an_sdist_built_twice_is_the_same_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sdist(tmp_path, "py3-none-any")
    monkeypatch.chdir(tmp_path)
    with Reporter(quiet=True) as reporter:
        first, second = (build_wheel(Path(path.name), package(path), Path(name), reporter) for name in "12")
    assert first.name == "made-1.0-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("tag", "kind", "words"),
    [
        ("cp311-cp311-linux_x86_64", UsageError, "is compiled for this machine, not for the cluster"),
        ("broken", IncompleteError, "this sdist cannot be built"),
    ],
)
def test_an_sdist_without_a_wheel_for_any_platform_is_refused(
    tmp_path: Path, tag: str, kind: type[StageError], words: str
) -> None:
    path = sdist(tmp_path, tag)
    with Reporter(quiet=True) as reporter, pytest.raises(kind, match=words):
        build_wheel(path, package(path), tmp_path / "out", reporter)
    assert not (tmp_path / "out").exists()


def test_fetched_again_elsewhere_every_byte_is_the_same(environment_laptop: EnvironmentLaptop, tmp_path: Path) -> None:
    done = environment_laptop.stage("fetch", "small.yaml", "--locked", "-o", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert bundle_id(tmp_path / "again") == bundle_id(environment_laptop.bundle)


def test_a_lock_that_changed_is_not_taken_unasked(environment_laptop: EnvironmentLaptop) -> None:
    lock = environment_laptop.folder / "conda-lock.yml"
    before = lock.read_bytes()
    lock.write_bytes(before + b"# \n")
    try:
        done = environment_laptop.stage("fetch", "small.yaml", "-o", "bundle")
    finally:
        lock.write_bytes(before)
    assert done.returncode == 2
    assert "conda-lock.yml changed since small.lock was written" in done.stderr
    assert "--update small-env" in done.stderr


def test_by_conda_from_the_channels_in_the_asset(environment_laptop: EnvironmentLaptop, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    lookalike = write_lookalike(tmp_path)
    conda = tmp_path / "bin/conda"
    conda.write_text(f'#!/bin/sh\nPYTHONPATH={Path(stage.__file__).parents[1]} exec {lookalike} "$@"\n')
    conda.chmod(0o755)
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    prefix = tmp_path / "env"
    done = environment_laptop.stage("env", "create", "bundle", "small-env", prefix, "--route", "conda", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "no tree digest is promised" in done.stdout
    assert run(prefix, "greet") == "hello from the environment 1.1"
    assert run(prefix, "stage", "--version").startswith("stage, version")
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "env", lookalike.name}


def test_a_venv_on_a_python_of_the_cluster(environment_laptop: EnvironmentLaptop, tmp_path: Path) -> None:
    path = f"{Path(os.path.realpath(sys.executable)).parent}:/usr/bin:/bin"
    prefix = tmp_path / "env"
    done = environment_laptop.stage("env", "create", "bundle", "small-env", prefix, "--route", "venv", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "conda packages are not in it" in done.stdout
    assert "what conda would have brought is lacking:" in done.stdout
    assert run(prefix, "python", "-c", "import click; print(click.__file__)").startswith(str(prefix))
    assert [path.name for path in tmp_path.iterdir()] == ["env"]


@pytest.mark.parametrize(("route", "words"), [("conda", "or conda is on PATH"), ("venv", "is on PATH, and the wheels")])
def test_a_route_without_its_tool_says_what_to_load(
    environment_laptop: EnvironmentLaptop, tmp_path: Path, route: str, words: str
) -> None:
    prefix = tmp_path / "env"
    done = environment_laptop.stage("env", "create", "bundle", "small-env", prefix, "--route", route, PATH="/nowhere")
    assert done.returncode == 2
    assert words in done.stderr
    assert "--route image" in done.stderr
