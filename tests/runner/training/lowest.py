"""Training with the lowest versions in pyproject.toml: each engine saves, resumes and exports.

Only `scripts/lowest` runs this: pytest does not collect files of this name. `scripts/test` runs the
engines' own tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runner.conftest import Cluster, in_ranks, metrics

LORA = {"rank": 4, "targets": ["query", "value"]}
HAS_FSDP = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 7)
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": {"name": "ddp"}},
    "zero0": {"engine": {"zero": 0}},
    "zero1": {"engine": {"zero": 1}, "precision": "bf16"},
    "zero2": {"engine": {"zero": 2}},
    "zero3": {"engine": {"zero": 3}, "precision": "bf16"},
    "zero3-lora": {"engine": {"zero": 3}, "lora": LORA},
    "nf4-ddp": {"engine": {"name": "ddp"}, "lora": LORA, "quantization": {"bits": 4}},
    **({"fsdp": {"engine": {"name": "fsdp"}}} if HAS_FSDP else {}),
}


@pytest.fixture(scope="module")
def trained(shared_cluster: Cluster) -> Cluster:
    """Three steps of each engine. A first run ends after the second step."""
    runs = [
        shared_cluster.write(
            f"{name}.{steps}",
            steps=steps,
            model={"asset": "steady-bert"},
            # Gives the first run the schedule of the second.
            schedule={"name": "constant", "warmup": 0},
            dataset={"asset": "reference", "limit": {"train": 60}, "validation": None},
            checkpoint={"every": 1, "keep": 1},
            **settings,
        )
        for name, settings in ENGINES.items()
        for steps in (2, 3)
    ]
    shared_cluster.prepare(runs[0])
    said = in_ranks(shared_cluster, 2, *runs)
    assert said.count("resumed from") == len(ENGINES), said
    return shared_cluster


@pytest.mark.parametrize("name", ENGINES)
def test_each_engine_trains_saves_resumes_and_exports(trained: Cluster, name: str) -> None:
    folder = trained.output(name)
    losses = metrics(folder)
    assert [step for step, _ in losses] == [1, 2, 3]
    weights = "adapter_model" if "lora" in ENGINES[name] else "model"
    assert (folder / "model" / f"{weights}.safetensors").stat().st_size > 0


def test_by_the_command_line(trained: Cluster) -> None:
    trained.write("shell", steps=1, engine={"zero": 3})
    folder = trained.trained("shell")
    assert len(metrics(folder)) == 1
