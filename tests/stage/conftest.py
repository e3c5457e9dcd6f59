"""How tests run `stage`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import Result

from tests.support.servers.hubs import TestHub
from tests.support.staging import run_here


@pytest.fixture
def stage(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `stage` against the Hub in a folder of its own. Fails on any traceback."""
    (tmp_path / "laptop").mkdir()
    monkeypatch.chdir(tmp_path / "laptop")
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    return run_here


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual attempts with short pauses, unless the server asks for one (`test_retry.py`)."""
    from stage.download.retry import RetryPolicy
    from stage.staging.sources import source as sources  # the tests of the core have no urllib3

    monkeypatch.setattr(sources, "RetryPolicy", partial(RetryPolicy, first_s=0.02))
