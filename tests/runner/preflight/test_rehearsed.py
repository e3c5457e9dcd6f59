"""What a rehearsal found on a partition is kept, for `check` and `submit`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner.job import rehearsed
from runner.job.findings import Finding

FAULT = Finding("error", "n2: NCCL_SOCKET_IFNAME=eth9: no such interface.", "unset it.", 2)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path)}


def kept(environ: dict[str, str], *findings: Finding) -> Path:
    found = rehearsed.Rehearsed(
        "gpu", time.time(), 7, ("n1", "n2"), ("all-reduce: 3 GB/s",), findings
    )
    return rehearsed.keep(found, environ)


def test_check_recalls_a_rehearsal_that_passed(environ: dict[str, str]) -> None:
    kept(environ)
    found = rehearsed.recall("gpu", environ)
    assert found.others == []
    assert found.lines[0].startswith("rehearsed on partition gpu at ")
    assert found.lines[0].endswith(": n1, n2; all-reduce: 3 GB/s")


def test_check_warns_of_what_a_rehearsal_found(environ: dict[str, str]) -> None:
    kept(environ, FAULT)
    found = rehearsed.recall("gpu", environ)
    (warning,) = found.others
    assert (found.lines, warning.level, warning.exit_code) == ([], "warning", 0)
    assert FAULT.message in warning.message and warning.remedy.startswith("unset it. When")


def test_submit_offers_a_rehearsal_of_a_new_partition_only(environ: dict[str, str]) -> None:
    command = "runner rehearse RUN --job"
    (offered,) = rehearsed.recall("gpu", environ, command).others
    assert (offered.level, offered.remedy) == ("note", command)
    path = kept(environ)
    assert rehearsed.recall("gpu", environ, command).others == []
    path.write_text("{")
    assert len(rehearsed.recall("gpu", environ, command).others) == 1
    assert rehearsed.recall("gpu", environ).others == []
