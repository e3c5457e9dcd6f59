"""A run that has done all that is asked of it is known as finished, and no other is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.run_folder.history import changed_since, changes, describe_finished, history_of
from runner.run_folder.layout import RunFolder
from runner.run_folder.status import status

RUN = "format: 1\ntask: masked-lm\nmodel: {asset: bert}\ndataset: {asset: wikitext}\n"


def config(folder: Path, length: str) -> RunConfig:
    (folder / "mine.yaml").write_text(f"{RUN}{length}\n")
    return RunConfig.load(folder / "mine.yaml")


@pytest.fixture
def ended(tmp_path: Path) -> Callable[[str], RunFolder]:
    """What a run of eight steps leaves, whose run file asked for them in these words."""

    def make(length: str) -> RunFolder:
        folder = RunFolder(tmp_path / "run")
        folder.make()
        folder.model.mkdir()
        folder.config.write_text(config(tmp_path, length).to_yaml())
        folder.environment.write_text(json.dumps({"num_steps": 8, "exported_step": 8}))
        folder.metrics.write_text(
            "".join(json.dumps({"step": n, "loss": 1.0}) + "\n" for n in range(1, 9))
        )
        return folder

    return make


def test_an_adapter_is_said_to_be_one(ended: Callable[[str], RunFolder], tmp_path: Path) -> None:
    """What came back did not load, and only its card says how it does."""
    lora = "steps: 8\nlora: {rank: 2}"
    model = ended(lora).model
    said = str(describe_finished(history_of(RunFolder(model.parent)), config(tmp_path, lora)))
    assert said.endswith(f"its model: {model}: an adapter; {model}/README.md says how to load it")
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"has an adapter alone(.|\n)*lora.merge: true"):
        (tmp_path / "next.yaml").write_text(RUN.replace("bert}", f"bert, init: {model}}}"))
        RunConfig.load(tmp_path / "next.yaml")


@pytest.mark.parametrize(
    ("before", "now", "gone", "done"),
    [
        *((length, length, "", 8) for length in ("steps: 8", "epochs: 2", "")),
        ("steps: 8", "steps: 9", "", None),
        ("steps: 20", "steps: 7", "", 7),  # it has more
        ("epochs: 2", "epochs: 3", "", None),
        ("", "steps: 20", "", None),
        ("steps: 8", "steps: 8", "model", None),  # it is to be exported again
        ("steps: 8", "steps: 8", "environment.json", None),
    ],
)
def test_a_run_is_finished_that_has_done_all_that_its_file_asks_for(
    ended: Callable[[str], RunFolder], tmp_path: Path, before: str, now: str, gone: str,
    done: int | None,
) -> None:  # fmt: skip
    root = ended(before).root
    (root / (gone or "logs")).rename(tmp_path / "gone")
    said = describe_finished(history_of(RunFolder(root)), config(tmp_path, now))
    model = f"its model: {root}/model"
    assert said == (done and f"finished already: 8 of {done} steps; {model}")


@pytest.mark.parametrize("recorded", [{}, {"ended_early": 8}])
def test_a_folder_that_was_made_ready_for_another_start_is_not_finished(
    ended: Callable[[str], RunFolder], tmp_path: Path, recorded: dict[str, int]
) -> None:
    """The steps that are recorded are those of the epochs before."""
    folder = ended("epochs: 2")
    facts = {"num_steps": 8, "exported_step": 8, **recorded}
    folder.environment.write_text(json.dumps(facts))
    os.utime(folder.environment, (0, 0))
    folder.config.write_text(config(tmp_path, "epochs: 3").to_yaml())
    assert describe_finished(history_of(folder), config(tmp_path, "epochs: 3")) is None
    folder.environment.write_text(json.dumps(facts | {"num_steps": 12}))
    os.utime(folder.config, (0, 0))
    assert (describe_finished(history_of(folder), config(tmp_path, "epochs: 3")) is None) != bool(
        recorded
    )


def test_a_run_that_ended_early_is_finished_until_its_patience_is_another(
    ended: Callable[[str], RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm
    asked = "steps: 20\nevaluation: {patience: 2}"
    folder = ended(asked)
    noted = {"num_steps": 20, "exported_step": 8, "ended_early": 8, "exported_weights_step": 4}
    folder.environment.write_text(json.dumps(noted))
    assert "8 of 8 steps" in str(describe_finished(history_of(folder), config(tmp_path, asked)))
    found = status(folder.root)
    assert found.state == "finished" and "ended early (evaluation.patience)" in found.notes[-1]
    assert "(the weights of step 4, the best)" in found.notes[-1]
    for other in ("steps: 20\nevaluation: {patience: 3}", "steps: 20"):
        assert describe_finished(history_of(folder), config(tmp_path, other)) is None


def test_what_a_finished_run_was_not_trained_with_is_listed(
    ended: Callable[[str], RunFolder], tmp_path: Path
) -> None:
    """`--set optimizer.lr=...` of a finished run was ignored without a word."""
    folder = ended("steps: 8")
    assert changed_since(history_of(folder), config(tmp_path, "steps: 8")) == []
    elsewhere = "steps: 8\nname: other\nslurm: {nodes: 2}\ncheckpoint: {every: 3}\nwandb: true"
    assert changed_since(history_of(folder), config(tmp_path, elsewhere)) == []
    other = config(tmp_path, "steps: 8\noptimizer: {lr: 0.5}\nlora: {rank: 2, alpha: 4}")
    changed = changed_since(history_of(folder), other)
    assert "optimizer.lr 5e-05 (now 0.5)" in changed
    assert "lora.rank null (now 2)" in changed


def test_a_key_that_an_older_version_did_not_have_is_no_change(
    ended: Callable[[str], RunFolder], tmp_path: Path
) -> None:
    """After an update, a run printed `label_smoothing null (now 0.0)`; it behaves as before."""
    asked = "steps: 8\nlora: {rank: 2, alpha: 4}\nslurm: {options: {mem: 8G}}"
    folder = ended(asked)
    whole = yaml.safe_load(folder.config.read_text())
    for section, key in ((None, "label_smoothing"), ("optimizer", "eps"), ("lora", "merge")):
        older = {**whole, section: dict(whole[section])} if section else dict(whole)
        del (older[section] if section else older)[key]
        folder.config.write_text(yaml.safe_dump(older))
        assert changes(history_of(folder), config(tmp_path, asked)) == {}
    whole.pop("label_smoothing"), whole.pop("lora")
    folder.config.write_text(yaml.safe_dump(whole))
    changed = changed_since(history_of(folder), config(tmp_path, f"{asked}\nlabel_smoothing: 0.1"))
    assert "label_smoothing 0.0 (now 0.1)" in changed and "lora.rank null (now 2)" in changed


def test_a_key_that_a_dataset_of_a_list_did_not_have_is_no_change(
    ended: Callable[[str], RunFolder], tmp_path: Path
) -> None:
    folder = ended("steps: 8")
    several = RUN.replace("dataset: {asset: wikitext}\n", "")
    several += "steps: 8\ndatasets: [{asset: a, weight: 2}, {asset: b}]\n"
    (tmp_path / "several.yaml").write_text(several)
    now = RunConfig.load(tmp_path / "several.yaml")
    older = yaml.safe_load(now.to_yaml())
    for source in older["datasets"]:
        del source["too_long"], source["limit"]
    folder.config.write_text(yaml.safe_dump(older))
    assert changes(history_of(folder), now) == {}
    older["datasets"][0]["weight"] = 1.0
    folder.config.write_text(yaml.safe_dump(older))
    assert list(changes(history_of(folder), now)) == ["datasets"]
