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
from runner.errors import CommandGroup, IncompleteError
from runner.inputs import resolve
from runner.job.access import disk_still_needed
from runner.launch.rank import Rank, give_up
from runner.run_folder.checkpoints import TrainingState, signature
from runner.run_folder.heartbeat import Heartbeat
from runner.run_folder.layout import RunFolder
from runner.run_folder.status import status
from runner.training.start import disk_error
from stage.bundle.bundle import Bundle
from stage.serve.catalogue import Catalogue
from stage.serve.names import why_missing
from tests.first_job.harness import programs
from tests.runner.conftest import Cluster
from tests.runner.folders import line, run_folder
from tests.runner.preflight.test_preflight import Terminal, terminal
from tests.support.environment.laptop import alone
from tests.support.training.one_start import place_alone

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


def test_room_that_a_runs_own_checkpoints_take_is_not_asked_for_again(cluster: Cluster) -> None:
    config = RunConfig.load(cluster.write(checkpoint={"keep": 2}))
    checkpoints = cluster.output() / "checkpoints"
    assert disk_still_needed(config, checkpoints, 3500) == 3500
    for step in (50, 100):
        (checkpoint(cluster.output(), step) / "weights").write_bytes(bytes(700))
    there = sum(p.stat().st_size for p in checkpoints.rglob("*") if p.is_file())
    assert disk_still_needed(config, checkpoints, 3500) == 3500 - there < 2100
    assert (
        disk_still_needed(config, checkpoints, 1500) == 500
    )  # the next one is written before an old one goes


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
    assert code == 2
    assert "made with sequence_length 32 (now 16)." in said and "aa" not in said.split("step-50")[1]


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


def test_after_a_check_on_a_laptop_the_next_command_goes_to_its_cluster(terminal: Terminal) -> None:
    """It contradicted the README: `runner train`, here."""
    bundle = terminal.cluster.bundle
    terminal.cluster.write(engine={"name": "ddp"}, manifest="my.yaml")
    Path("clusters.yaml").write_text("far: {host: login, folder: work}\nother: {folder: /x}\n")
    code, said, _ = terminal.run("check", "tiny.yaml")
    to = "--to far   (or: other)"
    assert code == 0 and said.endswith(f"\nnext: runner submit tiny.yaml --bundle {bundle} {to}\n")
    assert "nothing is held out" not in said
    Path("clusters.yaml").write_text("far: [\n")  # no reason to say nothing
    assert "\nnext: runner train tiny.yaml" in terminal.run("check", "tiny.yaml")[1]
    Path(".airlift/lock").mkdir(parents=True)
    Path(".airlift/lock/step").touch()
    assert "\nnext: go.sh" in terminal.run("check", "tiny.yaml")[1]


def test_where_sbatch_has_no_cluster_the_next_command_trains_here(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said `next: runner submit`, two lines below that this machine belongs to no cluster."""
    terminal.cluster.write(engine={"name": "ddp"})
    says = "echo 'sbatch: error: Could not establish a configuration source' >&2; exit 1"
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", sbatch=says))
    code, said, _ = terminal.run("check", "tiny.yaml")
    assert code == 0 and "this machine belongs to no Slurm cluster" in said
    assert f"\nnext: runner train tiny.yaml --bundle {terminal.cluster.bundle}\n" in said


def test_plain_files_for_a_model_are_refused_with_a_way_out(terminal: Terminal) -> None:
    terminal.cluster.write(model={"asset": "notes"})
    said = terminal.refused("check", "tiny.yaml")
    assert (
        "`model.asset: notes` is plain files without a config.json, not a model" in said
        and "`path:`" in said
    )


def test_a_full_disk_is_told_with_its_path_the_step_and_what_is_whole(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "metrics.jsonl"))
    folder = RunFolder(tmp_path)
    assert "after step 3; no checkpoint had been written" in str(
        disk_error(full, tmp_path / "bundle", folder, 3)
    )
    checkpoint(tmp_path)
    said = str(disk_error(full, tmp_path / "bundle", folder, 57))
    assert f"{tmp_path / 'metrics.jsonl'}: No space left on device, after step 57" in said
    assert "step-50 was written before and is whole" in said and "airlift/store" not in said
    assert "airlift/store" not in CommandGroup.free_space


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


def test_a_disk_too_full_for_the_reason_of_a_failure_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class EndedError(Exception):
        pass

    def ended(code: int) -> None:
        raise EndedError(code)

    vitals = Heartbeat(tmp_path, 0)
    monkeypatch.setattr(vitals, "fail", full)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setenv("AIRLIFT_RANK", "1")
    error = IncompleteError("run: No space left on device, after step 57")
    with pytest.raises(EndedError, match="5"):
        give_up(Rank(place_alone(), vitals), f"error: {error}", error)
    assert "after step 57" in capsys.readouterr().err


def test_an_asset_asked_for_by_its_bare_name_is_told_as_what_it_is_here(bundle: Path) -> None:
    said = why_missing(Catalogue.of(Bundle.open(bundle)), "datasets", "notes")
    assert said == "dataset notes: not in this bundle; it is here as `bundle/notes`"


def test_an_entry_to_paste_has_no_name_that_the_manifest_has(bundle: Path) -> None:
    """A key that is written twice ended `stage fetch`."""
    said = why_missing(Catalogue.of(Bundle.open(bundle)), "datasets", "acme/notes")
    assert "(your own notes is here as `bundle/notes`)" in said
    assert "\n  acme-notes:\n    dataset: acme/notes" in said


def test_a_run_that_ended_by_a_loss_that_is_no_number_is_not_advised_to_do_the_same_again(
    tmp_path: Path,
) -> None:
    folder = run_folder(tmp_path / "made", steps=30)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line(31, loss=None)) + "\n")
    said = "\n".join(status(folder).lines())
    assert "its loss was no number at step 31" in said and "run the same command again" not in said
