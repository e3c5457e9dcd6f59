"""Faults of the first use: output into the bundle, space counted twice, late refusals of ranks."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.config.run_config import RunConfig
from runner.data.recipe import data_key, recipes
from runner.inputs import resolve
from runner.run_folder.checkpoints import TrainingState, signature
from runner.run_folder.layout import RunFolder
from runner.training.start import disk_error
from stage.bundle.bundle import Bundle
from stage.serve.catalogue import Catalogue
from stage.serve.names import why_missing
from tests.first_job.harness import programs
from tests.runner.preflight.test_preflight import Terminal, terminal
from tests.support.environment.laptop import alone

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
    facts = {"num_sequences": 100, "batch": {"global": 8}}
    (output / "environment.json").write_text(json.dumps(facts))
    code, said, _ = terminal.run("check", "tiny.yaml")
    assert code == 0 and "resumes from step-50" in said and "other settings" not in said
    code, said, _ = terminal.run("check", "tiny.yaml", "--set", "optimizer.lr=0.005")
    assert code == 0 and re.search(r"note: .* other settings: optimizer.lr \S+ \(now 0.005\)", said)
    code, _, said = terminal.run("check", "tiny.yaml", "--set", "epochs=1")
    assert code == 2 and "has done 50 steps; now 13 are asked for" in said
    assert "--set epochs=10" in said
    (output / "environment.json").write_text(json.dumps({"num_steps": 50, "exported_step": 50}))
    (output / "metrics.jsonl").write_text('{"step": 50, "loss": 1.0}\n')
    (output / "model").mkdir()
    code, said, _ = terminal.run("check", "tiny.yaml", "--set", "optimizer.lr=0.005")
    assert code == 0 and "finished already" in said and "(now 0.005)" in said
    assert "resumes from" not in said and "--set name=NAME" in said
    renamed = ("--set", "optimizer.lr=0.005", "--set", "name=b")
    _, said, _ = terminal.run("check", "tiny.yaml", *renamed)
    assert "next: " in said and "finished" not in said


def test_after_a_check_the_next_command_is_printed_with_what_was_given(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.cluster.write(engine={"name": "ddp"})
    bundle, given = terminal.cluster.bundle, ("--set", "batch.micro=1")
    assert terminal.run("check", "tiny.yaml", *given, "--processes", "2")[1].endswith(
        f"\nnext: runner train tiny.yaml --bundle {bundle} --set batch.micro=1 --processes 2\n"
    )
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch="exit 0"))
    assert terminal.run("check", "tiny.yaml", "-o", "there")[1].endswith(
        f"\nnext: runner submit tiny.yaml --bundle {bundle} --output {Path.cwd() / 'there'}\n"
    )


def test_plain_files_for_a_model_are_refused_with_a_way_out(terminal: Terminal) -> None:
    terminal.cluster.write(model={"asset": "notes"})
    said = terminal.refused("check", "tiny.yaml")
    assert (
        "`model.asset: notes` is plain files without a config.json, not a model" in said
        and "`path:`" in said
    )


def test_a_save_that_fails_says_quota_inodes_or_space(tmp_path: Path) -> None:
    """On real disks, but for the quota; torch hides the number of the error."""
    folder = RunFolder(tmp_path)
    quota = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(tmp_path / "model.pt"))
    said = str(disk_error(quota, tmp_path / "bundle", folder, 3))
    assert "your quota is used up, of bytes or of files" in said and "lfs quota" in said
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from runner.disks import what_is_used_up
print(what_is_used_up(Path({str(tmp_path)!r}), OSError("file write failed")))
"""
    for options, words in (
        ("size=512k", "the disk is full"),
        ("size=64m,nr_inodes=1", "no inode is left"),
        ("size=64m", "None"),
    ):
        mount = f'mount -t tmpfs -o {options} none {tmp_path} && exec "$@"'
        done = subprocess.run(
            [*alone("m"), "sh", "-c", mount, "sh", sys.executable, "-c", code],
            capture_output=True,
            text=True,
        )
        assert words in done.stdout, (options, done.stdout, done.stderr)


def test_an_entry_to_paste_has_no_name_that_the_manifest_has(bundle: Path) -> None:
    """A key that is written twice ended `stage fetch`."""
    said = why_missing(Catalogue.of(Bundle.open(bundle)), "datasets", "acme/notes")
    assert "(your own notes is here as `bundle/notes`)" in said
    assert "\n  acme-notes:\n    dataset: acme/notes" in said
