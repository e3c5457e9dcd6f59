"""What is made beside the steps: its errors come where it is needed."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.from_stage import UsageError
from runner.run_folder.layout import RunFolder
from runner.training.loop import Ahead
from runner.training.reporting import Console, Observer


def ahead(make: Any, end: int = 4) -> Any:
    return Ahead(make, end, torch.device("cpu"))


def test_an_error_of_the_thread_is_raised_where_its_batch_is_needed() -> None:
    """Not before: the step in between is sound, and may be saved."""

    def make(number: int) -> int:
        if number == 2:
            raise UsageError("the store is gone", "prepare again")
        return number

    items = ahead(make)
    assert [items.take(0), items.take(1), items.peek(2)] == [0, 1, None]
    with pytest.raises(UsageError, match="the store is gone") as caught:
        items.take(2)
    items.close()
    assert "make" in {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}


def test_a_full_disk_under_the_logs_ends_the_run_with_the_disk_s_error(tmp_path: Path) -> None:
    with open(tmp_path / "said", "w") as said:
        observer = Observer(RunFolder(tmp_path), 3, Console(said, said), is_first=True)
        observer.begin(0)
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        observer.step(
            {"step": 1, "epoch": 0.1, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0}
        )
        with pytest.raises(OSError, match="No space left"):
            observer.flush()


STEPS = [b'{"step": %d, "loss": 1.0}\n' % step for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("metrics", "kept", "lost"),
    [
        (b"".join(STEPS), 2, 0),
        (STEPS[0][:9] + b"\n" + STEPS[1] + STEPS[2], 1, 1),  # torn
        (STEPS[0][:9] + STEPS[1] + STEPS[2], 0, 2),  # the next one glued on
        (STEPS[0] + bytes(512) + b"\n", 1, 1),  # a power cut
        (STEPS[0] + STEPS[1] + bytes(range(256)) * 8, 2, 0),
        (b"", 0, 2),
        (None, 0, 2),
    ],
)
def test_damaged_metrics_are_said_and_no_obstacle_to_a_resume(
    tmp_path: Path, metrics: bytes | None, kept: int, lost: int
) -> None:
    """The checkpoint of step 2 is sound."""
    path = tmp_path / "metrics.jsonl"
    if metrics is not None:
        path.write_bytes(metrics)
    with open(tmp_path / "said", "w") as said:
        Observer(RunFolder(tmp_path), 3, Console(said, said), is_first=True).begin(2)
    warning = f"warning: {path}: {lost} of the 2 steps so far cannot be read in it\n"
    assert (tmp_path / "said").read_text() == warning * (lost > 0)
    assert len(path.read_text().splitlines()) == kept if metrics is not None else not path.exists()
