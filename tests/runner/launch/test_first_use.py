"""Faults of the first use: output into the bundle, space counted twice, late refusals of ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.data.recipe import data_key, recipes
from runner.inputs import resolve
from runner.run_folder.resume import signature
from runner.run_folder.training_state import TrainingState
from stage.bundle.bundle import Bundle
from stage.serve.catalogue import Catalogue
from stage.serve.hub_api import why_missing
from tests.runner.job.test_preflight import Terminal, terminal

__all__ = ["terminal"]


def checkpoint(root: Path, step: int = 50, **signature: object) -> Path:
    folder = root / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    state = TrainingState(
        step=step,
        world_size=1,
        zero=0,
        precision="bf16",
        signature={"data": "aa", **signature},
        engine="ddp",
    )
    (folder / "state.json").write_text(json.dumps(state.__dict__))
    return folder


@pytest.mark.parametrize("command", ["train", "prepare", "submit", "bench", "check"])
def test_an_output_inside_the_bundle_is_refused_before_it_spoils_it(
    terminal: Terminal, command: str
) -> None:
    terminal.cluster.write()
    inside = terminal.cluster.bundle / "output" / "tiny"
    assert "inside the bundle" in terminal.refused(command, "tiny.yaml", "--output", str(inside))
    assert not inside.parent.exists()


@pytest.mark.parametrize("sweep", [(), ("--array", "seed=1,2")])
def test_a_printed_script_has_a_batch_that_divides(
    terminal: Terminal, sweep: tuple[str, ...]
) -> None:
    terminal.cluster.write(batch={"global": 9}, slurm={"nodes": 2})
    said = terminal.refused("submit", "tiny.yaml", "--print", *sweep)
    assert "batch.global 9 does not divide among 2 ranks" in said


def test_what_a_run_to_be_resumed_has_other_than_before_is_said_before_its_ranks(
    terminal: Terminal,
) -> None:
    """Of epochs, only the data tell the steps; an earlier start has recorded their number."""
    given = {"steps": None, "epochs": 10, "engine": {"name": "ddp"}, "precision": "bf16"}
    path, output = terminal.cluster.write(**given), terminal.cluster.output()
    config = RunConfig.load(path)
    inputs = resolve(config, terminal.cluster.bundle)
    data = data_key(recipes(config, inputs, 32)["train"])
    checkpoint(output, **signature(config, inputs, data, 8))
    (output / "config.yaml").write_text(config.to_yaml())
    facts = {"num_sequences": 100, "batch": {"global": 8}, "bundle_id": "0" * 64}
    (output / "environment.json").write_text(json.dumps(facts))
    code, said, _ = terminal.run("check", "tiny.yaml")
    assert code == 0 and "resumes from step-50" in said and "other settings" not in said
    assert "note: this run was started with the bundle 000000000000, and goes on with" in said
    code, said, _ = terminal.run("check", "tiny.yaml", "--set", "optimizer.lr=0.005")
    assert code == 0 and re.search(r"note: .* other settings: optimizer.lr \S+ \(now 0.005\)", said)
    code, _, said = terminal.run("check", "tiny.yaml", "--set", "epochs=1")
    assert code == 2 and "has done 50 steps; now 13 are asked for" in said
    assert "--set epochs=10" in said
    code, _, said = terminal.run("check", "tiny.yaml", "--set", "sequence_length=16")
    assert code == 2 and "made with sequence_length 32 (now 16)." in said
    code, _, said = terminal.run("check", "tiny.yaml", "--set", "seed=7")
    assert code == 2 and "step-50: this checkpoint was made with seed 42; the run now has 7" in said
    (output / "environment.json").write_text(json.dumps({"num_steps": 50, "exported_step": 50}))
    (output / "metrics.jsonl").write_text('{"step": 50, "loss": 1.0}\n')
    (output / "model").mkdir()
    code, said, _ = terminal.run("check", "tiny.yaml", "--set", "optimizer.lr=0.005")
    assert code == 0 and "finished already" in said and "(now 0.005)" in said
    code, _, said = terminal.run("submit", "tiny.yaml", "-q", "--set", "optimizer.lr=0.005")
    assert code == 0 and "has changed since: optimizer.lr" in said


def test_plain_files_for_a_model_are_refused_with_a_way_out(terminal: Terminal) -> None:
    terminal.cluster.write(name="n" * 201)
    assert "of at most 200" in terminal.refused("check", "tiny.yaml")
    terminal.cluster.write(model={"asset": "notes"})
    said = terminal.refused("check", "tiny.yaml")
    assert (
        "`model.asset: notes` is plain files without a config.json, not a model" in said
        and "`path:`" in said
    )


def test_a_changed_sequence_length_is_told_by_its_name_and_both_values(terminal: Terminal) -> None:
    config = RunConfig.load(terminal.cluster.write())
    output = terminal.cluster.output()
    checkpoint(output, **signature(config, resolve(config, terminal.cluster.bundle), "aa", 8))
    (output / "config.yaml").write_text(config.to_yaml())
    arguments = ("check", "tiny.yaml", "--set", "engine.name=ddp", "--set", "precision=bf16")
    code, _, said = terminal.run(*arguments, "--set", "sequence_length=16")
    assert code == 2 and config.dataset is not None
    assert "made with sequence_length 32 (now 16)." in said and "aa" not in said.split("step-50")[1]
    assert f"made with other data of `{config.dataset.asset}`" in terminal.run(*arguments)[2]


def test_an_entry_to_paste_has_no_name_that_the_manifest_has(bundle: Path) -> None:
    """A key that is written twice ended `stage fetch`."""
    said = why_missing(Catalogue.of(Bundle.open(bundle)), "datasets", "acme/notes")
    assert "(your own notes is here as `bundle/notes`)" in said
    assert "\n  acme-notes:\n    dataset: acme/notes" in said
