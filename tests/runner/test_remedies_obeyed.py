"""Remedies of `runner` that need a bundle: whoever does what they say goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.runner.conftest import Cluster


def test_a_run_without_checkpoints_is_measured_by_its_exported_model(
    cluster: Cluster, trained_at: Callable[[int], Path]
) -> None:
    cluster.take(trained_at(2))
    shutil.rmtree(cluster.output("zero2") / "checkpoints")
    assert "--checkpoint none --set model.init=" in cluster.refused("evaluate", "zero2.yaml")


def test_an_adapter_alone_is_not_offered_to_be_evaluated(cluster: Cluster) -> None:
    """`--set model.init=` of an adapter was printed, which then was refused."""
    cluster.write("lora", task="causal-lm", model={"asset": "tiny-gpt2"}, lora={"rank": 2})
    cluster.output("lora").mkdir(parents=True)
    (cluster.output("lora") / "metrics.jsonl").write_text("")
    (cluster.output("lora") / "pulled.json").write_text("{}")
    said = cluster.refused("evaluate", "lora.yaml")
    assert "runner pull lora --to CLUSTER --checkpoints -o" in said and "model.init" not in said
