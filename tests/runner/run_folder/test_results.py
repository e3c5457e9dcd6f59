"""What a command wrote: its results, whether it made progress, and what a kill cut off."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runner.run_folder.results import (
    ResultFile,
    half_written,
    is_log,
    is_quiet,
    progress,
    results,
    set_aside,
)
from runner.run_folder.run_lock import disk_time

ZIP = b"PK\x03\x04" + b"\0" * 60 + b"PK\x05\x06" + b"\0" * 18


def write(work: Path, *files: str | tuple[str, bytes | str], age: float = 0.0) -> None:
    """Files, each with its content; without one, a whole zip, or JSON."""
    for file in files:
        path, content = file if isinstance(file, tuple) else (file, None)
        if content is None:
            content = "{}" if path.endswith(".json") else ZIP
        target = work / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        if age:
            os.utime(target, (time.time() - age,) * 2)


def torn(work: Path) -> dict[str, str]:
    return {
        path.relative_to(work).as_posix(): why
        for path, why in half_written(work, results(work, {}))
    }


def digest(text: str) -> tuple[int, str]:
    return len(text), hashlib.sha256(text.encode()).hexdigest()


def test_results_are_the_files_that_did_not_travel_or_have_changed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    write(
        work,
        ("sft.py", "print(1)"),
        ("same size.py", "print(2)"),
        ("longer.py", "print(33)"),
        ("touched.py", "print(4)"),
        age=100,
    )
    travelled = {
        "sft.py": digest("print(1)"),
        "same size.py": digest("print(1)"),
        "longer.py": digest("print(3)"),
        "touched.py": digest("print(4)"),
        "removed.py": digest("x"),
    }
    (tmp_path / "work.json").write_text("{}")
    os.utime(work / "touched.py", (time.time() + 5,) * 2)
    os.utime(work / "same size.py", (time.time() + 5,) * 2)
    write(work, "out/model/a.pt", ("out/x.txt", "1"), "__pycache__/a.pyc", "out/.cache/b")
    (work / "link").symlink_to("sft.py")
    (work / "gone").symlink_to("nothing")
    found = results(work, travelled)
    assert {result.path for result in found} == {
        "same size.py",
        "longer.py",
        "out/model/a.pt",
        "out/x.txt",
    }
    assert found[-1].path == "same size.py" and found[-1].size == 8, "the newest last"
    asked = {
        ("out/**",): {"out/model/a.pt", "out/x.txt"},
        ("out",): {"out/model/a.pt", "out/x.txt"},
        ("./out/model/",): {"out/model/a.pt"},
        ("**/*.pt", "*.py"): {"out/model/a.pt", "same size.py", "longer.py"},
        ("out/*.txt",): {"out/x.txt"},
        ("out/**/x.txt",): {"out/x.txt"},
        ("ou",): set(),
        ("**/a.pt",): {"out/model/a.pt"},
    }
    for patterns, expected in asked.items():
        assert {result.path for result in results(work, travelled, patterns)} == expected


def test_what_travelled_and_is_older_than_the_unpacking_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "work", ("a.py", "print(2)"), age=100)
    (tmp_path / "work.json").write_text("{}")
    (tmp_path / "work" / "a.py").chmod(0)
    assert results(tmp_path / "work", {"a.py": digest("print(1)")}) == []


def test_there_are_no_results_before_there_is_a_working_folder(tmp_path: Path) -> None:
    assert results(tmp_path / "work", {}) == []
    assert is_quiet(tmp_path / "work", 10, time.time())


def test_a_large_tree_takes_seconds(tmp_path: Path) -> None:
    for folder in range(20):
        (tmp_path / str(folder)).mkdir()
        for number in range(500):
            (tmp_path / str(folder) / f"{number}.txt").touch()
    begun = time.monotonic()
    found = results(tmp_path, {}, ["*/*.txt"])
    assert len(found) == 10_000 and torn(tmp_path) == {}
    assert time.monotonic() - begun < 6, "100,000 files would take minutes"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/a/events.out.tfevents.17.host", True),
        ("train.log", True),
        ("nohup.out", True),
        ("wandb/run-1/files/output.txt", True),
        ("out/metrics.jsonl", True),
        ("a/err.err", True),
        ("out/trainer_log.jsonl", True),
        ("lightning_logs/version_1/metrics.csv", True),
        ("lightning_logs/version_1/hparams.yaml", True),
        ("log.txt", True),
        ("core.4711", True),
        ("outputs/2026/.hydra/config.yaml", True),
        ("lightning_logs/version_1/checkpoints/a.ckpt", False),
        ("predictions.jsonl", False),
        ("dialogs.jsonl", False),
        ("out/trainer_state.json", False),
        ("logs/best.pt", False),
        ("catalogue.csv", False),
        ("core/model.pt", False),
    ],
)
def test_logs_are_known_by_their_names(path: str, expected: bool) -> None:
    assert is_log(path) is expected


def test_a_start_that_wrote_only_logs_and_the_same_settings_made_nothing() -> None:
    before = [
        ResultFile("last.pt", 9, 1),
        ResultFile("args.json", 9, 1),
        ResultFile("train.log", 9, 1),
    ]
    idle = [
        ResultFile("last.pt", 9, 1),
        ResultFile("args.json", 9, 2),
        ResultFile("train.log", 99, 2),
        ResultFile("wandb/b.txt", 1, 2),
    ]
    assert progress(before, idle) == []
    made = [
        ResultFile("last.pt", 9, 2),
        ResultFile("table.json", 9, 2),
        ResultFile("args.json", 10, 2),
    ]
    assert progress(before, made) == made


def test_it_is_quiet_when_nothing_but_logs_was_changed_by_the_clock_of_the_disk(
    tmp_path: Path,
) -> None:
    write(tmp_path, "checkpoint-1/optimizer.pt", age=30)
    write(tmp_path, "train.log")
    now = disk_time(tmp_path)
    assert abs(now - time.time()) < 60
    assert is_quiet(tmp_path, 10, now) and not is_quiet(tmp_path, 40, now)
    write(tmp_path, "checkpoint-2/optimizer.pt", age=-5)  # a node whose clock is fast
    assert not is_quiet(tmp_path, 10, now)
    os.utime(tmp_path / "checkpoint-2/optimizer.pt", (now + 10**6,) * 2)
    assert is_quiet(tmp_path, 10, now), "a wrong time keeps no job waiting"


# In the order in which each library writes them; what a kill leaves is a beginning of that.
TRAINER = (
    "config.json",
    "model.safetensors",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
)
ACCELERATE = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
DCP = ("__0_0.distcp", "__1_0.distcp", ".metadata")


def tensors(path: Path) -> bytes:
    save_file({"a": torch.zeros(50), "b": torch.ones(3, 3)}, path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("first", "second", "files", "alone"),
    [
        ("out/checkpoint-2", "out/checkpoint-10", TRAINER, True),
        ("checkpoints/checkpoint_0", "checkpoints/checkpoint_1", ACCELERATE, False),
        ("dcp/step_9", "dcp/step_10", DCP, False),
    ],
)
def test_each_beginning_of_a_checkpoint_is_half_written_and_a_whole_one_is_not(
    tmp_path: Path, first: str, second: str, files: tuple[str, ...], alone: bool
) -> None:
    content = {
        name: tensors(tmp_path / "one") if name.endswith("s") and "." in name else ZIP
        for name in files
    } | {name: b'{"global_step": 2}' for name in files if name.endswith(".json")}
    for has_older in (True, False):
        for count in range(len(files) + 1):
            for part in (0.0, 0.5):
                work = tmp_path / f"{has_older} {count} {part}"
                if has_older:
                    write(work, *((f"{first}/{name}", content[name]) for name in files))
                (work / second).mkdir(parents=True)
                write(work, *((f"{second}/{name}", content[name]) for name in files[:count]))
                is_whole = count == len(files)
                if part and not is_whole and files[count] != ".metadata":  # it is renamed
                    data = content[files[count]]
                    write(work, (f"{second}/{files[count]}", data[: int(len(data) * part)]))
                if is_whole:
                    assert torn(work) == {}
                elif has_older:
                    assert [*torn(work)] == [second], (count, part, torn(work))
                elif alone and (count != 2 or part):
                    # After the weights alone nothing tells it from another tool's snapshot.
                    assert [*torn(work)] == [second], (count, part, torn(work))


def test_a_checkpoint_of_deepspeed_counts_when_latest_names_it(tmp_path: Path) -> None:
    states = "mp_rank_00_model_states.pt"
    write(tmp_path, f"out/global_step9/{states}", age=60)
    write(tmp_path, ("out/latest", "global_step9"), age=59)
    assert torn(tmp_path) == {}
    write(tmp_path, f"out/global_step10/{states}")
    assert torn(tmp_path) == {"out/global_step10": "`latest` names global_step9, before it"}
    write(tmp_path, ("out/latest", "global_step10"))
    assert torn(tmp_path) == {}
    write(tmp_path, ("out/latest", "global_step11"))
    assert torn(tmp_path) == {"out/latest": "it names global_step11, which is not there"}
    (tmp_path / "alone").mkdir()
    write(tmp_path / "alone", f"global_step1/{states}")
    assert "latest" in torn(tmp_path / "alone")["global_step1"]
    write(tmp_path / "alone", f"global_step1/{states}", age=60)
    write(tmp_path / "alone", "later.txt")
    assert torn(tmp_path / "alone") == {}, "it asked for no `latest`"


@pytest.mark.parametrize("tag", ["", "global_step11"])
def test_latest_of_deepspeed_names_the_newest_checkpoint_after_a_kill(
    tmp_path: Path, tag: str
) -> None:
    """Empty, load_checkpoint fails; without it, the training begins anew, without a word."""
    work = tmp_path / "work"
    work.mkdir()
    for step in (9, 10):
        write(work, f"out/global_step{step}/mp_rank_00_model_states.pt")
    write(work, ("out/latest", tag))
    said = set_aside(work, half_written(work, results(work, {})), tmp_path / "aside")
    assert said[-1] == "out/latest: names global_step10 now, the newest that is there"
    assert (work / "out/latest").read_text() == "global_step10" and torn(work) == {}
    assert (tmp_path / "aside/out/latest").read_text() == tag


def test_a_part_that_is_cut_off_takes_its_whole_checkpoint_along(tmp_path: Path) -> None:
    write(tmp_path, "out/checkpoint-9/trainer_state.json", "out/checkpoint-5/trainer_state.json")
    write(tmp_path, ("out/checkpoint-9/global_step9/a.pt", ""), ("best.ckpt", ""))
    assert torn(tmp_path) == {
        "best.ckpt": "it is cut off",
        "out/checkpoint-9": "a.pt: it is cut off",
    }


def test_a_shard_that_an_index_names_must_be_there(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})
    data = tensors(tmp_path / "one")
    write(tmp_path, ("m-1.safetensors", data), ("m.safetensors.index.json", index))
    assert torn(tmp_path) == {
        "m.safetensors.index.json": "it names m-2.safetensors, which is not there"
    }
    write(tmp_path, ("m-2.safetensors", data))
    assert torn(tmp_path) == {}


WHOLE: dict[str, tuple[str | tuple[str, bytes | str], ...]] = {
    "weights of a script, without state": ("checkpoint-5/config.json", "checkpoint-5/a.bin"),
    "evaluations, one folder per checkpoint": (
        "eval/checkpoint-5/results.json",
        "eval/checkpoint-10/results.json",
        "out/epoch_1/table.json",
    ),
    "stages that have numbers": (
        "step1/checkpoint-5/a.pt",
        "step1/a.pt",
        "step1/b.txt",
        "step2/checkpoint-5/a.pt",
    ),
    "fewer ranks than before": (
        *(f"checkpoint_0/random_states_{rank}.pkl" for rank in range(4)),
        *(f"checkpoint_1/random_states_{rank}.pkl" for rank in range(2)),
    ),
    "the start of Lightning that runs": (
        "lightning_logs/version_0/checkpoints/epoch=0-step=9.ckpt",
        "lightning_logs/version_0/metrics.csv",
        "lightning_logs/version_1/metrics.csv",
    ),
    "a pickle, and text": (("a.pt", b"\x80\x02}q\x00."), ("b.bin", "text"), ("c.ckpt", "text")),
    "Megatron's and others' pointers": (("latest", "12"), "step_12/a.pt", "step_13/a.pt"),
    "Trainer in DeepSpeed": (
        "checkpoint-9/global_step9/a.pt",
        ("checkpoint-9/latest", "global_step9"),
        "checkpoint-9/trainer_state.json",
    ),
    "only the model of Trainer": ("checkpoint-9/a.bin", "checkpoint-9/trainer_state.json"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_checkpoints_raise_no_alarm(tmp_path: Path, name: str) -> None:
    write(tmp_path, *WHOLE[name])
    assert torn(tmp_path) == {}


def test_text_that_people_add_later_is_missed_only_in_what_was_just_written(tmp_path: Path) -> None:
    write(tmp_path, "step_1/a.pt", "step_1/eval.json", age=100)
    write(tmp_path, "step_2/a.pt")
    assert [*torn(tmp_path)] == ["step_2"]
    os.utime(tmp_path / "step_2/a.pt", (time.time() - 50,) * 2)
    write(tmp_path, "report.txt")
    assert torn(tmp_path) == {}


def test_a_folder_with_a_file_that_travelled_stays(tmp_path: Path) -> None:
    write(tmp_path, "checkpoint-1/training_args.bin", ("checkpoint-1/README.md", "mine"))
    found = results(tmp_path, {"checkpoint-1/README.md": digest("mine")})
    assert half_written(tmp_path, found) == []
    (tmp_path / "checkpoint-1" / "link").symlink_to("README.md")
    assert [*torn(tmp_path)] == ["checkpoint-1"]


def test_what_is_set_aside_is_moved_and_never_lost(tmp_path: Path) -> None:
    work, aside = tmp_path / "work", tmp_path / "half-written" / "2"
    for _ in range(2):
        write(work, "out/checkpoint-1/training_args.bin", ("a.pt", b"PK\x03\x04"))
        lines = set_aside(work, half_written(work, results(work, {})), aside)
        assert len(lines) == 2 and torn(work) == {}
    assert (work / "out").is_dir() and not (work / "out/checkpoint-1").exists()
    moved = {path.relative_to(aside).as_posix() for path in aside.rglob("*") if path.is_file()}
    assert moved == {
        "a.pt",
        "a.pt.again",
        "out/checkpoint-1/training_args.bin",
        "out/checkpoint-1.again/training_args.bin",
    }
    assert "checkpoint-1: half-written (it has no trainer_state.json" in lines[1]


def killed(writer: str, folder: Path, kills: int, seed: int) -> list[str]:
    """What was set aside after kills of a real writer, each followed by a start that went on."""
    command = [
        sys.executable,
        "-m",
        "tests.runner.run_folder.killed",
        writer,
        str(folder / "work"),
        str(kills),
        str(seed),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["failed"] == "", told
    lines: list[str] = told["lines"]
    return lines


def test_what_torch_left_after_a_kill_is_set_aside_and_the_rest_loads(tmp_path: Path) -> None:
    assert killed("plain", tmp_path, 5, 1), "no kill met a file that was being written"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("writer", ["trainer", "accelerate", "deepspeed", "plain", "tensors"])
def test_after_each_kill_a_real_writer_goes_on_from_its_last_whole_checkpoint(
    tmp_path: Path, writer: str
) -> None:
    lines = killed(writer, tmp_path, 30, 2)
    assert lines or writer == "tensors", "safetensors 0.8 renames what it wrote"
