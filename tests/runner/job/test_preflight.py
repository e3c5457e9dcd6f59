"""A run that cannot work is refused before the launch: a message, an exit code, no files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from runner.cli import main
from runner.config.engine import LoraConfig
from runner.config.run_config import RunConfig
from runner.from_stage import UsageError
from runner.inputs import Inputs, resolve
from runner.job.check import check_run
from runner.job.findings import report
from runner.job.run import Asked, RankCount
from runner.job.training_run import TrainingRun
from runner.run_folder.layout import RunFolder
from stage.bundle.bundle import Bundle, verify
from stage.bundle.receipt import record
from stage.bundle.verifier import state_folder
from tests.remedies.obeyed import in_it, obeys
from tests.runner.conftest import Cluster
from tests.support.environ import kept_environment


def check(config: RunConfig, inputs: Inputs, folder: RunFolder, ranks: int) -> list[str]:
    """What is said of a run; raises what would end it."""
    said: list[str] = []
    asked = Asked(RankCount(ranks, ranks, "here"))
    run = TrainingRun(config, inputs, folder, inputs.bundle, (), asked)
    report(check_run(run), said.append)
    return said


@dataclass
class Terminal:
    """`runner` in this process, in a user's folder: quick enough for many wrong run files."""

    cluster: Cluster

    def run(self, *arguments: str, bundle: Path | None = None) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        with_bundle = [*arguments, "--bundle", str(bundle or self.cluster.bundle)]
        with kept_environment():
            done = CliRunner().invoke(main, with_bundle, catch_exceptions=False)
        return done.exit_code, done.stdout, done.stderr

    def refused(self, *arguments: str, code: int = 2, bundle: Path | None = None) -> str:
        """What was said by a command that must be refused and must leave nothing behind."""
        found, out, err = self.run(*arguments, bundle=bundle)
        assert found == code, (out, err)
        assert err.startswith("error: ")
        mistakes = re.match(r"error: \S+: (\d+) mistakes:\n", err)
        assert len(err.rstrip().splitlines()) <= (1 + 2 * int(mistakes[1]) if mistakes else 2), err
        assert not (self.cluster.folder / "output").exists()
        return err


@pytest.fixture
def terminal(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.chdir(cluster.folder)
    for name in [
        n for n in os.environ if n.startswith(("SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_"))
    ]:
        monkeypatch.delenv(name)
    yield Terminal(cluster)


GPT2 = {"asset": "tiny-gpt2"}
BAD_RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an asset that is not there": (
        {"model": {"asset": "tiny-brt"}},
        ("tiny.yaml:4: `model.asset: tiny-brt`", "Did you mean `tiny-bert`?", "reference"),
    ),
    "a dataset that is not there": (
        {"dataset": {"asset": "refrence"}},
        ("`dataset.asset: refrence`", "Did you mean `reference`?"),
    ),
    "a dataset for a model": (
        {"model": {"asset": "numbers"}},
        ("`model.asset: numbers` is a dataset, not a model",),
    ),
    "files for a dataset": (
        {"dataset": {"asset": "notes"}},
        ("`dataset.asset: notes` is", "not a dataset"),
    ),
    "files for an environment": (
        {"environment": {"asset": "notes"}},
        ("`environment.asset: notes` is", "not an environment"),
    ),
    "a config that is not there": (
        {"dataset": {"asset": "reference", "config": "chaptrs"}},
        ("`dataset.config: chaptrs`", "no such config", "It has: chapters"),
    ),
    "a column that is not there": (
        {"dataset": {"asset": "numbers", "text": "txt"}},
        ("`dataset.text: txt`", "no such column", "text (string), label (int64)"),
    ),
    "a column that is not text": (
        {"dataset": {"asset": "numbers", "text": "label"}},
        ("holds int64, not text", "Columns of text: text"),
    ),
    "a split that is not there": (
        {"dataset": {"asset": "numbers", "train": "training"}},
        ("`dataset.train: training`", "no such split", "It has: "),
    ),
    "a validation split that is not there": (
        {"dataset": {"asset": "numbers", "validation": "validation"}},
        ("`dataset.validation: validation`", "no such split", "test", "train", "validation: 10%"),
    ),
    "sequences longer than the model": (
        {"sequence_length": 129},
        ("sequence_length 129", "has 128 positions", "Set sequence_length: 128 or less"),
    ),
    "a batch that does not divide": (
        {"batch": {"global": 9, "micro": 2}},
        ("batch.global 9 does not divide among 2 ranks x micro 2", "Set batch.global: 8 or 12"),
    ),
    "masked-lm with GPT-2": (
        {"model": GPT2, "sequence_length": 32},
        ("no masked-lm model of type `gpt2`", "Set task: causal-lm"),
    ),
    "an unknown key": (
        {"epoch": 3},
        ("tiny.yaml:", "unknown key `epoch`", "Did you mean `epochs`?"),
    ),
    "a ds_config.json that is not there": (
        {"engine": {"config": "ds.json"}},
        ("tiny.yaml:", "ds.json: no such file"),
    ),
}


