"""Which sequences make up a step: the same steps for any number of ranks, and nothing seen twice or missed."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from runner.training.batches import Order, Sample, evaluation_batches, sample_rng

# A batch triple: ranks, micro batch, accumulation.
TRIPLES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


def samples_of_step(order: Order, step: int, ranks: int, micro: int, accumulation: int) -> list[Sample]:
    total = ranks * micro * accumulation
    found = []
    for rank in range(ranks):
        batches = order.step(step, total, rank, ranks, micro)
        assert [len(batch) for batch in batches] == [micro] * accumulation
        found.extend(itertools.chain.from_iterable(batches))
    return found


@given(sequences=st.integers(1, 60), seed=st.integers(0, 2**63 - 1), triple=TRIPLES)
def test_each_epoch_sees_each_sequence_once(sequences: int, seed: int, triple: tuple[int, int, int]) -> None:
    order, total = Order(sequences, seed), triple[0] * triple[1] * triple[2]
    steps = -(-3 * sequences // total)
    seen = [sample for step in range(steps) for sample in samples_of_step(order, step, *triple)]
    for epoch in range(3):
        assert Counter(s.index for s in seen if s.epoch == epoch) == Counter(range(sequences))


@given(sequences=st.integers(1, 60), seed=st.integers(0, 1000), step=st.integers(0, 50), triple=TRIPLES)
def test_a_step_is_the_same_on_any_number_of_ranks_and_in_any_micro_batches(
    sequences: int, seed: int, step: int, triple: tuple[int, int, int]
) -> None:
    total = triple[0] * triple[1] * triple[2]
    alone = Order(sequences, seed).step(step, total, 0, 1, total)
    assert samples_of_step(Order(sequences, seed), step, *triple) == alone[0]


@given(sequences=st.integers(1, 60), steps=st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_a_step_does_not_depend_on_the_steps_before_it(sequences: int, steps: list[int]) -> None:
    wandering = Order(sequences, 7)
    for step in steps:
        assert wandering.step(step, 4, 0, 1, 2) == Order(sequences, 7).step(step, 4, 0, 1, 2)


def test_epochs_and_seeds_differ_in_order() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        order = Order(50, seed)
        return [order.sample(position).index for position in range(number * 50, (number + 1) * 50)]

    orders = [epoch(1, 0), epoch(1, 1), epoch(2, 0), list(range(50))]
    assert len({tuple(order) for order in orders}) == 4


@given(sequences=st.integers(1, 80), ranks=st.integers(1, 6), micro=st.integers(1, 7))
def test_evaluation_counts_each_sequence_once_at_any_number_of_ranks(sequences: int, ranks: int, micro: int) -> None:
    parts = [evaluation_batches(sequences, rank, ranks, micro) for rank in range(ranks)]
    counted = Counter(s.index for part in parts for batch in part for s, counts in batch if counts)
    assert counted == Counter(range(sequences))
    # ZeRO-3's collectives wait for ever for a rank with fewer forward passes.
    assert len({len(part) for part in parts}) == 1
    assert {len(batch) for part in parts for batch in part} == {micro}
    assert all(0 <= s.index < sequences for part in parts for batch in part for s, _ in batch)


def test_a_samples_random_numbers_are_its_own() -> None:
    def drawn(seed: int, index: int, epoch: int) -> float:
        return sample_rng(seed, Sample(index, epoch)).random()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({drawn(seed, index, epoch) for seed in (0, 1) for index in (0, 1) for epoch in (-1, 0, 1)}) == 12
