"""scripts/demo, from its beginning to its end: into a Slurm of this machine, or by hand."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.lib import site

pytestmark = [pytest.mark.site, pytest.mark.slow, pytest.mark.timeout(900)]


def start(folder: Path) -> subprocess.Popen[str]:
    if lacks := site.lacking("sshd"):
        pytest.skip(f"the site needs {lacks}")
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.lib.demo.demo", folder],
        cwd=site.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def left(folder: str) -> list[str]:
    """The processes of a site: Slurm's, sshd's, and ssh's way to it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if folder.encode() in text:
            found.append(f"{process.name} {text[:200]!r}")
    return found


def test_it_shows_the_road_and_leaves_no_cluster(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    running = start(folder)
    said, _ = running.communicate(timeout=600)
    assert running.returncode == 0, said
    (cluster,) = re.findall(r"^it is in (\S+),", said, re.MULTILINE)
    assert not Path(cluster).exists()
    until = time.monotonic() + 10
    while left(cluster) and time.monotonic() < until:
        time.sleep(0.5)  # the watcher of a site sees once a second that its owner is gone
    assert left(cluster) == []
    steps = re.findall(r"^\$ (runner \w+)", said, re.MULTILINE)
    assert steps == ["runner submit", "runner status", "runner logs", "runner pull"]
    assert "packets that tried to leave the cluster: 0" in said, said
    pulled = folder / "laptop/output/demo"
    assert (pulled / "model/model.safetensors").exists()
    assert (pulled / "report.html").stat().st_size > 10_000
    assert list((folder / "cluster/output/demo/checkpoints").glob("step-*"))
