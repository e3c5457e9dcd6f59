"""Every engine learns the same, and goes on exactly on any number of ranks. Real ranks, one after another in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runner.conftest import Cluster, logs, metrics

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp-full": {"name": "fsdp"},
    "fsdp-grad-op": {"name": "fsdp", "sharding": "grad_op", "wrap": {"min_params": 10_000}},
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "zero2-offload": {"zero": 2, "offload": "cpu"},
    "zero3-offload": {"zero": 3, "offload": "cpu"},
}
STEPS = 50
SHARED = {"model": {"asset": "steady-bert"}, "schedule": {"name": "constant", "warmup": 0}}


def in_ranks(cluster: Cluster, ranks: int, *runs: Path) -> None:
    """Trains these run files, which must succeed, one after the other on as many ranks."""
    command = [sys.executable, "-m", "tests.support.in_ranks", str(ranks), str(cluster.bundle), *map(str, runs)]
    root = Path(__file__).parents[2]
    environment = cluster.environment(PYTHONPATH=str(root))
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    names = {path.stem.partition("@")[0] for path in runs}
    assert done.returncode == 0, done.stderr[-3000:] + "".join(logs(cluster.output(n))[-3000:] for n in names)


@pytest.fixture(scope="module")
def undisturbed(shared_cluster: Cluster) -> dict[str, Path]:
    """The same 50 steps with every engine, on two ranks."""
    runs = {
        name: shared_cluster.write(
            name, **SHARED, engine=engine, steps=STEPS, dataset={"asset": "reference", "limit": {"train": 300}, "validation": None},
            checkpoint={"every": 1000, "keep": 1},
        )
        for name, engine in ENGINES.items()
    }  # fmt: skip
    done = shared_cluster.run("prepare", "ddp.yaml")
    assert done.returncode == 0, done.stderr
    in_ranks(shared_cluster, 2, *runs.values())
    return {name: shared_cluster.output(name) for name in ENGINES}


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ddp"])
def test_every_engine_learns_what_ddp_learns(undisturbed: dict[str, Path], engine: str) -> None:
    for key in ("loss", "grad_norm"):
        expected, found = metrics(undisturbed["ddp"], key), metrics(undisturbed[engine], key)
        assert [step for step, _ in found] == list(range(1, STEPS + 1))
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=1e-3), key
