"""`runner check --on node`: a node is tried before the run is queued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.site.conftest import RUNNER, Site

pytestmark = pytest.mark.site


def test_a_node_is_checked_by_a_job_and_its_record_comes_back(site: Site, bundle: Path) -> None:
    output = site.home / "output" / "checked"
    done = site.run(
        *RUNNER, "check", "tiny.yaml", "--bundle", "bundle", "--output", str(output), "--on", "node"
    )
    assert "this node works" in done.stdout
    record = json.loads((output / "node-check" / "gpu-check.json").read_text())
    values = {item["name"]: item["values"] for item in record["items"]}
    assert values["facts"]["host"] in ("n1", "n2")
    assert values["matmul"]["fp32 TFLOP/s"] > 0


@pytest.mark.slow  # tests/runner/launch/test_node_check.py holds it without Slurm
def test_a_node_without_the_gpus_that_torch_needs_is_named_with_the_cause(
    site: Site, bundle: Path
) -> None:
    """The site's GPUs are files, and torch here has no CUDA."""
    done = site.run(
        *RUNNER, "check", "tiny.yaml", "--bundle", "bundle", "--on", "node",
        "--output", str(site.home / "output" / "no-gpus"),
        "--set", "slurm.gpus_per_node=1", "--set", "slurm.tasks_per_node=auto", check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert "is for CPUs only" in done.stderr
