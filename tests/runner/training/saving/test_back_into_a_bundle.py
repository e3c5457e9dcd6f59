"""The round trip: a run's `model/` is staged by `path:` and trained again."""

from __future__ import annotations

from runner.job.training_run import TrainingRun
from stage.cli.show import describe
from tests.runner.conftest import Cluster
from tests.runner.run_folder.conftest import alone as alone  # the fixture
from tests.support.staging import run_as
from tests.support.training.alone import SMALL, started

MANIFEST = """\
format: 1
name: second
assets:
  mine: {path: output/first/model}
  reference: {path: lines.txt, convert: text}
"""


def trained(cluster: Cluster, name: str, **changes: object) -> TrainingRun:
    path = cluster.write(name, steps=1, **{**SMALL, **changes})
    cluster.prepare(path)
    run, trainer = started(cluster, path)
    assert trainer.run()
    trainer.export()
    trainer.observer.close()
    return run


def test_a_model_goes_from_a_run_into_a_bundle_and_into_the_next_run(
    alone: None, cluster: Cluster
) -> None:
    first = trained(cluster, "first")
    commit = str(first.inputs.model.commit)
    (cluster.folder / "lines.txt").write_text("A line to train on, of some length.\n" * 60)
    (cluster.folder / "second.yaml").write_text(MANIFEST)
    fetch = ("fetch", "second.yaml", "-o", "second", "--no-offline-check")
    done = run_as(fetch, cluster.folder, cluster.environment())
    assert done.returncode == 0, done.stderr
    bundle = cluster.folder / "second"
    shown = describe(bundle)
    assert f"trained  by the run first, in bundle {first.inputs.bundle_id}" in shown
    assert f"first weights: acme/tiny-bert at {commit}" in shown

    again = Cluster(cluster.folder, bundle)
    data = {"asset": "reference", "validation": None}
    second = trained(again, "second-run", model={"asset": "mine"}, dataset=data)
    assert second.inputs.model.path == bundle / "data/files/mine"
    card = (second.folder.model / "README.md").read_text()
    assert f"run first in bundle {first.inputs.bundle_id}" in card
    assert f"| before that | first weights: acme/tiny-bert at {commit} |" in card
