"""Wheels that are built on the laptop; environments that are fetched again, or refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from stage.environment.solve.advice import Target
from stage.environment.solve.uv import build_wheel
from stage.environment.spec.conda_lock import Package
from stage.errors import IncompleteError, StageError, UsageError
from stage.progress import Reporter
from tests.support.environment.laptop import EnvironmentLaptop, sdist
from tests.support.staging import bundle_id

TARGET = Target("3.11.7", "x86_64")


def package(path: Path) -> Package:
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Package(
        name="made",
        version="1.0",
        manager="pip",
        platform="linux-64",
        url=path.as_uri(),
        sha256=sha256,
    )


def test_an_sdist_built_twice_is_the_same_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sdist(tmp_path, "py3-none-any")
    monkeypatch.chdir(tmp_path)
    with Reporter(quiet=True) as reporter:
        first, second = (
            build_wheel(Path(path.name), package(path), Path(name), TARGET, reporter)
            for name in "12"
        )
    assert first.name == "made-1.0-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("tag", "kind", "words"),
    [
        (
            "cp311-cp311-linux_x86_64",
            UsageError,
            "is compiled for this machine, not for the cluster",
        ),
        ("broken", IncompleteError, "this sdist cannot be built"),
        ("none-at-all", StageError, "made 1.0: "),
        ("two-of-them", UsageError, "gives .*made-1.0-two-of-them.whl, not one wheel"),
    ],
)
def test_an_sdist_without_a_wheel_for_any_platform_is_refused(
    tmp_path: Path, tag: str, kind: type[StageError], words: str
) -> None:
    path = sdist(tmp_path, tag)
    with Reporter(quiet=True) as reporter, pytest.raises(kind, match=words) as refused:
        build_wheel(path, package(path), tmp_path / "out", TARGET, reporter)
    assert not (tmp_path / "out").exists()
    assert (
        "Take a version that has a wheel for the cluster, or its conda package"
        in refused.value.remedy
    )


def test_fetched_again_elsewhere_every_byte_is_the_same(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
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
