"""Which sequences make up which step: a function of seed and position, for any number of ranks.

All epochs in a row are one stream of sequence numbers. Step `s` takes the next `global` ones, and
rank `r` takes an equal part of these. So a resumed run needs only one number, and another world
size sees the same steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.data.store import SamplePlace as SamplePlace
from runner.data.store import sample_rng as sample_rng


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
