"""A step waits for nothing: not for the device, other ranks, data or logs."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.errors import UsageError
from runner.run_folder.layout import RunFolder
from runner.training.ahead import Ahead
from runner.training.components.metrics import Console, Observer
from tests.runner.conftest import Cluster, metrics
from tests.runner.run_folder.conftest import alone
from tests.support.training.alone import SMALL, started
from tests.support.training.calls import WAITS, Calls

__all__ = ["alone"]


@pytest.fixture(scope="module")
def counted(shared_cluster: Cluster, alone: None) -> Iterator[tuple[list[Counter[str]], Path]]:
    """The calls of torch per step, in a run with an evaluation and a checkpoint at its end."""
    path = shared_cluster.write(steps=6, **SMALL)
    shared_cluster.prepare(path)
    run, trainer = started(shared_cluster, path)
    steps: list[Counter[str]] = []

    real = trainer.train_step

    def step() -> None:
        with Calls() as calls:
            real()
        steps.append(Counter(calls.names))

    trainer.train_step = step  # type: ignore[method-assign]
    assert trainer.run()
    trainer.observer.close()
    yield steps, run.folder.root


def test_a_step_reads_nothing_from_its_device(
    counted: tuple[list[Counter[str]], Path],
) -> None:
    steps, _ = counted
    assert len(steps) == 6
    for number, step in enumerate(steps, start=1):
        waits = {name: count for name, count in step.items() if name in WAITS}
        assert not waits, f"step {number}"


def test_a_step_adds_up_over_the_ranks_once(counted: tuple[list[Counter[str]], Path]) -> None:
    """Loss, stop, time to save, and the counts of the next step together; the first step needs its
    own counts before.
    """
    steps, _ = counted
    of_ddp = 1  # all gradients fit one bucket
    assert [step["allreduce_"] - of_ddp for step in steps] == [2, 1, 1, 1, 1, 1]
    assert not any("allgather" in name or "barrier" in name for step in steps for name in step)


def test_every_step_is_logged_once_and_in_its_order(
    counted: tuple[list[Counter[str]], Path],
) -> None:
    _, folder = counted
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    phases = ("load_host_gib", "train_host_gib", "evaluate_host_gib")
    assert [(key, line["step"]) for line in every for key in phases if key in line] == [
        ("load_host_gib", 0),
        ("train_host_gib", 6),
        ("evaluate_host_gib", 6),
    ]
    lines = [line for line in every if not any(key in line for key in phases)]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]
    assert "validation_loss" in lines[-1]
    assert all(0 <= line["data_wait"] < 1 for line in lines[:-1])
    losses = [loss for _, loss in metrics(folder)]
    assert losses[0] == pytest.approx(6.93, rel=0.05)  # 1024 tokens with equal probability


def test_tensorboard_has_every_value_of_every_step(
    counted: tuple[list[Counter[str]], Path],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = counted
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "memory_gib", "validation_loss"} <= set(
        events.Tags()["scalars"]
    )
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("loss")] == metrics(folder)


def ahead(make: Any, end: int = 4) -> Any:
    return Ahead(make, end, torch.device("cpu"))


def test_the_next_batch_is_made_while_this_one_is_used() -> None:
    made, begun = [], threading.Event()

    def make(number: int) -> str:
        made.append((number, threading.current_thread().name))
        if number == 1:
            begun.set()
        return f"batch {number}"

    items = ahead(make)
    assert items.take(0) == "batch 0"
    assert begun.wait(10)  # before the first request
    assert [items.peek(1), items.take(1), items.take(2), items.take(3)] == [
        "batch 1",
        "batch 1",
        "batch 2",
        "batch 3",
    ]
    assert items.peek(4) is None
    items.close()
    assert made == [(number, "data") for number in range(4)]


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


def test_the_thread_ends_with_the_run(counted: object) -> None:
    """The threads of this module's runs. They are daemons: a killed rank does not wait for them."""
    before = {*threading.enumerate()}
    items = ahead(lambda number: number)
    (thread,) = {*threading.enumerate()} - before
    assert thread.daemon
    items.take(0)
    items.close()
    thread.join(10)
    assert not thread.is_alive()


def test_time_spent_waiting_for_data_is_measured() -> None:
    items = ahead(lambda number: time.sleep(0.05))
    items.take(0)
    assert 0.04 < items.waited() < 5
    assert items.waited() == 0
    items.close()


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
