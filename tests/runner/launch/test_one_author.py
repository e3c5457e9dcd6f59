"""Each decision has one author: the launcher writes it down, rank 0 completes it and sends it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from runner.job.training_run import TrainingRun
from runner.launch.resolved import Resolved, read_resolved, write_resolved
from tests.runner.conftest import Cluster

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"task": "causal-lm", "model": {"asset": "tiny-gpt2"}, "lora": {"targets": ["c_attn"]}},
    "several": {
        "dataset": None,
        "datasets": [
            {"asset": "reference", "weight": 2.0},
            {"asset": "reference", "limit": {"train": 9}},
        ],
    },
    "held out": {
        "dataset": {"asset": "reference", "validation": "5%"},
        "optimizer": {"name": "lion"},
    },
    "fsdp": {
        "engine": {"name": "fsdp", "wrap": {"min_params": 100}},
        "checkpoint": {"every": "10 min"},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_read_is_what_was_written(
    cluster: Cluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TrainingRun.load(
        cluster.write(**SETTINGS[name]), cluster.bundle, cluster.output(), ("seed=7",)
    )
    job.folder.make()
    own = replace(job, environ={"A": "1"}).given(TrainingRun.history, None)
    assert own.environ == {"A": "1"} and own.history is None
    written = Resolved.of(job, phase="first", checkpoint=None)
    monkeypatch.setenv("TOKEN", "hidden-from-others")
    write_resolved(written)
    for path in (job.folder.handed_over, job.folder.resolved):
        assert b"hidden-from-others" not in path.read_bytes()
    plain = json.loads(job.folder.resolved.read_text())
    assert plain["shape"]["num_parameters"] == job.shape.num_parameters
    assert plain["stores"]["train"] == [str(path) for path in job.stores["train"]]
    found = read_resolved(job.folder)
    assert found == written
    assert found.run.config.place("seed") == job.config.place("seed")
    assert str(job.config.place("seed")) == "--set seed"
    assert found.run.config.place("steps") == job.config.place("steps")
    assert found.run.config.to_yaml() == job.config.to_yaml()
