"""A checkpoint is whole or absent. A damaged one is named and skipped, a foreign one rejected.

These tests use one process, and an engine that writes small files. test_resume does the same with
real runs.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.config.engine import CheckpointConfig
from runner.from_stage import DamageError, UsageError
from runner.run_folder.resume import check_before_launch, check_resumable
from runner.training.components.process_group import Ranks
from runner.training.saving import checkpoints as module
from runner.training.saving.checkpoints import Checkpoints
from tests.remedies.obeyed import in_it, obeys
from tests.runner.training.saving.conftest import SIGNATURE, Killed, SmallEngine, names, save, state


def test_the_oldest_go_and_the_newest_by_number_is_taken(
    checkpoints: Checkpoints, folder: Path
) -> None:
    save(checkpoints, 8, 9, 10, 11)
    assert names(folder) == {"step-10", "step-11", "latest"}
    assert (folder / "latest").read_text().strip() == "step-11"
    found = checkpoints.newest_whole()
    assert found is not None and found[1].step == 11


def test_checkpoints_by_the_clock_and_at_the_end_of_epochs(folder: Path, ranks: Ranks) -> None:
    clock = [0.0]
    every_ten = CheckpointConfig(every="10 min")
    checkpoints = Checkpoints(folder, every_ten, ranks, print, now=lambda: clock[0])
    clock[0] = 599.0
    assert not checkpoints.is_time()
    clock[0] = 600.0
    assert checkpoints.is_time() and not checkpoints.is_due(2)
    save(checkpoints, 2)
    assert not checkpoints.is_time()
    by_epoch = Checkpoints(folder, CheckpointConfig(every="epoch"), ranks, print)
    assert by_epoch.is_due(3, ends_epoch=True) and not by_epoch.is_due(2)
    assert not by_epoch.is_time()


def test_a_loss_that_is_as_low_as_the_lowest_is_no_gain() -> None:
    found = state(2)
    for step, loss in ((2, 0.5), (4, 0.5), (6, 0.7)):
        found.step = step
        found.note_loss(loss)
    assert (found.lowest, found.lowest_step, found.without_gain) == (0.5, 2, 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda c: flip(c / "engine/weights.pt"), "engine/weights.pt"),
    "a file cut short": (lambda c: os.truncate(c / "engine/moments.pt", 3), "engine/moments.pt"),
    "a file that grew": (lambda c: os.truncate(c / "engine/moments.pt", 300), "engine/moments.pt"),
    "a file gone": (lambda c: (c / "engine/moments.pt").unlink(), "engine/moments.pt is missing"),
    "a file too many": (
        lambda c: (c / "engine/extra.pt").write_text("x"),
        "engine/extra.pt is not in",
    ),
    "another state": (lambda c: flip(c / "state.json"), "state.json"),
    "no list": (lambda c: (c / "files.json").unlink(), "files.json is missing"),
    "half a list": (lambda c: os.truncate(c / "files.json", 30), "cannot be read"),
    "an empty list": (lambda c: (c / "files.json").write_text("{}"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    checkpoints: Checkpoints, folder: Path, said: list[str], damage: str
) -> None:
    save(checkpoints, 2, 4)
    do, named = DAMAGES[damage]
    do(folder / "step-4")
    assert checkpoints.newest_whole() == (folder / "step-2", state(2))
    assert len(said) == 1
    assert "step-4" in said[0] and named in said[0]


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        # The error of torch.save on a full disk.
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
        RuntimeError("basic_ios::clear: iostream error while write"),
    ],
    ids=["the kernel's word", "torch's word", "the stream's word"],
)
def test_a_full_disk_leaves_the_checkpoints_before_it_whole(
    checkpoints: Checkpoints, folder: Path, problem: Exception
) -> None:
    save(checkpoints, 2, 4)
    with pytest.raises(OSError):
        checkpoints.save(SmallEngine(problem=problem), state(6))
    assert names(folder) == {"step-2", "step-4", "latest"}
    assert checkpoints.newest_whole() == (folder / "step-4", state(4))
    save(checkpoints, 6)
    assert checkpoints.newest_whole() == (folder / "step-6", state(6))


def test_a_fault_that_is_no_full_disk_stays_a_fault(checkpoints: Checkpoints) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        checkpoints.save(
            SmallEngine(problem=RuntimeError("mat1 and mat2 shapes cannot be multiplied")), state(6)
        )


def test_a_damaged_checkpoint_of_a_later_step_takes_no_good_ones_place(
    folder: Path, ranks: Ranks, said: list[str]
) -> None:
    save(Checkpoints(folder, CheckpointConfig(keep=2), ranks, print), 200, 300)
    flip(folder / "step-300" / "engine" / "weights.pt")
    resumed = Checkpoints(folder, CheckpointConfig(keep=1, best=True), ranks, said.append)
    (folder / "best.json").write_text(json.dumps({"step": 300, "validation_loss": 0.1}))
    assert resumed.newest_whole() == (folder / "step-200", state(200))
    assert resumed.mark_best(250, 0.2), "the damaged one was the best"
    save(resumed, 250)
    assert names(folder) == {"step-250", "latest", "best.json"}
    assert resumed.newest_whole() == (folder / "step-250", state(250))
    assert said[1:] == ["deleted, because step-250 is saved and they were damaged: step-300"]
    save(resumed, 300)
    assert resumed.newest_whole() == (folder / "step-300", state(300))


@pytest.mark.parametrize("moment", ["before it is hashed", "before the list", "before the rename"])
def test_a_kill_after_all_is_written_leaves_nothing_that_counts_either(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    moments: dict[str, tuple[object, str]] = {
        "before it is hashed": (module, "measured"),
        "before the list": (module.AtomicCheckpoint, "_publish"),
        "before the rename": (Path, "replace"),
    }
    save(checkpoints, 2)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(*moments[moment], killed)
        save(checkpoints, 4)
    assert names(folder) == {"step-2", "step-4.tmp", "latest"}
    assert checkpoints.newest_whole() == (folder / "step-2", state(2))
    save(checkpoints, 4)
    assert names(folder) == {"step-2", "step-4", "latest"}


def test_what_a_person_left_beside_the_checkpoints_stays(
    checkpoints: Checkpoints, folder: Path
) -> None:
    (folder / "step-best").mkdir()
    (folder / "notes.txt").write_text("mine")
    save(checkpoints, 2, 4, 6)
    assert {"step-best", "notes.txt", "step-4", "step-6"} <= names(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "fsdp"}, ("engine.name deepspeed", "now has fsdp")),
        ({"zero": 3}, ("zero 2", "now has 3")),
        ({"precision": "bf16"}, ("precision fp32", "now has bf16")),
        ({"signature": {**SIGNATURE, "batch.global": 16}}, ("batch.global 8", "now has 16")),
        ({"signature": {**SIGNATURE, "seed": 1}}, ("seed 42", "now has 1")),
        ({"signature": {**SIGNATURE, "data": "xyz"}}, ("data abc", "now has xyz")),
        ({"signature": {**SIGNATURE, "model": "acme/tiny-bert@2"}}, ("tiny-bert@1", "tiny-bert@2")),
        ({"signature": {**SIGNATURE, "task": "causal-lm"}}, ("masked-lm", "causal-lm")),
    ],
    ids=["engine", "stage", "precision", "batch", "seed", "data", "model", "task"],
)
def test_a_checkpoint_of_something_else_is_not_trained_on(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        check_resumable(state(4), state(0, **changes), Path("output/mine/checkpoints/step-4"))
    assert "step-4" in caught.value.message
    assert all(word in caught.value.message for word in words)
    assert "--set name=NAME" in caught.value.remedy


@pytest.mark.parametrize(
    ("key", "value", "named"), [("optimizer", "lion", "lion"), ("lora", "rank 8", "LoRA")]
)
def test_what_deepspeed_cannot_convert_is_refused_on_other_ranks_before_these_start(
    checkpoints: Checkpoints, folder: Path, key: str, value: str, named: str
) -> None:
    signed = {**SIGNATURE, key: value}
    found = state(4, signature=signed)
    checkpoints.save(SmallEngine(), found)
    for refuse in (
        lambda: check_before_launch(folder, signed, 1, None),
        lambda: check_resumable(found, replace(found, world_size=1), folder),
        lambda: check_resumable(found, replace(found, zero=1), folder),
    ):
        with pytest.raises(
            UsageError, match=f"does not convert a checkpoint of {named}.* 2 ranks at stage 2"
        ):
            refuse()
    check_resumable(found, found, folder)
    assert check_before_launch(folder, signed, 2, found.step)
    with pytest.raises(UsageError, match=r"made with engine\.name deepspeed; .* has fsdp"):
        check_before_launch(folder, signed, 2, found.step, "fsdp")
    for whole in (replace(found, engine=name, zero=0) for name in ("fsdp", "ddp", "deepspeed")):
        check_resumable(whole, replace(whole, world_size=1), folder)


@obeys("runner/training/saving/checkpoints.py", "To start again from step 0: give the run {}")
def test_without_a_complete_checkpoint_no_run_starts_over(
    checkpoints: Checkpoints, folder: Path
) -> None:
    save(checkpoints, 2)
    save(checkpoints, 4)
    for damaged in folder.glob("step-*/engine/weights.pt"):
        damaged.write_text("something else")
    with pytest.raises(DamageError, match="no checkpoint in it is as it was written") as caught:
        checkpoints.newest_whole()
    subprocess.run(in_it(caught.value.remedy, "rm -r .*"), shell=True, check=True)
    assert checkpoints.newest_whole() is None, "as in the folder of another name"
    save(checkpoints, 2)
    assert checkpoints.newest_whole() == (folder / "step-2", state(2))


def test_the_launcher_leaves_an_unreadable_checkpoint_to_the_ranks(
    checkpoints: Checkpoints, folder: Path
) -> None:
    save(checkpoints, 4)
    (folder / "step-4" / "state.json").write_text("{")
    assert check_before_launch(folder, {"seed": 1}, 2, None) is None


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files that cannot be removed, as open files on NFS."""
    held: set[str] = set()
    unlink = os.unlink

    def refuse(path: Any, *, dir_fd: int | None = None) -> None:
        if Path(path).name in held:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    return held


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing_and_goes_later(
    folder: Path, ranks: Ranks, said: list[str], in_use: set[str]
) -> None:
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=1), ranks, said.append)
    save(checkpoints, 2)
    in_use.add("weights.pt")
    save(checkpoints, 4)
    assert checkpoints.newest_whole() == (folder / "step-4", state(4))
    # The remains do not have the name of a checkpoint: no run resumes from half of one.
    assert names(folder) == {"step-2.0.gone", "step-4", "latest"}
    assert [line for line in said if "step-2 cannot" in line] == [
        "checkpoint step-2 cannot be removed now (Device or resource busy); "
        "the next one tries again"
    ]
    in_use.clear()
    save(checkpoints, 6)
    assert names(folder) == {"step-6", "latest"}