@pytest.mark.parametrize("bad", BAD_RUNS)
def test_a_run_file_that_cannot_work_is_refused_before_anything_starts(
    terminal: Terminal, bad: str
) -> None:
    changes, words = BAD_RUNS[bad]
    terminal.cluster.write(**changes)
    said = terminal.refused("train", "tiny.yaml", "--processes", "2")
    assert "tiny.yaml" in said or str(terminal.cluster.bundle) in said
    assert [word for word in words if word not in said] == [], said


def test_a_good_run_file_passes_and_check_leaves_nothing_behind(terminal: Terminal) -> None:
    terminal.cluster.write()
    code, out, err = terminal.run("train", "tiny.yaml", "--processes", "2", "--dry-run")
    assert code == 0, err
    assert "model tiny-bert: bert" in out
    assert re.search(r"300 rows to train on \(limit.train, of [0-9,]+\)", out), out
    assert not (terminal.cluster.folder / "output").exists()


def _without(name: str) -> Callable[[Path], None]:
    return lambda bundle: (bundle / name).unlink()


BAD_BUNDLES: dict[str, tuple[Callable[[Path], object], int, tuple[str, ...]]] = {
    "unfinished": (_without("tagmanifest-sha256.txt"), 2, ("is unfinished", "stage fetch")),
    "not there": (shutil.rmtree, 2, ("no such folder",)),
    "without its lock": (_without("stage.lock"), 1, ("stage.lock", "stage verify")),
    "with a model that lost its config": (
        _without("data/models/tiny-bert/config.json"),
        1,
        ("config.json: cannot be read", "stage verify"),
    ),
    "with cut weights": (
        lambda bundle: os.truncate(bundle / "data/models/tiny-bert/model.safetensors", 20),
        1,
        ("model.safetensors (mismatched)", "stage verify"),
    ),
    "with a broken tokenizer": (
        lambda bundle: (bundle / "data/models/tiny-bert/tokenizer.json").write_text("{"),
        1,
        ("tokenizer.json (mismatched)", "stage verify"),
    ),
}


@pytest.mark.parametrize("bad", BAD_BUNDLES)
def test_a_bundle_that_cannot_be_used_is_refused_before_anything_starts(
    terminal: Terminal, tmp_path: Path, bad: str
) -> None:
    damage, code, words = BAD_BUNDLES[bad]
    copy = tmp_path / "carried"
    shutil.copytree(terminal.cluster.bundle, copy)
    damage(copy)
    terminal.cluster.write()
    said = terminal.refused("train", "tiny.yaml", "--processes", "2", code=code, bundle=copy)
    assert str(copy) in said
    assert [word for word in words if word not in said] == [], said


REQUIRED = {"bundle": {"verified": "required"}}


