"""The child process of a launcher: how it ends with a Ctrl-C, and without a reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
import click
from runner.cli import main
from runner.child import in_child
import {module}
main.add_command(click.Command("prepare", callback=lambda: in_child(*{module}.WORK)))
main(["prepare"])
"""
SLOW = """
import os, pathlib, sys, time
def work():
    pathlib.Path(os.environ["READY"]).touch()
    time.sleep(600)
{at_import}
WORK = work, (), "preparing", "-"
"""


def launcher(folder: Path, module: str, text: str) -> list[str]:
    (folder / f"{module}.py").write_text(text)
    code = LAUNCHER.format(root=str(ROOT), here=str(folder), module=module)
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("imports", [False, True])
def test_ctrl_c_is_one_line_and_no_traceback(tmp_path: Path, *, imports: bool) -> None:
    """In the work, and while the child still imports it."""
    at_import = "if sys.argv[1:]:\n    work()" if imports else ""  # only the child has arguments
    command = launcher(tmp_path, "slow_work", SLOW.format(at_import=at_import))
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        command, env={**os.environ, "READY": str(ready)}, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 5, said
    assert "error: Interrupted." in said
    assert "Traceback" not in said and len(said.splitlines()) <= 3


@pytest.mark.parametrize("program", ["runner", "stage"])
def test_ctrl_c_during_the_first_imports_is_no_traceback(tmp_path: Path, program: str) -> None:
    """`click` stands for any module that is imported when the signal comes."""
    (tmp_path / "click.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-m", program, "--help"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert done.returncode == 5
    assert done.stderr == "error: Interrupted.\n  -> Run the same command again.\n"
