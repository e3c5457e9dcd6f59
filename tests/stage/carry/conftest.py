"""What tests of `stage push` and `stage patch` share: bundles, and a login node behind sshd."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stage.bundle.conftest import copy as copy
from tests.stage.bundle.conftest import sound as sound
from tests.stage.bundles import make_bundle
from tests.stage.carry.patching import new_version
from tests.support.servers.sshd import Sshd, link_programs
from tests.support.servers.sshd import sshd as sshd

CONFIG = "data/models/bert/config.json"
WEIGHTS = "data/models/bert/model.safetensors"
TAGS = "tagmanifest-sha256.txt"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "laptop").mkdir()
    return make_bundle(tmp_path / "laptop" / "bundle", big=False).root


@pytest.fixture
def big_bundle(tmp_path: Path) -> Path:
    """With a file of 65 MiB."""
    (tmp_path / "big").mkdir()
    return make_bundle(tmp_path / "big" / "bundle").root


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The /usr/bin of a login node; each test chooses its programs."""
    names = "sh bash ls cut mkdir rm find tail rsync cat sleep true"
    return link_programs(tmp_path_factory.mktemp("programs"), names)


@pytest.fixture
def tools(programs: Path) -> Iterator[Path]:
    """The remote programs for verifying; each test begins with `stage` and sha256sum."""
    stage = programs / "stage"
    ours = shlex.quote(str(Path(__file__).parents[3]))
    stage.write_text(f'#!/bin/sh\nPYTHONPATH={ours} exec {sys.executable} -m stage "$@"\n')
    stage.chmod(0o755)
    (programs / "sha256sum").symlink_to(shutil.which("sha256sum") or "")
    yield programs
    for name in ("stage", "sha256sum", "python3"):
        (programs / name).unlink(missing_ok=True)


def push(
    sshd: Sshd, bundle: Path, folder: Path | str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Pushes as a user does."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "stage",
            "push",
            bundle,
            f"{sshd.host}:{folder}",
            "--ssh",
            sshd.ssh,
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


def flip(file: Path, at: int = 3) -> None:
    """One bit, with size and time as they were."""
    status = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def push_here(bundle: Path, there: Path | str, *options: str) -> subprocess.CompletedProcess[str]:
    """To a folder on this machine."""
    command = [sys.executable, "-m", "stage", "push", bundle, there, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="session")
def new(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_version(sound, tmp_path_factory.mktemp("new") / "bundle")
