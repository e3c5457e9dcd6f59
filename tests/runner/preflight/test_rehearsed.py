"""What a rehearsal found on a partition is kept, for `check` and `submit`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner.job import rehearsed
from runner.job.findings import Finding


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path)}


def kept(environ: dict[str, str], *findings: Finding) -> Path:
    found = rehearsed.Rehearsed(
        "gpu", time.time(), 7, ("n1", "n2"), ("all-reduce: 3 GB/s",), findings
    )
    return rehearsed.keep(found, environ)


def test_submit_offers_a_rehearsal_of_a_new_partition_only(environ: dict[str, str]) -> None:
    command = "runner rehearse RUN --job"
    (offered,) = rehearsed.recall("gpu", environ, command).others
    assert (offered.level, offered.remedy) == ("note", command)
    path = kept(environ)
    assert rehearsed.recall("gpu", environ, command).others == []
    path.write_text("{")
    assert len(rehearsed.recall("gpu", environ, command).others) == 1
    assert rehearsed.recall("gpu", environ).others == []
