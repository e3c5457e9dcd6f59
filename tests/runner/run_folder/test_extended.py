"""A run is extended after its end, is stopped or killed before the next end, and shows its phase.

One rank in this process, and a real model: a kill is that nothing more is called.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.from_stage import DamageError, IncompleteError, StageError, UsageError
from runner.job.training_run import TrainingRun
from runner.run_folder.heartbeat import read_pulse
from runner.run_folder.history import describe_finished, history_of
from runner.training.loop import MOST_SKIPPED
from runner.trials.evaluate import choose, doubt
from runner.trials.workers import measure_checkpoint
from tests.runner.conftest import Cluster, metrics
from tests.support.training.alone import SMALL, begun, started


def noted(run: TrainingRun) -> object:
    return json.loads(run.folder.environment.read_text())["exported_step"]


@pytest.fixture(scope="module")
def ended(shared_cluster: Cluster, alone: None) -> list[tuple[int, str]]:
    """A run of two steps, trained, exported, compiled; its phase at each forward, by step done.

    To compile takes minutes: here it is only noted that it would be done.
    """
    path = shared_cluster.write(steps=2, compile=True, evaluation={"every": 1}, **SMALL)
    shared_cluster.prepare(path)
    said: list[tuple[int, str]] = []

    def note(module: torch.nn.Module) -> None:
        def look(*_: object) -> None:
            said.append((trainer.step, str((read_pulse(trainer.folder.logs, 0) or {})["phase"])))

        module.register_forward_pre_hook(look)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", note)
        _, trainer = started(shared_cluster, path)
        assert trainer.run()
        trainer.export()
        trainer.observer.close()
    return said


def test_an_extended_run_is_not_finished_before_its_last_evaluation_and_its_export(
    ended: object, shared_cluster: Cluster
) -> None:
    path = shared_cluster.write(steps=4, **SMALL)
    weights = shared_cluster.output() / "model" / "model.safetensors"
    old = weights.read_bytes()

    # SIGTERM during the last evaluation.
    run, trainer = started(shared_cluster, path)
    assert noted(run) is None
    trainer.skipped, trainer.engine.step = MOST_SKIPPED - 2, lambda _: torch.tensor(math.inf)  # type: ignore[assignment, method-assign]
    with pytest.raises(StageError, match="gradient of 10 steps in a row"):
        trainer.run()
    trainer.observer.close()
    run, trainer = started(shared_cluster, path)
    trainer.skipped = MOST_SKIPPED  # in a row: a sound step ends it
    tell = trainer.observer.step

    def stopped_at_the_end(values: Mapping[str, Any]) -> None:
        tell(values)
        trainer.stop.received = "SIGTERM" if values["step"] == 4 else None

    trainer.observer.step = stopped_at_the_end  # type: ignore[method-assign]
    assert not trainer.run() and trainer.skipped == 0
    trainer.observer.close()
    assert [step for step, _ in metrics(run.folder.root)] == [1, 2, 3, 4]
    assert describe_finished(history_of(run.folder), run.config) is None

    # The evaluation is made; a kill before the export.
    run, trainer = started(shared_cluster, path)
    assert trainer.run()
    trainer.observer.close()
    assert metrics(run.folder.root, "validation_loss")[-1][0] == 4
    assert describe_finished(history_of(run.folder), run.config) is None

    run, trainer = started(shared_cluster, path)
    assert trainer.run()
    trainer.export()
    assert weights.read_bytes() != old
    assert noted(run) == 4
    assert "4 of 4 steps" in str(describe_finished(history_of(run.folder), run.config))

    # Ranks that somebody else starts on a finished run leave it as it is.
    exported_at, story = weights.stat().st_mtime_ns, run.folder.metrics.read_bytes()
    run, trainer = started(shared_cluster, path)
    assert trainer.run()
    trainer.export()
    trainer.observer.close()
    assert weights.stat().st_mtime_ns == exported_at
    assert noted(run) == 4 and describe_finished(history_of(run.folder), run.config)
    assert run.folder.metrics.read_bytes() == story


def test_evaluate_finds_what_the_run_found_and_leaves_the_run_folder_as_it_is(
    ended: object, shared_cluster: Cluster
) -> None:
    path = shared_cluster.write(steps=2, **SMALL)
    run = TrainingRun.load(path, shared_cluster.bundle, shared_cluster.output(), ())

    def files() -> dict[Path, bytes]:
        # The runs of other tests in this process still give signs of life.
        found = (p for p in run.folder.root.rglob("*") if p.suffix != ".pulse")
        return {p: p.read_bytes() for p in found if p.is_file()}

    def measured(wanted: str | None) -> tuple[int, float]:
        chosen = choose(run, wanted)
        trainer = begun(chosen.run)
        measure_checkpoint(
            trainer, checkpoint=str(chosen.checkpoint) if chosen.checkpoint else None
        )
        trainer.observer.close()
        found = metrics(chosen.run.folder.root, "validation_loss")[-1]
        shutil.rmtree(chosen.run.folder.root)
        return found

    before = files()
    step, loss = measured(None)
    assert (step, loss) == metrics(run.folder.root, "validation_loss")[-1]
    first = measured("none")
    assert first[0] == 0 and first[1] != loss
    assert files() == before

    with pytest.raises(UsageError, match="no best checkpoint"):
        choose(run, "best")
    with pytest.raises(UsageError, match=f"There are: step-{step}|step-{step}"):
        choose(run, "step-77")


def test_a_damaged_checkpoint_and_a_part_of_a_split_are_no_evaluation(
    ended: object, shared_cluster: Cluster
) -> None:
    root = Path(shutil.copytree(shared_cluster.output(), shared_cluster.output("copied")))
    path = shared_cluster.write(steps=4, **SMALL)
    (step,) = root.glob("checkpoints/step-*")
    chosen = choose(TrainingRun.load(path, shared_cluster.bundle, root, ()), None)
    trainer = begun(chosen.run)
    model, trainer.state.signature["model"] = trainer.state.signature["model"], "acme/other@1"
    with pytest.raises(UsageError, match="made with model acme/tiny-bert@"):
        measure_checkpoint(trainer, checkpoint=str(chosen.checkpoint))
    trainer.state.signature["model"] = model
    max(step.rglob("*"), key=lambda file: file.stat().st_size).write_bytes(b"")
    with pytest.raises(DamageError):
        measure_checkpoint(trainer, checkpoint=str(chosen.checkpoint))
    trainer.stop.received = "SIGTERM"
    with pytest.raises(IncompleteError, match="stopped by a signal"):
        measure_checkpoint(trainer, checkpoint=None)
    trainer.observer.close()
    for folder in (root, chosen.run.folder.root):
        shutil.rmtree(folder)


def test_rows_that_a_run_has_trained_on_are_not_called_its_validation(
    ended: object, shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_cluster.write(steps=4, **SMALL)
    run = TrainingRun.load(
        path, shared_cluster.bundle, shared_cluster.output(), ["dataset.validation=5%"]
    )
    with pytest.raises(UsageError, match=r"trained with dataset.validation: .*; now it is 5%"):
        choose(run, None)
    assert choose(run, "none").checkpoint is None
    whole = TrainingRun.load(path, shared_cluster.bundle, shared_cluster.output(), ())
    checkpoint = choose(whole, None).checkpoint
    assert doubt(run, checkpoint) == "", "the bundle of the training"
    assert run.history is not None
    run = run.given(TrainingRun.history, replace(run.history, facts={"bundle_id": "f" * 64}))
    ours = run.inputs.bundle_id[:12]
    assert f"({ours}) is not that of the training (ffffffffffff)" in doubt(run, checkpoint)
    assert doubt(run, None) == doubt(whole, checkpoint) == ""
    run = TrainingRun.load(
        path, shared_cluster.bundle, shared_cluster.output(), ["dataset.validation=null"]
    )
    with pytest.raises(UsageError, match="no validation split is read"):
        choose(run, None)


def test_evaluate_names_the_split_that_it_reads_and_prints_warnings(cluster: Cluster) -> None:
    """It said "the validation split" where it was another; the warnings of its checks were lost."""
    cluster.write(dataset={"asset": "numbers", "text": "text", "validation": "20%"})
    first = ("evaluate", "tiny.yaml", "--checkpoint", "none", "--processes", "1")
    done = cluster.run(*first, "--set", "dataset.validation=test")
    assert done.returncode == 0, done.stderr
    assert "evaluates the weights of tiny-bert on split `test`" in done.stdout
    done = cluster.run(*first, "--set", "optimizer.lr=5")
    assert "on split `20% of train`" in done.stdout, done.stderr
    assert "optimizer.lr 5: with adamw each step changes" in done.stdout
