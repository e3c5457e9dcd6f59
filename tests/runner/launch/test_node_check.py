"""`runner check --on node` without a cluster: this machine is checked, and GPUs are counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.errors import StageError
from runner.gpu_check.record import JSON, read
from runner.launch import node_check
from runner.launch.node_check import check_node
from tests.runner.conftest import Cluster


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands are installed, and this machine belongs to no cluster."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sbatch", "sinfo"):
        path = programs / name
        path.write_text(
            "#!/bin/sh\necho 'Could not establish a configuration source' >&2; exit 1\n"
        )
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")


def test_gpus_that_are_asked_for_and_not_here_fail_the_check_of_this_machine(
    cluster: Cluster, no_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It printed sbatch's raw message, and deleted the record of an earlier check."""
    config = RunConfig.load(cluster.write(slurm={"nodes": 1, "gpus_per_node": 4}))
    printed: list[str] = []

    def check() -> None:
        with pytest.raises(StageError, match=r"slurm.gpus_per_node: 4, and torch .* sees 0 GPUs"):
            check_node(
                config, cluster.bundle, cluster.output(), (), dict(os.environ), printed.append
            )

    # A job on the Slurm site measures all of them.
    every = node_check.items({}, "cpu")
    for names in (("facts",), ("facts", "matmul")):
        few = {name: every[name] for name in names}
        monkeypatch.setattr(node_check, "items", lambda *_, few=few: few)
        check()
    assert "belongs to no Slurm cluster" in printed[0]
    items = {item["name"]: item for item in read(cluster.output() / "node-check" / JSON)["items"]}
    assert items["devices asked"]["status"] == "failed"
    assert items["matmul"]["status"] == "ok"
