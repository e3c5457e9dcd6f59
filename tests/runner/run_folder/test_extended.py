"""A run is extended after its end, is stopped or killed before the next end, and shows its phase.

One rank in this process, and a real model: a kill is that nothing more is called.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.errors import DamageError, UsageError
from runner.job.job import Job
from runner.run_folder.heartbeat import read_pulse
from runner.run_folder.history import describe_finished
from runner.trials.evaluate import choose, doubt
from runner.trials.evaluate_worker import measure
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster, metrics
from tests.support.training.alone import SMALL, begun, started


def noted(run: Job) -> object:
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
    tell = trainer.observer.step

    def stopped_at_the_end(values: Mapping[str, Any]) -> None:
        tell(values)
        trainer.stop.received = "SIGTERM" if values["step"] == 4 else None

    trainer.observer.step = stopped_at_the_end  # type: ignore[method-assign]
    assert not trainer.run()
    trainer.observer.close()
    assert [step for step, _ in metrics(run.folder.root)] == [1, 2, 3, 4]
    assert describe_finished(run.folder, run.config) is None

    # The evaluation is made; a kill before the export.
    run, trainer = started(shared_cluster, path)
    assert trainer.run()
    trainer.observer.close()
    assert metrics(run.folder.root, "validation_loss")[-1][0] == 4
    assert describe_finished(run.folder, run.config) is None

    run, trainer = started(shared_cluster, path)
    assert trainer.run()
    trainer.export()
    assert weights.read_bytes() != old
    assert noted(run) == 4
    assert "4 of 4 steps" in str(describe_finished(run.folder, run.config))

    # Ranks that somebody else starts on a finished run leave it as it is.
    exported_at, story = weights.stat().st_mtime_ns, run.folder.metrics.read_bytes()
    run, trainer = started(shared_cluster, path)
    assert trainer.run()
    trainer.export()
    trainer.observer.close()
    assert weights.stat().st_mtime_ns == exported_at
    assert noted(run) == 4 and describe_finished(run.folder, run.config)
    assert run.folder.metrics.read_bytes() == story


def said(run: Job) -> str:
    return (run.folder.logs / "said").read_text()


def test_a_second_evaluation_of_a_run_finds_the_same_and_nothing_of_either_stays(
    ended: object, shared_cluster: Cluster
) -> None:
    """Both work in one hidden folder, one after the other, through the launcher and its ranks."""
    shared_cluster.write(steps=2, **SMALL)
    both = [shared_cluster.run("evaluate", "tiny.yaml") for _ in range(2)]
    assert [one.returncode for one in both] == [0, 0], both[0].stderr + both[1].stderr
    first, second = (re.findall(r"validation loss \S+", one.stdout) for one in both)
    assert first and first == second
    assert not list(shared_cluster.folder.glob("output/.evaluate-*"))


def test_evaluate_finds_what_the_run_found_and_leaves_the_run_folder_as_it_is(
    ended: object, shared_cluster: Cluster
) -> None:
    path = shared_cluster.write(steps=2, **SMALL)
    run = Job.load(path, shared_cluster.bundle, shared_cluster.output(), ())

    def files() -> dict[Path, bytes]:
        # The runs of other tests in this process still give signs of life.
        found = (p for p in run.folder.root.rglob("*") if p.suffix != ".pulse")
        return {p: p.read_bytes() for p in found if p.is_file()}

    def measured(wanted: str | None) -> tuple[int, float]:
        chosen = choose(run, wanted)
        trainer = begun(chosen.run)
        measure(trainer, checkpoint=str(chosen.checkpoint) if chosen.checkpoint else None)
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


@obeys(
    "runner/trials/evaluate.py", "Name a split of the dataset: --set", "Name another split: --set"
)
@obeys("runner/trials/evaluate_worker.py", "Evaluate another one: --checkpoint step-N, or best.")
def test_another_split_or_checkpoint_is_evaluated_as_the_remedies_say(
    ended: object, shared_cluster: Cluster
) -> None:
    root = Path(shutil.copytree(shared_cluster.output(), shared_cluster.output("copied")))
    path = shared_cluster.write(steps=4, **SMALL)

    def job(*sets: str) -> Job:
        return Job.load(path, shared_cluster.bundle, root, list(sets))

    for wrong in ("dataset.validation=null", "dataset.validation=5%"):
        with pytest.raises(UsageError) as caught:
            choose(job(wrong), None)
        line = in_it(caught.value.remedy, r"(?<=--set )dataset.validation=NAME")
        chosen = choose(job(line.replace("NAME", "validation")), None)
        assert chosen.checkpoint is not None
        step = chosen.checkpoint

    newer = Path(shutil.copytree(step, step.with_name("step-7")))
    max(newer.rglob("*"), key=lambda file: file.stat().st_size).write_bytes(b"")
    damaged = choose(job(), None)
    assert damaged.checkpoint == newer
    trainer = begun(damaged.run)
    with pytest.raises(DamageError) as broken:
        measure(trainer, checkpoint=str(newer))
    trainer.observer.close()
    option = in_it(broken.value.remedy, r"--checkpoint step-(?=N)").split()[1]
    sound = choose(job(), f"{option}{step.name.partition('-')[2]}")
    trainer = begun(sound.run)
    measure(trainer, checkpoint=str(sound.checkpoint))
    trainer.observer.close()
    for folder in (root, sound.run.folder.root):
        shutil.rmtree(folder)


def test_rows_that_a_run_has_trained_on_are_not_called_its_validation(
    ended: object, shared_cluster: Cluster
) -> None:
    path = shared_cluster.write(steps=4, **SMALL)
    run = Job.load(path, shared_cluster.bundle, shared_cluster.output(), ["dataset.validation=5%"])
    with pytest.raises(UsageError, match=r"trained with dataset.validation: .*; now it is 5%"):
        choose(run, None)
    assert choose(run, "none").checkpoint is None


def test_a_share_that_is_held_out_of_another_bundle_is_doubted(
    shared_cluster: Cluster, tmp_path: Path
) -> None:
    """20 % of 61 rows are other rows than 20 % of 60."""
    path = shared_cluster.write(steps=4, **SMALL)
    for share, sets in ((True, ["dataset.validation=5%"]), (False, [])):
        run = Job.load(path, shared_cluster.bundle, tmp_path / "run", sets)
        step = tmp_path / "run" / "checkpoints" / "step-4"
        step.mkdir(parents=True, exist_ok=True)
        for bundle, same in (("0" * 64, False), (run.inputs.bundle_id, True)):
            run.folder.environment.write_text(json.dumps({"bundle_id": bundle}))
            said = doubt(run, step)
            assert ("may have rows that were trained on" in said) == (share and not same)
        assert doubt(run, None) == ""
