"""Which sequences make up which step: a pure function of seed and position, whatever the number of ranks.

All epochs laid end to end are one stream of sequence numbers; step `s` takes the `global` next ones, rank `r` an equal
part of these. So resuming means to know one number, and another world size sees the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One sequence of a step: its number in the store, and the epoch it is seen in (masking depends on both)."""

    index: int
    epoch: int


class Order:
    """The order of `num_sequences` sequences, shuffled anew each epoch."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        self._length, self._seed = num_sequences, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def sample(self, position: int) -> Sample:
        """The sample at a position of the stream, counted from 0."""
        epoch, place = divmod(position, self._length)
        return Sample(int(self._shuffled(epoch)[place]), epoch)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, 0, epoch]).permutation(self._length)
            self._epoch = epoch
        return self._permutation

    def step(self, step: int, total: int, rank: int, world_size: int, micro: int) -> list[list[Sample]]:
        """The micro batches of one rank in one step: lists of `micro` samples, as many as the accumulation."""
        share = total // world_size
        begin = step * total + rank * share
        samples = [self.sample(position) for position in range(begin, begin + share)]
        return [samples[i : i + micro] for i in range(0, share, micro)]


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
