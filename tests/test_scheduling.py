"""Tests of one file, and all on the Slurm site, run in one worker: what they share is made once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST = """
import os, pathlib, time, pytest

@pytest.mark.parametrize("number", range(8))
def test_it(number):
    time.sleep(0.02)
    with open({log!r}, "a") as log:
        print({name!r}, os.environ["PYTEST_XDIST_WORKER"], file=log)
"""
FILES = (
    "tests/one_test.py",
    "tests/other_test.py",
    "tests/site/one_test.py",
    "tests/site/other_test.py",
)


def test_a_file_runs_in_one_worker_and_the_site_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "pytest.ini").touch()
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEST.format(log=str(log), name=name))
    options = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--import-mode=importlib"]
    there = ["--rootdir", tmp_path, "-c", tmp_path / "pytest.ini", tmp_path]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.conftest",
            "-p",
            "no:cacheprovider",
            *options,
            *there,
        ],
        cwd=ROOT,
        env={
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = defaultdict(list)
    for line in log.read_text().splitlines():
        name, worker = line.split()
        workers[name].append(worker)
    assert {name: len(found) for name, found in workers.items()} == dict.fromkeys(FILES, 8)
    assert [name for name, found in workers.items() if len(set(found)) > 1] == []
    assert workers["tests/site/one_test.py"] == workers["tests/site/other_test.py"]
    assert {found[0] for found in workers.values()} == {"gw0", "gw1"}
