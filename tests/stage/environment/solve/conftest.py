"""What tests of `stage env lock` share: a laptop with an environment file and two indexes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from scripts.lib.conda.channel import index as index_channel
from stage.environment.image.image import own_requirements
from stage.environment.spec.conda_lock import EnvironmentLock, Package
from tests.support.environment.channel import conda_channel
from tests.support.environment.laptop import environment_laptop
from tests.support.environment.pypi import Index, serve_index, wheel
from tests.support.staging import run_as

__all__ = ["conda_channel", "environment_laptop"]

A800 = 'format: 1\nname: a800\nplatform: linux-64\nglibc: "2.28"\n'
A800 += 'cuda: "12.2"\ncompute_capability: "8.0"\n'
ENVIRONMENT = """\
name: train
channels: [{channel}]
dependencies:
  - python=3.11
  - greeter
  - cudatoolkit
  - pip:
    - --index-url {index}
    - tool
"""


ARGUMENTS = ("env", "lock", "environment.yml", "--profile", "a800.yml")
COMMAND = (sys.executable, "-m", "stage", *ARGUMENTS)


@dataclass
class Desk:
    """A folder with `environment.yml` and `a800.yml`, a channel of its own and an index.

    Attributes:
        conda: the conda half of each lock from here on, for tests of the pip half: conda-lock takes
            two seconds to solve the same again. None: it is solved.
    """

    folder: Path
    channel: Path
    index: Index
    conda: tuple[Package, ...] | None = None

    @property
    def lock_path(self) -> Path:
        return self.folder / "conda-lock.yml"

    @property
    def lock(self) -> EnvironmentLock:
        return EnvironmentLock.load(self.lock_path)

    @property
    def versions(self) -> dict[str, str]:
        return {p.name: p.version for p in self.lock.packages}

    def write(self, *more: str, conda: tuple[str, ...] = ()) -> None:
        text = ENVIRONMENT.format(channel=self.channel.as_uri(), index=self.index.url)
        text += "".join(f"    - {line}\n" for line in more)
        text = text.replace("  - pip:\n", "".join(f"  - {spec}\n" for spec in conda) + "  - pip:\n")
        (self.folder / "environment.yml").write_text(text)

    def environment(self, **more: str) -> dict[str, str]:
        """A user's environment without any conda in it."""
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        home = {"HOME": str(self.folder), "UV_INDEX": "", "PIP_CONFIG_FILE": "/dev/null"}
        return {**kept, **home, "PATH": "/usr/bin:/bin", **more}

    def run(self, *options: object, **environment: str) -> subprocess.CompletedProcess[str]:
        if self.conda is not None:
            with mock.patch("stage.environment.solve.lock.lock_conda", return_value=self.conda):
                words = [*ARGUMENTS, *map(str, options)]
                return run_as(words, self.folder, self.environment(**environment))
        return subprocess.run(
            [*COMMAND, *map(str, options)], cwd=self.folder, env=self.environment(**environment),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def locked(self, *options: object, **environment: str) -> str:
        """Locks, which must succeed; what it said."""
        done = self.run(*options, **environment)
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout

    def refused(self, code: int, *options: object) -> str:
        """Locks, which must fail with `code`, in words, leaving the lock as it was; the words."""
        before = self.lock_path.read_bytes() if self.lock_path.exists() else None
        done = self.run(*options)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert (self.lock_path.read_bytes() if self.lock_path.exists() else None) == before
        return done.stderr


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory, conda_channel: Path) -> Iterator[Desk]:
    """Locked once for the whole file; `desk` is a copy to do things to."""
    folder = tmp_path_factory.mktemp("first")
    with serve_index() as index:
        index.add_stand_ins(own_requirements())
        index.add(wheel("tool", "1.0", requires=["greeter>=1", "lib"]), wheel("lib", "1.0"))
        channel = folder.with_name("channel-of-env-lock")
        shutil.copytree(conda_channel, channel)
        desk = Desk(folder, channel, index)
        desk.write()
        (folder / "a800.yml").write_text(A800)
        desk.locked()
        yield desk


@pytest.fixture
def pip_desk(desk: Desk) -> Desk:
    """A desk for tests of the pip half."""
    desk.conda = tuple(desk.lock.of("conda"))
    return desk


@pytest.fixture
def desk(first: Desk, tmp_path: Path) -> Iterator[Desk]:
    shutil.copytree(first.folder, tmp_path / "desk")
    files = dict(first.index.files)
    yield Desk(tmp_path / "desk", first.channel, first.index)
    first.index.files, first.index.password = files, None
    for newer in first.channel.glob("noarch/greeter-1.2-*"):
        newer.unlink()
        index_channel(first.channel)
