"""Which sequences make up which step: a function of seed and position, for any number of ranks.

All epochs in a row are one stream of sequence numbers. Step `s` takes the next `global` ones, and
rank `r` takes an equal part of these. So a resumed run needs only one number, and another world
size sees the same steps.

The batches of the next step are made in a thread while this step computes (`Ahead`). What is made
depends on its number only, so order and random numbers are the same as without the thread.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from runner.tasks.shared.task import Objective


@dataclass(frozen=True)
class SamplePlace:
    """One sequence of a step.

    Attributes:
        index: its number in the store.
        epoch: which pass over the store this is; -1 in an evaluation. Masking depends on both.
    """

    index: int
    epoch: int


class WeightedDataset(NamedTuple):
    """One dataset of a run: how many samples it has, and how often an epoch sees each."""

    num_samples: int
    weight: float = 1.0

    @property
    def per_epoch(self) -> int:
        """Samples that one epoch takes from it."""
        return max(1, round(self.num_samples * self.weight))


class Order:
    """The order of samples. Each epoch has another one; several datasets are mixed at random.

    A dataset of weight 0.5 gives a random half of its samples in one epoch and the other half in
    the next; a dataset of weight 2 gives each sample twice. Samples are numbered one dataset after
    the other.
    """

    def __init__(self, parts: int | Sequence[WeightedDataset], seed: int) -> None:
        self._parts = [WeightedDataset(parts)] if isinstance(parts, int) else list(parts)
        self._seed = seed
        self._slots = list(accumulate((part.per_epoch for part in self._parts), initial=0))
        self._numbers = list(accumulate((part.num_samples for part in self._parts), initial=0))
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)
        self._passes: dict[tuple[int, int], NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Samples per epoch."""
        return self._slots[-1]

    def sample(self, position: int) -> SamplePlace:
        """The sample at a position of the stream, counted from 0."""
        epoch, place = divmod(position, len(self))
        slot = int(self._shuffled(epoch)[place])
        number = bisect_right(self._slots, slot) - 1
        part, within = self._parts[number], slot - self._slots[number]
        if part.per_epoch == part.num_samples:
            return SamplePlace(self._numbers[number] + within, epoch)
        seen, within = divmod(epoch * part.per_epoch + within, part.num_samples)
        return SamplePlace(self._numbers[number] + int(self._pass(number, seen)[within]), seen)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, 0, epoch]).permutation(len(self))
            self._epoch = epoch
            self._passes = {}
        return self._permutation

    def _pass(self, number: int, seen: int) -> NDArray[np.int64]:
        """The order of one pass over one dataset."""
        if (number, seen) not in self._passes:
            random = np.random.default_rng([self._seed, 2, number, seen])
            self._passes[number, seen] = random.permutation(self._parts[number].num_samples)
        return self._passes[number, seen]

    def step(
        self, step: int, total: int, rank: int, world_size: int, micro: int
    ) -> list[list[SamplePlace]]:
        """The micro batches of one rank in one step.

        Args:
            step: counted from 0.
            total: samples of the step, over all ranks.
            rank: this rank.
            world_size: the number of ranks.
            micro: samples per micro batch.
        """
        share = total // world_size
        begin = step * total + rank * share
        samples = [self.sample(position) for position in range(begin, begin + share)]
        return [samples[i : i + micro] for i in range(0, share, micro)]


def by_length(
    batches: list[list[SamplePlace]], length_of: Callable[[SamplePlace], int]
) -> list[list[SamplePlace]]:
    """Sorts one rank's samples of one step by length, so that batches need little padding.

    The number and sizes of the micro batches stay, and so does what the step learns: the loss of a
    step does not depend on how it is split (docs/adr/0013).
    """
    samples = sorted((sample for batch in batches for sample in batch), key=length_of)
    sizes = [0, *accumulate(len(batch) for batch in batches)]
    return [samples[begin:end] for begin, end in pairwise(sizes)]


def evaluation_batches(
    num_sequences: int, rank: int, world_size: int, micro: int
) -> list[list[tuple[SamplePlace, bool]]]:
    """A rank's batches of a whole split, in order. Every rank gets the same number, of the same
    size.

    Ranks must run the same number of forward passes, or ZeRO-3's collectives would wait forever.

    Returns:
        Batches of (sample, whether it counts): samples that only fill up a batch do not count.
    """
    per_round = world_size * micro
    rounds = -(-num_sequences // per_round)
    batches = []
    for number in range(rounds):
        begin = number * per_round + rank * micro
        positions = range(begin, begin + micro)
        batches.append([(SamplePlace(p % num_sequences, -1), p < num_sequences) for p in positions])
    return batches


def sample_rng(seed: int, sample: SamplePlace) -> np.random.Generator:
    """The random numbers of one sample in one epoch (-1: evaluation): the same on any rank, any
    time.
    """
    return np.random.default_rng([seed, 1, sample.epoch + 1, sample.index])


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