@obeys("runner/job/checks/any_run.py", "stage verify {}{}")
def test_what_is_known_of_the_bundle_is_printed_and_required_where_asked_for(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    copy = tmp_path / "carried"
    shutil.copytree(terminal.cluster.bundle, copy)
    monkeypatch.setattr("stage.bundle.verifier.UNSURE_NS", 0)
    terminal.cluster.write()
    dry_run = ("train", "tiny.yaml", "--processes", "2", "--dry-run")
    assert (
        f": not verified here; names and sizes are right (stage verify {copy} reads every byte)"
        in terminal.run(*dry_run, bundle=copy)[1]
    )
    terminal.cluster.write(**REQUIRED)
    for command in ("train", "check", "prepare", "submit"):
        said = terminal.refused(command, "tiny.yaml", code=3, bundle=copy)
        assert "`bundle.verified: required`" in said and f"stage verify {copy}" in said
    state = state_folder(os.environ)
    assert record(state, verify(copy, state=state)) is None
    code, out, err = terminal.run(*dry_run, bundle=copy)
    assert code == 0 and "every byte verified 0 s ago on " in out and "unchanged since" in out, err
    (copy / "data/models/tiny-bert/config.json").touch()
    assert "changed since it was verified" in terminal.refused(
        "train", "tiny.yaml", code=3, bundle=copy
    )


@obeys("runner/inputs/__init__.py", "Give the folder of the bundle that is asked for with --bundle")
def test_a_run_that_names_its_bundle_reads_no_other(terminal: Terminal) -> None:
    bundle, another = terminal.cluster.bundle, "ab" * 32
    found = Bundle.open(bundle).id
    terminal.cluster.write(bundle={"id": another})
    for command in ("train", "check", "prepare", "submit"):
        said = terminal.refused(command, "tiny.yaml", code=1)
        assert f"`bundle.id` asks for {another}" in said and f"bundle: {{id: {found}}}" in said
    terminal.cluster.write(bundle=yaml.safe_load(in_it(said, r"(?<=bundle: )\{id: .*\}")))
    code, out, err = terminal.run("train", "tiny.yaml", "--processes", "2", "--dry-run")
    assert code == 0, err
    assert f"stage verify {bundle} --id {found}" in out or "every byte verified" in out


@pytest.fixture
def resolved(cluster: Cluster) -> tuple[RunConfig, Inputs, RunFolder]:
    config = RunConfig.load(cluster.write())
    return config, resolve(config, cluster.bundle), RunFolder(cluster.output())


def test_first_weights_of_another_model_are_refused(
    resolved: tuple[RunConfig, Inputs, RunFolder], tmp_path: Path
) -> None:
    config, inputs, folder = resolved
    other = tmp_path / "model"
    shutil.copytree(inputs.model.path, other)
    config = replace(config, model=replace(config.model, init=str(other)))
    check(config, inputs, folder, 2)
    wider = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**wider, "hidden_size": 128}))
    with pytest.raises(UsageError, match="are not of the shape of"):
        check(config, inputs, folder, 2)


def test_a_model_without_weights_is_only_good_for_scratch(
    resolved: tuple[RunConfig, Inputs, RunFolder],
) -> None:
    config, inputs, folder = resolved
    digests = {
        name: d for name, d in inputs.model.digests.items() if not name.endswith(".safetensors")
    }
    bare = replace(inputs, model=replace(inputs.model, digests=digests))
    said = check(replace(config, model=replace(config.model, init="scratch")), bare, folder, 2)
    assert "model tiny-bert: bert, parameters not known, init scratch" in said
    assert any(line.startswith("memory and disk: not checked") for line in said)
    assert not any("the memory fits" in line for line in said)
    with pytest.raises(UsageError, match="`tiny-bert` has no weights"):
        check(replace(config, lora=LoraConfig()), bare, folder, 2)


def test_a_file_in_the_place_of_the_output_and_few_texts_are_told(terminal: Terminal) -> None:
    (terminal.cluster.folder / "blocked").write_text("")
    few = {"asset": "numbers", "limit": {"train": 20}, "validation": None}
    terminal.cluster.write(dataset=few, batch={"global": 64})
    said = terminal.refused("check", "tiny.yaml", "--processes", "2", "--output", "blocked/run")
    assert "a folder is needed there" in said
    _, out, _ = terminal.run("check", "tiny.yaml", "--processes", "2")
    assert "a step takes 64: each step has some of them several times" in out
