"""Nothing on the cluster's side tries to leave the machine: each connect of each process counts.

C++ and Rust code is included.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.conftest import Cluster

# With a filter in the kernel: otherwise every call of every process stops, and a run takes twice as
# long.
STRACE = (
    "strace",
    "-f",
    "--seccomp-bpf",
    "-qq",
    "-e",
    "trace=connect,sendto,sendmsg,sendmmsg",
    "-o",
)
LOOPBACK = ("127.", "::1", "::ffff:127.")


def addresses_asked_for(trace: Path) -> list[str]:
    """The internet addresses in a strace of connect and sendto."""
    return re.findall(r'inet_(?:addr\(|pton\(AF_INET6, )"([^"]+)"', trace.read_text())


def traced(trace: Path, *command: str, cluster: Cluster) -> subprocess.CompletedProcess[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    done = subprocess.run(
        [*STRACE, str(trace), sys.executable, "-m", *command],
        cwd=cluster.folder,
        env=cluster.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_verify_asks_nobody(cluster: Cluster, tmp_path: Path) -> None:
    traced(tmp_path / "trace", "stage", "verify", str(cluster.bundle), cluster=cluster)
    assert addresses_asked_for(tmp_path / "trace") == []


def test_prepare_and_train_ask_nobody_but_the_other_ranks(cluster: Cluster, tmp_path: Path) -> None:
    cluster.write(steps=2)
    arguments = ("tiny.yaml", "--bundle", str(cluster.bundle))
    traced(tmp_path / "prepare", "runner", "prepare", *arguments, cluster=cluster)
    assert addresses_asked_for(tmp_path / "prepare") == []
    traced(tmp_path / "train", "runner", "train", *arguments, "--processes", "2", cluster=cluster)
    asked = addresses_asked_for(tmp_path / "train")
    assert asked, "two ranks cannot meet without a connection"
    assert [address for address in asked if not address.startswith(LOOPBACK)] == []
