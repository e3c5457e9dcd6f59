"""Every engine learns the same and resumes exactly on any number of ranks, with real ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runner.conftest import Cluster, in_ranks, metrics

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp-full": {"name": "fsdp"},
    "fsdp-grad-op": {"name": "fsdp", "sharding": "grad_op", "wrap": {"min_params": 10_000}},
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "zero3-offload": {"zero": 3, "offload": "cpu"},
}
STEPS = 12
# Engine by engine what a run goes through: on 2 ranks past step 4, on 1 to step 8, on 2 to step 12.
JOURNEYS = {
    "sharded-whole-sharded": ("fsdp-full", "ddp", "fsdp-grad-op"),
    "zero-2-1-2": ("zero2", "zero1", "zero2"),
    "zero-3": ("zero3", "zero3", "zero3"),
}


def write(
    cluster: Cluster, name: str, engine: dict[str, Any], steps: int, **checkpoint: Any
) -> Path:
    """A run file; all these runs see the same data and have no dropout, which would differ from
    rank to rank.
    """
    return cluster.write(
        name,
        model={"asset": "steady-bert"},
        dataset={"asset": "reference", "limit": {"train": 300}, "validation": None},
        # A calm run: where the loss jumps about, so do roundings.
        optimizer={"lr": 1.0e-3, "weight_decay": 1.0},
        schedule={"name": "constant", "warmup": 0},
        checkpoint={"every": 1000, "keep": 1, **checkpoint},
        engine=engine,
        steps=steps,
    )


@pytest.fixture(scope="module")
def on_two(shared_cluster: Cluster) -> Cluster:
    """12 steps with every engine, and the beginnings of all journeys, on two ranks."""
    runs = [write(shared_cluster, name, engine, STEPS) for name, engine in ENGINES.items()]
    runs += [
        write(shared_cluster, f"{name}.2", ENGINES[begin], 5, every=4, keep=2)
        for name, (begin, _, _) in JOURNEYS.items()
    ]
    shared_cluster.prepare(runs[0])
    in_ranks(shared_cluster, 2, *runs)
    return shared_cluster


def assert_like_ddp(cluster: Cluster, name: str, steps: int, difference: float) -> None:
    for key in ("loss", "grad_norm"):
        expected, found = (
            metrics(cluster.output("ddp"), key)[:steps],
            metrics(cluster.output(name), key),
        )
        assert [step for step, _ in found] == list(range(1, steps + 1))
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in expected], abs=difference
        ), key
    assert found[-1][1] > 0


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ddp"])
def test_every_engine_learns_what_ddp_learns(on_two: Cluster, engine: str) -> None:
    assert_like_ddp(on_two, engine, STEPS, 1e-3)


@pytest.fixture(scope="module")
def travelled(on_two: Cluster) -> Cluster:
    """All journeys to their ends, from the checkpoint before the end."""
    for name in JOURNEYS:
        shutil.rmtree(on_two.output(name) / "checkpoints" / "step-5")
    for place, (ranks, steps) in enumerate([(1, 8), (2, 12)], start=1):
        runs = [
            write(on_two, f"{n}.{ranks}", ENGINES[engines[place]], steps)
            for n, engines in JOURNEYS.items()
        ]
        in_ranks(on_two, ranks, *runs)
    return on_two


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_run_goes_on_exactly_on_any_number_of_ranks(travelled: Cluster, journey: str) -> None:
    assert_like_ddp(travelled, journey, 12, 1e-5)
