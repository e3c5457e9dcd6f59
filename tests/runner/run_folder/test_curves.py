"""The curves of a command's run, from files that real libraries wrote, and from hostile ones."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from runner.run_folder.curves import CURVES, MOST_NAMES, with_curves
from runner.run_folder.history import Columns, History
from runner.run_folder.layout import RunFolder
from runner.run_folder.report import write_report
from tests.runner.folders import HOSTILE
from tests.runner.run_folder.test_report import drawn_in, page_of


@dataclass(frozen=True)
class Folder(RunFolder):
    @property
    def work(self) -> Path:
        return self.root


def read(work: Path) -> History:
    """The history of a command that wrote into this folder."""
    none: dict[str, Any] = {
        "facts": {},
        "memory": {},
        "checkpoints": (),
        "jobs": (),
        "warnings": (),
    }
    settings = {"command": "x"}
    empty = History(Folder(work), settings, steps=Columns(), validations=Columns(), **none)
    return with_curves(empty)


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def trainer_state(work: Path, steps: int, checkpoint: int | None = None) -> None:
    """What transformers' own class writes."""
    from transformers import TrainerState

    history: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        history.append({"epoch": step / 9, "grad_norm": 1.0, "learning_rate": 1e-3,
                        "loss": 5.0 / step, "rewards/mean": step / 2, "step": step})  # fmt: skip
        if step % 2 == 0:
            history.append({"eval_loss": 6.0 / step, "eval_accuracy": 0.5, "eval_runtime": 1.0,
                            "epoch": step / 9, "step": step})  # fmt: skip
    history.append({"train_runtime": 9.0, "train_loss": 0.5, "epoch": 1.0, "step": steps})
    folder = work / "out" / (f"checkpoint-{checkpoint}" if checkpoint else "")
    folder.mkdir(parents=True, exist_ok=True)
    state = TrainerState(global_step=steps, max_steps=steps, log_history=history)
    state.save_to_json(str(folder / "trainer_state.json"))


def test_the_state_of_trainer_gives_curves_by_our_names(tmp_path: Path) -> None:
    trainer_state(tmp_path, 2, checkpoint=2)
    trainer_state(tmp_path, 4, checkpoint=4)
    found = read(tmp_path)
    assert (
        found.facts[CURVES] == "work/out/checkpoint-4/trainer_state.json" and found.warnings == ()
    )
    assert found.steps.points("loss") == [(1, 5.0), (2, 2.5), (3, 5 / 3), (4, 1.25)]
    assert found.steps.numbers("lr") == [1e-3] * 4 and found.steps.numbers("grad_norm") == [1] * 4
    assert found.validations.points("validation_loss") == [(2, 3.0), (4, 1.5)]
    assert found.validations.numbers("validation_accuracy") == [0.5, 0.5]
    assert found.steps.numbers("rewards/mean")[-1] == 2.0
    assert found.table == {"train_runtime": 9.0, "train_loss": 0.5}
    assert found.steps.last["step"] == 4


def test_a_newest_state_that_is_damaged_gives_way_to_the_one_before(tmp_path: Path) -> None:
    trainer_state(tmp_path, 4, checkpoint=4)
    write(tmp_path / "out/checkpoint-6/trainer_state.json", '{"log_history": [{"lo')
    found = read(tmp_path)
    assert found.facts[CURVES] == "work/out/checkpoint-4/trainer_state.json"
    assert "out/checkpoint-6/trainer_state.json was not read" in found.warnings[0]


def test_lines_of_json_with_a_step_are_curves(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 2.0, "name": "a"}, {"step": 2, "loss": float("nan")},
             {"global_step": 3, "val_loss": 1.0}, {"iter": 4, "train/loss": 1.5}]  # fmt: skip
    write(tmp_path / "logs/metrics.jsonl", "\n".join(map(json.dumps, lines)) + '\n{"step": 5, "l')
    found = read(tmp_path)
    assert found.steps.points("loss") == [(1, 2.0), (2, None), (4, 1.5)]
    assert found.validations.points("validation_loss") == [(3, 1.0)]


