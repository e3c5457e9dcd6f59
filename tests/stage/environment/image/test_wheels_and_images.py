"""Wheels that are built on the laptop; environments that are fetched again, or refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from stage.environment.image.own_wheel import write_wheel
from stage.environment.solve.advice import Target
from stage.environment.solve.sdists import build_wheel
from stage.environment.spec.conda_lock import EnvironmentLock, Package
from stage.errors import IncompleteError, StageError, UsageError
from stage.progress import Reporter
from stage.staging.working_folder import WORKSHOP, WorkFolder
from tests.support.environment.laptop import (
    EnvironmentLaptop,
    bootstrap,
    new_laptop,
    sdist,
    tree_of,
)
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


def test_packages_that_an_earlier_image_was_made_from_are_not_downloaded_again(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
    """The store has them, though they do not travel; what is damaged there is fetched anew."""
    store = {"AIRLIFT_STORE": str(tmp_path / "store")}
    folders = [tmp_path / "one", tmp_path / "two"]
    done = environment_laptop.stage("fetch", "small.yaml", "-o", folders[0], **store)
    assert done.returncode == 0, done.stderr
    packages = [i for i in lock_of(folders[0])["made_from"] if i["size"] >= 2**20]
    entries = [tmp_path / "store/sha256" / p["sha256"][:2] / p["sha256"] for p in packages]
    assert entries and all(entry.is_file() for entry in entries)
    would = environment_laptop.stage(
        "fetch", "small.yaml", "-o", folders[1], "--dry-run", AIRLIFT_STORE=f"{tmp_path}/store"
    )
    others = len(lock_of(folders[0])["made_from"]) - len(packages)
    assert f"would fetch {others + 1} files, " in would.stderr  # the lock too
    entries[0].chmod(0o644)
    entries[0].write_bytes(b"damaged")
    done = environment_laptop.stage("fetch", "small.yaml", "-o", folders[1], **store)
    assert done.returncode == 0, done.stderr
    assert bundle_id(folders[1]) == bundle_id(folders[0])


def lock_of(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "stage.lock").read_text())["assets"]["small-env"]
    return found


@pytest.mark.slow
def test_a_patch_with_a_changed_image_makes_the_new_environment(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
    """A package was removed: a patch carries the new files, and the cluster gets the new bundle."""
    laptop = new_laptop(tmp_path / "laptop", environment_laptop.channel)
    locked = EnvironmentLock.load(environment_laptop.asset / "conda-lock.yml")
    conda = {package.name for package in locked.of("conda")} - {"links", "greeter"}
    laptop.lock(sorted(conda), [Path(unquote(urlsplit(p.url).path)) for p in locked.of("pip")])
    for command in (
        ("fetch", "small.yaml", "-o", "bundle"),
        (
            "patch",
            "bundle",
            "--since",
            environment_laptop.bundle / "stage.lock",
            "-o",
            tmp_path / "patch",
        ),
    ):
        done = laptop.stage(*command)
        assert done.returncode == 0, done.stderr
    cluster = tmp_path / "cluster"
    shutil.copytree(environment_laptop.bundle, cluster)
    done = laptop.stage("apply", cluster, tmp_path / "patch")
    assert done.returncode == 0, done.stderr
    assert bundle_id(cluster) == bundle_id(laptop.bundle)
    carried = sum(path.stat().st_size for path in (tmp_path / "patch").rglob("*") if path.is_file())
    image = (laptop.asset / "image.tar.gz").stat().st_size
    assert image < carried < image * 1.2, "packages that were there already were carried"
    done = bootstrap(cluster / "data/envs/small-env", tmp_path / "env")
    assert done.returncode == 0, done.stderr
    assert tree_of(tmp_path / "env") == json.loads((laptop.asset / "env.json").read_text())["tree"]
    assert not (tmp_path / "env/bin/greet").exists() and (tmp_path / "env/bin/mpirun").exists()


def test_packages_that_do_not_go_together_are_refused_where_the_environment_is_made(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
    """By its own Python, from the very files that travel; `--no-offline-check` takes them."""
    laptop = new_laptop(tmp_path / "laptop", environment_laptop.channel)
    locked = EnvironmentLock.load(environment_laptop.asset / "conda-lock.yml")
    info = "deepspeed-9.0.dist-info"
    wheel = tmp_path / "deepspeed-9.0-py3-none-any.whl"
    files = {
        "deepspeed/__init__.py": b"import click, hjson\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    write_wheel(wheel, files, f"{info}/RECORD")
    wheels = [Path(unquote(urlsplit(p.url).path)) for p in locked.of("pip")]
    laptop.lock(sorted(package.name for package in locked.of("conda")), [*wheels, wheel])
    done = laptop.stage("fetch", "small.yaml", "-o", "bundle")
    assert done.returncode == 2, done.stderr
    assert "small-env: packages of this environment do not go together" in done.stderr
    assert "deepspeed needs `hjson`, which is not installed" in done.stderr
    done = laptop.stage("fetch", "small.yaml", "-o", "bundle", "--no-offline-check")
    assert done.returncode == 0, done.stderr


def test_links_left_by_an_interrupted_making_are_in_nobodys_way(tmp_path: Path) -> None:
    left = tmp_path / WORKSHOP / "small-env/made/root/lib"
    left.mkdir(parents=True)
    (tmp_path / "fetch.partial").touch()
    (left / "libmpi.so").symlink_to("libmpi.so.40")
    folder = WorkFolder.inspect(tmp_path)
    folder.remove([])
    assert [path.name for path in tmp_path.iterdir()] == ["fetch.partial"]
    (tmp_path / "data").symlink_to("elsewhere")
    with pytest.raises(UsageError, match="a link or special file inside a bundle"):
        WorkFolder.inspect(tmp_path)


def test_a_file_that_the_manifest_names_wrongly_is_told_at_its_line(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
    laptop = new_laptop(tmp_path / "laptop", environment_laptop.channel)
    manifest = laptop.folder / "small.yaml"
    manifest.write_text(manifest.read_text().replace("cluster.yml", "claster.yml"))
    done = laptop.stage("fetch", "small.yaml", "-o", "bundle", "--dry-run")
    assert (
        done.returncode,
        "small.yaml:6: `small-env`: there is no claster.yml" in done.stderr,
    ) == (2, True)


def test_without_a_profile_it_is_said_that_the_lock_may_be_stale(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
    laptop = new_laptop(tmp_path / "laptop", environment_laptop.channel)
    manifest = laptop.folder / "small.yaml"
    manifest.write_text(
        "".join(line for line in manifest.read_text().splitlines(True) if "profile" not in line)
    )
    lock = (environment_laptop.folder / "conda-lock.yml").read_text()
    made_by = "metadata:\n  custom_metadata: {made_by: stage env lock}"
    (laptop.folder / "conda-lock.yml").write_text(lock.replace("metadata:", made_by, 1))
    done = laptop.stage("fetch", "small.yaml", "-o", "bundle", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "it is not known whether it still matches environment.yml" in done.stderr


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


@pytest.mark.slow
def test_deepspeed_built_twice_is_the_same_wheel_without_torch_or_a_compiler(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    command += ["--no-binary", ":all:", "--dest", str(tmp_path), "deepspeed==0.19.8"]
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "DS_BUILD_OPS": "0"}
    )
    path = next(tmp_path.glob("deepspeed-*.tar.gz"))
    locked = replace(package(path), name="deepspeed", version="0.19.8")
    with Reporter(quiet=True) as reporter:
        first, second = (
            build_wheel(path, locked, tmp_path / name, TARGET, reporter) for name in "12"
        )
    assert first.name == "deepspeed-0.19.8-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()
