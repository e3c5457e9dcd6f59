"""What tests of `url:` sources share: a web server on loopback, and `stage` in a folder."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support.servers.web import Web, serve
from tests.support.staging import run_here

DATA = bytes(range(256)) * 12_000  # 3 MB


@pytest.fixture
def web() -> Iterator[Web]:
    with serve() as started:
        yield started


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `stage` in a folder of its own; no traceback whatever happens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "2")
    return run_here


def manifest(**asset: Any) -> None:
    Path("m.yaml").write_text(json.dumps({"format": 1, "name": "m", "assets": {"x": asset}}))


def archive(files: dict[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w:gz") as opened:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            opened.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
