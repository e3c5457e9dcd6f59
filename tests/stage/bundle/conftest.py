"""Bundles for tests that damage them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stage.bundles import make_bundle


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a large file. Treat it as read-only, as the next one."""
    return make_bundle(tmp_path_factory.mktemp("sound") / "bundle").root


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the large file: quick to copy and to read."""
    return make_bundle(tmp_path_factory.mktemp("small") / "bundle", big=False).root


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to damage, sparse as the original; removed at once, because there are hundreds."""
    root = tmp_path / "bundle"
    subprocess.run(["cp", "-r", "--sparse=always", sound, root], check=True)
    yield root
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def small_copy(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "copy"))
