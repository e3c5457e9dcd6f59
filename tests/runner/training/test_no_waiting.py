"""What is made beside the steps: its errors come where it is needed."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.errors import UsageError
from runner.run_folder.layout import RunFolder
from runner.training.ahead import Ahead
from runner.training.components.metrics import Console, Observer


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
