"""Training data that fill no step."""

from __future__ import annotations

from tests.runner.conftest import Cluster
from tests.runner.run_folder.conftest import alone
from tests.support.training.alone import started

__all__ = ["alone"]


def test_train_warns_of_a_step_larger_than_the_data_as_check_does(
    cluster: Cluster, alone: None
) -> None:
    few = {"asset": "numbers", "limit": {"train": 20}, "validation": None}
    path = cluster.write(
        dataset=few, sequence_length=32, batch={"global": 64}, engine={"name": "ddp"}
    )
    cluster.prepare(path)
    run, _ = started(cluster, path)
    said = (run.folder.logs / "said").read_text()
    assert "each step has some of them several times.\n  -> Set batch.global: " in said
