"""Obstacles are reported before anything is unpacked; no incomplete environment is created."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from stage.environment.check.node import create
from stage.errors import StageError, UsageError
from stage.files import sha256_of_bytes
from stage.lock.model import LockedFile
from stage.staging.sources.local import bring_local
from tests.support.environment.laptop import EnvironmentLaptop, alone, bootstrap

SHELLS = ["dash", "bash", *(["busybox sh"] if shutil.which("busybox") else [])]


# What a killed run left, with most of the files that the disk has room for.
LEFTOVER = (
    'mkdir -p "$1"/env.part.999999999/.airlift && cd "$1"/env.part.999999999 && '
    "uname -n >.airlift/owner && seq 4500 | xargs touch && cd /"
)


def on_a_disk(asset: Path, options: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `bootstrap.sh` for a prefix on a disk of its own, mounted with the given options."""
    script = (
        f'mount -t tmpfs -o {options} none "$1" && {after or ":"} && '
        'sh "$0"/bootstrap.sh "$1"/env; code=$?; '
        'echo "left: $(ls -A "$1")"; exit $code'
    )
    place = asset.parents[3] / f"disk-{os.getpid()}"
    place.mkdir()
    try:
        command = [*alone("m"), "sh", "-c", script, str(asset), str(place)]
        return subprocess.run(command, capture_output=True, text=True)
    finally:
        place.rmdir()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_prefix_that_cannot_be_is_refused(
    environment_laptop: EnvironmentLaptop, tmp_path: Path, shell: str
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    longest = 200 - len(str(tmp_path)) - 1
    for prefix, words in {
        "there": "exists",
        "link": "exists",
        "no/such/folder": "is not a folder",
        "link/folder": "is not a folder",
        "x" * (longest + 1): "is 201 bytes long; the environment's programs have room for 200",
        "ü" * (longest // 2 + 1): "have room for 200",
        "with space": "has ' ' in it",
        "with'quote": "has ''' in it",
        "..": "names no new folder",
    }.items():
        done = bootstrap(environment_laptop.asset, f"{tmp_path}/{prefix}", shell=shell)
        assert (done.returncode, done.stdout) == (2, ""), (prefix, done.stderr)
        assert words in done.stderr
        assert "\n  -> " in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


@pytest.mark.parametrize(
    ("options", "after", "words"),
    [
        ("size=20m", "", "MiB are needed in"),
        ("size=500m,nr_inodes=1000", "", "files are needed in"),
        ("size=500m", 'mount -o remount,ro "$1"', "cannot be written by you"),
        ("size=500m,noexec", "", "cannot be run (mounted noexec). Nothing was unpacked"),
        (
            "size=500m,nr_inodes=5000,noexec",
            LEFTOVER,
            "cannot be run (mounted noexec). Nothing was unpacked",
        ),
    ],
)
def test_a_disk_that_will_not_do_is_named_and_left_empty(
    environment_laptop: EnvironmentLaptop, options: str, after: str, words: str
) -> None:
    done = on_a_disk(environment_laptop.asset, options, after)
    assert words in done.stderr
    assert done.returncode == (2 if "cannot be written" in words else 1 if "noexec" in words else 5)
    assert done.stdout.endswith("left: \n")


def tampered(bundle: Path, copy: Path, path: Path, dice: random.Random) -> None:
    """A copy of a bundle in which one byte of one file is another."""
    shutil.copytree(bundle, copy, copy_function=os.link)
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= dice.randrange(1, 256)
    target = copy / path.relative_to(bundle)
    target.unlink()
    target.write_bytes(content)


@pytest.mark.parametrize("seed", range(2))
def test_a_random_byte_of_the_image_is_refused_by_name(
    environment_laptop: EnvironmentLaptop, tmp_path: Path, seed: int
) -> None:
    image = environment_laptop.asset / "image.tar.gz"
    tampered(environment_laptop.bundle, tmp_path / "bundle", image, random.Random(seed))
    (tmp_path / "cluster").mkdir()
    with pytest.raises(StageError, match=r"image\.tar\.gz is damaged: it is not the") as refused:
        create(tmp_path / "bundle", "small-env", tmp_path / "cluster/env")
    assert refused.value.exit_code == 1 and "stage verify" in refused.value.remedy
    done = bootstrap(tmp_path / "bundle/data/envs/small-env", tmp_path / "cluster/env")
    assert done.returncode == 1
    assert "image.tar.gz is damaged" in done.stderr
    assert list((tmp_path / "cluster").iterdir()) == []


@pytest.mark.parametrize(
    ("now", "words"), [(b"another", "changed since it was locked"), (None, "gone since")]
)
def test_a_file_of_this_machine_that_is_not_the_one_locked_is_not_brought(
    tmp_path: Path, now: bytes | None, words: str
) -> None:
    source, target = tmp_path / "a-1.0-py3-none-any.whl", tmp_path / "bundle" / "wheels" / "a"
    if now is not None:
        source.write_bytes(now)
    locked = LockedFile(
        "data/envs/e/wheels/a", 7, sha256_of_bytes(b"a wheel"), None, source.as_uri()
    )
    with pytest.raises(UsageError, match=words) as told:
        bring_local(source, locked, target, lambda _: None, "lock it again")
    assert told.value.remedy == "lock it again" and not target.exists()
    source.write_bytes(b"a wheel")
    assert bring_local(source, locked, target, lambda _: None, "").sha256 == locked.sha256
    assert target.read_bytes() == b"a wheel"


def test_a_script_that_is_not_the_one_fetched_is_not_run(
    environment_laptop: EnvironmentLaptop, tmp_path: Path
) -> None:
    script = environment_laptop.asset / "bootstrap.sh"
    tampered(environment_laptop.bundle, tmp_path / "bundle", script, random.Random(0))
    with pytest.raises(StageError, match="is not the file that was fetched"):
        create(tmp_path / "bundle", "small-env", tmp_path / "env")
    assert not (tmp_path / "env").exists()
