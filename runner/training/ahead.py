"""The batches of the next step are made in a thread while this step computes.

What is made depends on its number only, so order and random numbers are the same as without the
thread, and a resumed run has the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from runner.tasks.shared.task import Objective

T = TypeVar("T")


class Load(NamedTuple):
    """What one rank computes in a step.

    Attributes:
        batches: its micro batches, as keyword arguments of the task's module.
        predictions: how many predictions their losses are the sum of.
        tokens: without padding.
    """

    batches: list[dict[str, torch.Tensor]]
    predictions: int
    tokens: int

    @staticmethod
    def of(
        batches: list[dict[str, torch.Tensor]], task: Objective[Any], device: torch.device
    ) -> Load:
        """Counts the predictions and tokens of batches.

        For a GPU they are put into pinned memory, from which it copies while it computes.
        """
        predictions = sum(task.num_predictions(batch) for batch in batches)
        tokens = sum(task.num_tokens(batch) for batch in batches)
        if device.type == "cuda":
            batches = [{name: t.pin_memory() for name, t in batch.items()} for batch in batches]
        return Load(batches, predictions, tokens)

    def on(self, device: torch.device) -> list[dict[str, torch.Tensor]]:
        """The micro batches on the device. The copy does not wait for what the device computes."""
        return [
            {name: t.to(device, non_blocking=True) for name, t in batch.items()}
            for batch in self.batches
        ]


NOTHING = Load([], 0, 0)
"""What is computed behind the last step."""


class Ahead(Generic[T]):
    """Makes items one number ahead, in a thread. For use by one thread.

    Args:
        make: number -> item. It is called in the thread only.
        end: the number after the last one.
        device: a GPU is made the thread's own before the first item: pinned memory belongs to it.
    """

    def __init__(self, make: Callable[[int], T], end: int, device: torch.device) -> None:
        self.end = end
        self._make, self._device = make, device
        self._asked: SimpleQueue[tuple[int, Future[T]] | None] = SimpleQueue()
        self._coming: dict[int, Future[T]] = {}
        self._waited_s = 0.0
        # A daemon: a rank that gives up must not wait for a read from a dead file system.
        threading.Thread(target=self._work, name="data", daemon=True).start()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (asked := self._asked.get()) is not None:
            number, future = asked
            try:
                item = self._make(number)
            except BaseException as problem:  # noqa: BLE001 - raised by `take`
                future.set_exception(problem)
            else:
                future.set_result(item)

    def take(self, number: int) -> T:
        """The item of a number; the next one is begun.

        Raises:
            BaseException: what making it raised, with its traceback.
        """
        item = self._wait(number).result()
        self._coming.clear()
        if number + 1 < self.end:
            self._ask(number + 1)
        return item

    def peek(self, number: int) -> T | None:
        """The item of a number that will be taken next; None behind the end, or if it failed.

        `take` will raise the error.
        """
        if number >= self.end:
            return None
        future = self._wait(number)
        return None if future.exception() else future.result()

    def waited(self) -> float:
        """Seconds that the caller has waited for items since the last call."""
        seconds, self._waited_s = self._waited_s, 0.0
        return seconds

    def close(self) -> None:
        """Ends the thread after the item it is making."""
        self._asked.put(None)

    def _ask(self, number: int) -> Future[T]:
        if number not in self._coming:
            self._coming[number] = Future()
            self._asked.put((number, self._coming[number]))
        return self._coming[number]

    def _wait(self, number: int) -> Future[T]:
        began = time.monotonic()
        future = self._ask(number)
        wait([future])
        self._waited_s += time.monotonic() - began
        return future
