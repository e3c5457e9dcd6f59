"""`model/` has the weights with the lowest validation loss, where the run file asks for them."""

from __future__ import annotations

import json
from typing import Any

from safetensors.torch import load_file

from runner.run_folder.history import describe_finished, history_of
from tests.runner.conftest import Cluster, metrics
from tests.support.training.alone import SMALL, started

# A rate at which the loss falls for a step or two, and then rises.
TOO_FAST = {"optimizer": {"lr": 0.1}, "schedule": {"name": "constant", "warmup": 0}}


def test_a_run_that_ends_early_exports_its_best_weights_and_names_them(
    alone: None, shared_cluster: Cluster
) -> None:
    evaluation = {"every": 1, "patience": 2}
    path = shared_cluster.write("best", **TOO_FAST, evaluation=evaluation, steps=30, **SMALL)
    shared_cluster.prepare(path)
    run, trainer = started(shared_cluster, path)
    seen: dict[int, Any] = {}
    tell = trainer.observer.validation

    def note(values: Any) -> None:
        tell(values)
        seen[values["step"]] = {
            name: value.clone() for name, value in trainer.task.module.state_dict().items()
        }

    trainer.observer.validation = note  # type: ignore[method-assign]
    assert trainer.run()
    trainer.export()
    trainer.observer.close()

    losses = dict(metrics(run.folder.root, "validation_loss"))
    best, last = min(losses, key=lambda step: losses[step]), max(losses)
    assert last == best + 2 < 30, losses
    weights = load_file(run.folder.model / "model.safetensors")
    key = next(name for name in weights if "word_embeddings" in name)
    exported = {
        step: bool((state[f"model.{key}"] == weights[key]).all()) for step, state in seen.items()
    }
    assert [step for step, same in exported.items() if same] == [best]

    # `keep: 1`, and the best one beside it.
    kept = {folder.name for folder in run.folder.checkpoints.glob("step-*")}
    assert kept == {f"step-{best}", f"step-{last}"}
    said = (run.folder.logs / "said").read_text()
    assert f"exports the weights of step {best}, not the last, of step {last}" in said
    assert (
        f"of step {best}, the lowest validation loss"
        in (run.folder.model / "README.md").read_text()
    )
    record = json.loads(run.folder.environment.read_text())
    assert (record["exported_step"], record["exported_weights_step"]) == (last, best)
    finished = str(describe_finished(history_of(run.folder), run.config))
    assert f"(the weights of step {best}, the best)" in finished

    # It goes on from its last step, not from its best.
    path = shared_cluster.write(
        "best", **TOO_FAST, evaluation={"every": 1}, steps=last + 1, **SMALL
    )
    run, trainer = started(shared_cluster, path)
    assert trainer.step == last
    assert trainer.run()
    trainer.export()
    trainer.observer.close()
    assert "exported_weights_step" not in json.loads(run.folder.environment.read_text())


def test_a_best_checkpoint_that_is_damaged_is_named_and_the_last_weights_are_exported(
    alone: None, shared_cluster: Cluster
) -> None:
    checkpoint = {"every": 100, "keep": 1, "best": True}
    settings = {**TOO_FAST, **SMALL, "checkpoint": checkpoint}
    path = shared_cluster.write("damaged", evaluation={"every": 1}, steps=6, **settings)
    shared_cluster.prepare(path)
    run, trainer = started(shared_cluster, path)
    assert trainer.run()
    best = json.loads((run.folder.checkpoints / "best.json").read_text())["step"]
    assert best < 6
    (run.folder.checkpoints / f"step-{best}" / "state.json").write_text("{}")
    trainer.export()
    trainer.observer.close()
    said = (run.folder.logs / "said").read_text()
    assert f"exports the last weights, of step 6: step-{best}, the best: state.json" in said
    assert "exported_weights_step" not in json.loads(run.folder.environment.read_text())