def test_the_csv_of_lightning_has_empty_fields(tmp_path: Path) -> None:
    write(
        tmp_path / "lightning_logs/version_0/metrics.csv",
        "epoch,lr-Adam,step,train_loss,val_acc\n0,0.001,9,0.5,\n0,,9,,0.25\n1,1e-4,19,0.25,\n",
    )
    found = read(tmp_path)
    assert found.steps.points("loss") == [(9, 0.5), (19, 0.25)]
    assert found.steps.points("lr-Adam") == [(9, 0.001), (19, 1e-4)]
    assert found.validations.points("validation_accuracy") == [(9, 0.25)]


def test_the_event_files_of_tensorboard_give_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for begin in (0, 3):  # two starts
        writer = SummaryWriter(str(tmp_path / "runs/a"), filename_suffix=f".{begin}")
        for step in range(begin, begin + 3):
            writer.add_scalar("train/loss", 2.0 - step / 4, step)
            writer.add_scalar("eval/accuracy", step / 8, step)
            writer.add_scalar("train/entropy", 0.5, step)
        writer.close()
    found = read(tmp_path)
    assert found.steps.points("loss") == [(step, 2.0 - step / 4) for step in range(6)]
    assert found.validations.numbers("validation_accuracy")[-1] == 5 / 8
    assert found.steps.numbers("train/entropy") == [0.5] * 6
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing", None)
    missing = read(tmp_path)
    assert missing.facts[CURVES] is None
    assert (
        f"no package tensorboard; where one has: tensorboard --logdir {tmp_path}/runs/a"
        in (missing.warnings[0])
    )


def test_measures_at_the_end_are_a_table(tmp_path: Path) -> None:
    write(tmp_path / "out/all_results.json", {"eval_accuracy": 0.5, "epoch": 3.0, "note": "x"})
    assert read(tmp_path).table == {"eval_accuracy": 0.5, "epoch": 3.0}
    harness = {"results": {"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": "N/A"}}}
    write(tmp_path / "eval/model/results_2026-11-28T10.json", harness)
    assert read(tmp_path).table == {
        "eval/model: arc acc,none": 0.25, "out: eval_accuracy": 0.5, "out: epoch": 3.0
    }  # fmt: skip


def test_files_of_wandb_are_named_with_the_command_that_sends_them(tmp_path: Path) -> None:
    write(tmp_path / "wandb/offline-run-20261128_101010-ab/run-ab.wandb", "x")
    write(tmp_path / "wandb/offline-run-20261128_101010-ab/files/output.log", "x")
    (note,) = read(tmp_path).warnings
    assert note.endswith(f": wandb sync {tmp_path}/wandb/offline-run-20261128_101010-ab")


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "7", "{", "[" * 100_000, '{"log_history": "7"}', '{"log_history": [[], 7, null]}',
        '{"log_history": [{"step": true, "loss": 1}, {"step": "1", "loss": 1}, {"loss": 1}]}',
        '{"log_history": [{"step": ' + "9" * 30 + ', "loss": 1}]}', '{"results": {"a": 7}}',
        '{"log_history": [{"step": 1, "loss": "x"}]}', "9" * 5000, "\0\udcff", '{"results": []}',
        "step,loss\n1,x,3,4\n\n'\"\n",
    ],
)  # fmt: skip
def test_hostile_files_give_no_curves_and_no_error(tmp_path: Path, content: str) -> None:
    data = content.encode("utf-8", "surrogateescape")
    for name in ("trainer_state.json", "a.jsonl", "metrics.csv", "events.out.tfevents.1",
                 "all_results.json"):  # fmt: skip
        (tmp_path / name).write_bytes(data)
    found = read(tmp_path)
    assert found.steps.numbers("loss") == [] and found.table == {}


def test_values_that_are_no_numbers_and_too_many_names_are_bounded(tmp_path: Path) -> None:
    line = {"step": 1, "loss": int("9" * 400), **{f"m{index}": 1.0 for index in range(999)}}
    write(tmp_path / "a.jsonl", json.dumps(line) + '\n{"step": 2, "loss": Infinity, "a": NaN}')
    found = read(tmp_path)
    assert len(found.steps.names) <= MOST_NAMES + 1
    write(tmp_path / "big_results.json", {f"m{index}": 1.0 for index in range(999)})
    assert len(read(tmp_path).table) <= MOST_NAMES


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.truncate(65 * 10**6)
    assert read(tmp_path).warnings == ("metrics.jsonl was not read: it has 65 MB",)


