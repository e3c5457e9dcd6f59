"""Which sequences make up which step: a pure function of seed and position, whatever the number of ranks.

All epochs laid end to end are one stream of sequence numbers; step `s` takes the `global` next ones, rank `r` an equal
part of these. So resuming means to know one number, and another world size sees the same steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One sequence of a step: its number in the store, and which pass over it this is (masking depends on both)."""

    index: int
    epoch: int


class Part(NamedTuple):
    """One dataset of a run: its samples, and how often each is seen in one epoch of the run."""

    num_samples: int
    weight: float = 1.0

    @property
    def an_epoch(self) -> int:
        """Samples taken from it in one epoch."""
        return max(1, round(self.num_samples * self.weight))


class Order:
    """The order of samples, shuffled anew each epoch; several datasets are shuffled into each other.

    A dataset of weight 0.5 gives one half of its samples in one epoch and the other half in the next, drawn at random;
    one of weight 2 gives each twice. Samples are numbered one dataset after the other.
    """

    def __init__(self, parts: int | Sequence[Part], seed: int) -> None:
        self._parts = [Part(parts)] if isinstance(parts, int) else list(parts)
        self._seed = seed
        self._slots = list(accumulate((part.an_epoch for part in self._parts), initial=0))
        self._numbers = list(accumulate((part.num_samples for part in self._parts), initial=0))
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)
        self._passes: dict[tuple[int, int], NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Samples an epoch."""
        return self._slots[-1]

    def sample(self, position: int) -> Sample:
        """The sample at a position of the stream, counted from 0."""
        epoch, place = divmod(position, len(self))
        slot = int(self._shuffled(epoch)[place])
        number = bisect_right(self._slots, slot) - 1
        part, within = self._parts[number], slot - self._slots[number]
        if part.an_epoch == part.num_samples:
            return Sample(self._numbers[number] + within, epoch)
        seen, within = divmod(epoch * part.an_epoch + within, part.num_samples)
        return Sample(self._numbers[number] + int(self._pass(number, seen)[within]), seen)

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

    def step(self, step: int, total: int, rank: int, world_size: int, micro: int) -> list[list[Sample]]:
        """The micro batches of one rank in one step: lists of `micro` samples, as many as the accumulation."""
        share = total // world_size
        begin = step * total + rank * share
        samples = [self.sample(position) for position in range(begin, begin + share)]
        return [samples[i : i + micro] for i in range(0, share, micro)]


def by_length(batches: list[list[Sample]], length_of: Callable[[Sample], int]) -> list[list[Sample]]:
    """The same samples in the same number of micro batches, like beside like, so that little is padding.

    Within one rank's part of one step: what a step learns is the same, however it is split (adr/0009).
    """
    samples = sorted((sample for batch in batches for sample in batch), key=length_of)
    sizes = [0, *accumulate(len(batch) for batch in batches)]
    return [samples[begin:end] for begin, end in pairwise(sizes)]


def evaluation_batches(num_sequences: int, rank: int, world_size: int, micro: int) -> list[list[tuple[Sample, bool]]]:
    """A rank's batches of a whole split, in order; every rank gets as many, of the same size.

    The second value says whether the sample counts: what is needed to fill up does not. Ranks must run the same number
    of forward passes, or ZeRO-3's collectives would wait for ever.
    """
    per_round = world_size * micro
    rounds = -(-num_sequences // per_round)
    batches = []
    for number in range(rounds):
        begin = number * per_round + rank * micro
        positions = range(begin, begin + micro)
        batches.append([(Sample(p % num_sequences, -1), p < num_sequences) for p in positions])
    return batches


def sample_rng(seed: int, sample: Sample) -> np.random.Generator:
    """The random numbers that belong to one sample in one epoch (-1: evaluation): the same on any rank, at any time."""
    return np.random.default_rng([seed, 1, sample.epoch + 1, sample.index])
