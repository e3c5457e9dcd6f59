"""Files of one's own: from `stage init PATH...` to a model that loads, and no file is edited."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoModelForSequenceClassification

from tests.runner.conftest import Cluster, logs, metrics
from tests.support.staging import run_as


def test_a_table_and_a_model_train_resume_and_load_without_an_editor(
    cluster: Cluster, bundle: Path
) -> None:
    rows = "".join(f"the film number {n} is one,{'good' if n % 3 else 'bad'}\n" for n in range(90))
    (cluster.folder / "data").mkdir()
    (cluster.folder / "data/reviews.csv").write_text(f"text,verdict\n{rows}")
    shutil.copytree(bundle / "data/models/tiny-bert", cluster.folder / "models/mine")
    for command in ("init data/reviews.csv models/mine", "fetch manifest.yaml -o bundle"):
        done = run_as(command.split(), cluster.folder, {"HOME": str(cluster.folder)})
        assert done.returncode == 0, done.stderr
    cluster.bundle = cluster.folder / "bundle"
    for words in (
        ("init", "text-classification", "-o", "mine.yaml"),
        ("train", "mine.yaml", "--processes", "1", "--set", "epochs=1"),
        ("train", "mine.yaml", "--processes", "1", "--set", "epochs=2"),
    ):
        said = cluster.run(*words)
        assert said.returncode == 0, said.stderr + said.stdout + logs(cluster.output("mine"))
    steps = [step for step, _ in metrics(cluster.output("mine"))]
    assert "resumed from step" in logs(cluster.output("mine")) and steps == list(
        range(1, len(steps) + 1)
    )
    exported = AutoModelForSequenceClassification.from_pretrained(cluster.output("mine") / "model")
    assert set(exported.config.label2id) == {"good", "bad"}
