"""Properties are checked the same way on a busy machine as on an idle one: no deadline. `stage` as a test runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import HealthCheck, settings

from stage import sources
from stage.sources.retry import RetryPolicy
from tests.support.hubs import TestHub
from tests.support.staging import run_here

settings.register_profile("airlift", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("airlift")


@pytest.fixture
def stage(hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `stage` against the Hub in a folder of its own; no traceback whatever happens."""
    (tmp_path / "laptop").mkdir()
    monkeypatch.chdir(tmp_path / "laptop")
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    return run_here


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many attempts as ever, with hardly a pause between them unless the server asks for one (`test_retry.py`)."""
    monkeypatch.setattr(sources, "RetryPolicy", partial(RetryPolicy, first_s=0.02))
