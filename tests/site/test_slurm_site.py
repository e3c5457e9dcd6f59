"""scripts/slurm-site itself: closed, and gone without a trace."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.site.conftest import USER, Site

pytestmark = pytest.mark.site


@pytest.fixture
def other() -> Iterator[Site]:
    """A second site, beside the one of the other tests."""
    with tempfile.TemporaryDirectory(prefix="slurm-site-", dir="/tmp") as folder:
        running = Site(Path(folder))
        running.control("up", "--nodes", "1", "--user", USER, "--with", str(os.getpid()))
        yield running
        running.control("down")


def test_what_tries_to_leave_is_dropped_and_written_down(site: Site, other: Site) -> None:
    assert (other.leaks(), other.control("leaks").returncode) == ("", 0)
    asked = other.run("getent", "hosts", "huggingface.co", check=False)
    assert asked.returncode == 2
    connect = "exec 3<>/dev/tcp/203.0.113.7/443"
    other.control("nexec", "n1", "timeout", "2", "bash", "-c", connect, check=False)
    leaks = other.leaks()
    assert "-> 192.0.2.53 udp 53 huggingface.co" in leaks
    assert "10.77.0.1 -> 203.0.113.7 tcp 443" in leaks
    assert other.control("leaks", check=False).returncode == 1
    assert site.leaks() == ""


def test_down_never_removes_a_folder_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused = Site(tmp_path).control("down", check=False)
    assert refused.returncode == 2
    assert "not a site's folder" in refused.stderr
    assert (tmp_path / "thesis.tex").exists()
