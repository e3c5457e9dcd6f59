"""The record of a GPU check: an interrupted one loses nothing, and it never mixes two machines."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from runner.errors import StageError, UsageError
from runner.processes import is_alive
from scripts.lib.gpu_check import facts
from scripts.lib.gpu_check.limited import run_limited
from scripts.lib.gpu_check.node import run_item
from scripts.lib.gpu_check.record import JSON, MARKDOWN, Item, Record, read

MACHINE = {"device": "NVIDIA H100", "torch": "2.13.0"}


def test_what_has_a_result_is_not_measured_again_and_what_has_none_is(tmp_path: Path) -> None:
    record = Record(tmp_path, MACHINE)
    record.put(Item("matmul", "ok", 2.0, {"bf16 TFLOP/s": 700.123456}))
    record.put(Item("tests", "failed", 9.0, note="1 of 3 | tests\nfailed"))
    record.put(Item("copy", "not run"))
    again = Record(tmp_path, MACHINE)
    assert [again.is_done(name) for name in ("matmul", "tests", "copy", "new")] == [
        True, True, False, False
    ]  # fmt: skip
    page = (tmp_path / MARKDOWN).read_text()
    assert "| matmul | ok | 2 | bf16 TFLOP/s 700.1 |" in page
    assert "| tests | failed | 9 | 1 of 3 / tests failed |" in page


def test_the_record_of_another_machine_is_not_continued(tmp_path: Path) -> None:
    Record(tmp_path, MACHINE).put(Item("facts", "ok"))
    with pytest.raises(UsageError, match=r"device was 'NVIDIA H100' and is 'NVIDIA A800'"):
        Record(tmp_path, {**MACHINE, "device": "NVIDIA A800"})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2}', '{"format": 1, "machine": 3}'])
def test_a_file_that_is_no_record_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / JSON).write_text(text)
    with pytest.raises(UsageError, match="is not a record"):
        read(tmp_path / JSON)
    assert (tmp_path / JSON).read_text() == text


def test_an_item_that_fails_is_a_result_with_its_cause() -> None:
    def fail() -> dict[str, object]:
        raise StageError("the device is gone", "nvidia-smi", 1)

    item = run_item("kernels", fail)
    assert (item.status, "the device is gone" in item.note) == ("failed", True)


def test_a_fault_of_our_own_in_one_item_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    item = run_item("prepare", lambda: {"sequences": 1 // 0})
    assert item.status == "failed" and item.note.startswith("ZeroDivisionError: ")
    assert "Traceback" in capsys.readouterr().err


def test_what_is_over_its_limit_ends_with_the_processes_that_it_started(tmp_path: Path) -> None:
    """A Trainer that went on would hold the GPU while the next item measures."""
    script = "sleep 300 & echo $! > child; wait"
    child, limit = tmp_path / "child", 0.5
    while not child.exists() or not child.read_text():
        environ = {"PATH": os.environ["PATH"]}
        command = ["sh", "-c", script]
        assert run_limited(command, tmp_path / "log", limit, cwd=tmp_path, environ=environ) is None
        limit *= 2
    while is_alive(int(child.read_text())):
        time.sleep(0.01)


DRIVER = """#!/bin/sh
case "$*" in
*pcie*) echo "Field is not a valid field to query" >&2; exit 2 ;;
*mig.mode*)
    echo "Tesla V100-SXM2-32GB, GPU-1, 450.80, 32510 MiB, 300.00 W, 1530 MHz, Enabled, [N/A]" ;;
"topo -m") printf 'GPU0 X\\n' ;;
*) exit 1 ;;
esac
"""


def test_an_old_driver_is_asked_for_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(DRIVER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = facts.node_facts({"SLURM_JOB_PARTITION": "gpu"})
    assert found["devices"][0]["name"] == "Tesla V100-SXM2-32GB"
    assert found["devices"][0]["memory.total"] == "32510 MiB"
    assert found["links"] == "GPU0 X"
    assert found["SLURM_JOB_PARTITION"] == "gpu"


def test_a_node_without_a_driver_has_no_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.node_facts({})["devices"] == []
