"""A laptop with a fetched bundle, and a login node behind a real sshd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.stage.bundles import make_bundle
from tests.support.servers.sshd import Sshd, link_programs
from tests.support.servers.sshd import sshd as sshd

RUN = """\
format: 1
manifest: ../manifests/small.yaml
task: masked-lm
model: {asset: bert, init: scratch}
dataset: {asset: lines}
steps: 4
batch: {global: 8, micro: 4}
"""
TOOLS = (
    "sh bash ls cut mkdir rm find tail sed grep df du id cat sha256sum dirname stat wc head tr mv "
    "touch sleep"
)


@dataclass
class Laptop:
    """Folders as in a checkout: manifests/, runs/, bundle/. `there`: the cluster's folder."""

    folder: Path
    there: Path
    sshd: Sshd

    @property
    def run_file(self) -> Path:
        return self.folder / "runs/my.yaml"

    def clusters(self, more: str = "") -> None:
        """clusters.yaml, with one cluster, `far`."""
        text = f"far:\n  host: cluster\n  folder: {self.there}\n{more}"
        (self.folder / "runs/clusters.yaml").write_text(text)

    def runner(self, *words: str, code: int = 0) -> str:
        """Runs `runner` as a user does; returns all that it printed."""
        kept = {name: os.environ[name] for name in ("PATH", "COVERAGE_PROCESS_START")
                if name in os.environ}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "runner", *words],
            cwd=self.folder,
            env={
                **kept,
                "PATH": f"{self.sshd.laptop}:{kept['PATH']}",
                "HOME": str(self.folder),
                "XDG_RUNTIME_DIR": str(self.sshd.laptop.parent),
                "PYTHONPATH": str(Path(__file__).parents[3]),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stdout
        assert "Traceback" not in done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The /usr/bin of a login node: without Slurm."""
    folder = link_programs(tmp_path_factory.mktemp("programs"), TOOLS)
    (folder / "bash").unlink()  # this machine's profile may bring its own Slurm
    (folder / "bash").write_text(f'#!/bin/sh\nexec {shutil.which("bash")} --noprofile "$@"\n')
    (folder / "bash").chmod(0o755)
    return folder


@pytest.fixture
def laptop(tmp_path: Path, sshd: Sshd) -> Laptop:
    folder = tmp_path / "laptop"
    for name in ("runs", "manifests"):
        (folder / name).mkdir(parents=True)
    bundle = make_bundle(folder / "bundle", big=False)
    shutil.copy(bundle.root / "stage.lock", folder / "manifests/small.lock")
    manifest = (  # which the lock answers
        "format: 1\nname: made\nassets:\n  bert: {model: acme/bert}\n  lines: {dataset: a/l}\n"
        "  notes: {path: n}\n"
    )
    (folder / "manifests/small.yaml").write_text(manifest)
    found = Laptop(folder, tmp_path / "there", sshd)
    found.run_file.write_text(RUN)
    found.clusters()
    return found