def command_run(root: Path, log: str = "") -> Path:
    """A run folder as `submit` of a command makes it."""
    write(root / "config.yaml", "format: 1\nname: sft\ncommand: accelerate launch sft.py\n"
          "manifest: m.yaml\n")  # fmt: skip
    write(root / "environment.json", {"bundle_id": "ab" * 32, "host": "gpu7"})
    write(root / "logs/slurm-7.out", log)
    known: dict[str, Any] = {"digest": "", "commit": None, "dirty": None, "root": "", "links": {}}
    files = {"sft.py": [1, hashlib.sha256(b"x").hexdigest()]}
    write(root / "project.json", {**known, "files": files})
    write(root / "work/sft.py", "x")
    return root


def test_the_report_of_a_command_draws_what_its_trainer_measured(tmp_path: Path) -> None:
    root = command_run(tmp_path / "sft", "said\n")
    trainer_state(root / "work", 40, checkpoint=40)
    write(root / "work/out/all_results.json", {"eval_accuracy": 0.75})
    page = page_of(root)
    titles = [chart["title"] for chart in drawn_in((tmp_path / "page.html").read_text())]
    assert titles[:5] == ["Training loss", "Validation loss", "Validation accuracy",
                          "Learning rate", "Gradient norm, before clipping"]  # fmt: skip
    assert titles[5:] == ["validation_runtime", "rewards/mean"]
    for shown in ("accelerate launch sft.py", "eval_accuracy", "0.75", "gpu7", "abab",
                  "Curves are fromwork/out/checkpoint-40/trainer_state.json"):  # fmt: skip
        assert shown in page.text, shown
    assert "The end of the log" not in page.text and "no step" not in page.text


def test_without_curves_the_report_of_a_command_has_the_end_of_its_log(tmp_path: Path) -> None:
    log = "".join(f"line {number} <b>\n" for number in range(100)) + HOSTILE
    root = command_run(tmp_path / "sft", log)
    for number in range(60):
        write(root / f"work/table-{number:02}.csv", "x")
        os.utime(root / f"work/table-{number:02}.csv", (number, number))
    page = page_of(root)
    assert "line 99 <b>" in page.text and "line 60 <b>" not in page.text
    assert "table-59.csv" in page.text and "and 10 older files" in page.text
    assert "no step was logged" not in page.text and "b" not in [tag for tag, _ in page.tags]


def test_hostile_names_stay_text_on_the_page(tmp_path: Path) -> None:
    root = command_run(tmp_path / "sft", HOSTILE)
    name = HOSTILE.replace("/", "|")
    write(root / "work/a.jsonl", "\n".join(
        json.dumps({"step": step, HOSTILE: 1.0, f"eval_{HOSTILE}": 1.0}) for step in range(30)
    ))  # fmt: skip
    write(root / f"work/{name}.txt", "x")
    write(root / "work/all_results.json", {HOSTILE: 1.0})
    write(root / "work/trainer_state.json", "{")
    write(root / "project.json", {"files": {"sft.py": 7, "a": [1, 2, 3], HOSTILE: ["x", {}]}})
    page = page_of(root)
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags and tags.count("script") == 3
    assert "\u202e" not in page.text and "<img" in page.text
    assert len(drawn_in((tmp_path / "page.html").read_text())) == 2


def test_at_most_24_charts_have_names_of_their_own_and_a_task_has_none(tmp_path: Path) -> None:
    root = command_run(tmp_path / "sft")
    lines = [{"step": step, "loss": 1.0, **{f"m{n}": 1.0 for n in range(50)}} for step in (1, 2)]
    write(root / "work/a.jsonl", "\n".join(map(json.dumps, lines)))
    write_report([root], tmp_path / "page.html")
    assert len(drawn_in((tmp_path / "page.html").read_text())) == 25
    task = tmp_path / "task"
    write(task / "config.yaml", "task: sft\nname: b\n")
    write(task / "metrics.jsonl", "\n".join(map(json.dumps, lines)))
    write_report([task], tmp_path / "page.html")
    assert len(drawn_in((tmp_path / "page.html").read_text())) == 1
    assert not History.read(task).is_command
