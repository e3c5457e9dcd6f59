"""Steps are the same for any number of ranks, and no sequence is repeated or missed."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from runner.training.components.batches import (
    Order,
    SamplePlace,
    WeightedDataset,
    by_length,
    evaluation_batches,
    sample_rng,
)

# A batch triple: ranks, micro batch, accumulation.
TRIPLES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


def samples_of_step(
    order: Order, step: int, ranks: int, micro: int, accumulation: int
) -> list[SamplePlace]:
    total = ranks * micro * accumulation
    found = list[SamplePlace]()
    for rank in range(ranks):
        batches = order.step(step, total, rank, ranks, micro)
        assert [len(batch) for batch in batches] == [micro] * accumulation
        found.extend(itertools.chain.from_iterable(batches))
    return found


@given(sequences=st.integers(1, 60), seed=st.integers(0, 2**63 - 1), triple=TRIPLES)
def test_each_epoch_sees_each_sequence_once(
    sequences: int, seed: int, triple: tuple[int, int, int]
) -> None:
    order, total = Order(sequences, seed), triple[0] * triple[1] * triple[2]
    steps = -(-3 * sequences // total)
    seen = [sample for step in range(steps) for sample in samples_of_step(order, step, *triple)]
    for epoch in range(3):
        assert Counter(s.index for s in seen if s.epoch == epoch) == Counter(range(sequences))


@given(sequences=st.integers(1, 80), ranks=st.integers(1, 6), micro=st.integers(1, 7))
def test_evaluation_counts_each_sequence_once_at_any_number_of_ranks(
    sequences: int, ranks: int, micro: int
) -> None:
    parts = [evaluation_batches(sequences, rank, ranks, micro) for rank in range(ranks)]
    counted = Counter(s.index for part in parts for batch in part for s, counts in batch if counts)
    assert counted == Counter(range(sequences))
    # ZeRO-3's collectives wait forever for a rank with fewer forward passes.
    assert len({len(part) for part in parts}) == 1
    assert {len(batch) for part in parts for batch in part} == {micro}
    assert all(0 <= s.index < sequences for part in parts for batch in part for s, _ in batch)


PARTS = st.lists(
    st.builds(WeightedDataset, st.integers(1, 20), st.sampled_from([0.5, 1.0, 2.0, 0.3, 2.5])),
    min_size=1,
    max_size=3,
)


@given(parts=PARTS, seed=st.integers(0, 1000))
def test_each_dataset_is_passed_over_as_often_as_its_weight_says(
    parts: list[WeightedDataset], seed: int
) -> None:
    order = Order(parts, seed)
    epochs = 4
    seen = Counter(order.sample(position).index for position in range(epochs * len(order)))
    begin = 0
    for part in parts:
        counts = [seen[begin + n] for n in range(part.num_samples)]
        # Each pass is complete: no sample is more than one pass ahead of another.
        assert sum(counts) == epochs * part.per_epoch and max(counts) - min(counts) <= 1
        begin += part.num_samples


@given(
    parts=PARTS,
    seed=st.integers(0, 1000),
    worlds=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=12),
)
def test_a_mixture_keeps_its_order_with_any_number_of_ranks_in_each_step(
    parts: list[WeightedDataset], seed: int, worlds: list[int]
) -> None:
    """A run that resumes on 2, then 1, then 4 ranks reads the same samples as a run on one rank."""
    alone = Order(parts, seed)
    for step, ranks in enumerate(worlds):
        # Each is a new process that enters the order at this point.
        (expected,) = alone.step(step, 16, 0, 1, 16)
        assert samples_of_step(Order(parts, seed), step, ranks, 2, 8 // ranks) == expected


@given(
    lengths=st.lists(st.integers(1, 99), min_size=12, max_size=12),
    micro=st.sampled_from([1, 2, 3, 4, 6]),
)
def test_like_beside_like_is_the_same_samples_in_as_many_batches(
    lengths: list[int], micro: int
) -> None:
    """Micro batches are all full: a rank's part of a step is a multiple of them."""
    samples = [SamplePlace(n, 0) for n in range(len(lengths))]
    batches = [samples[i : i + micro] for i in range(0, len(samples), micro)]
    grouped = by_length(batches, lambda sample: lengths[sample.index])
    assert [len(batch) for batch in grouped] == [len(batch) for batch in batches]
    assert sorted(s.index for batch in grouped for s in batch) == list(range(len(lengths)))

    def padded(parts: list[list[SamplePlace]]) -> int:
        return sum(len(part) * max(lengths[s.index] for s in part) for part in parts)

    assert padded(grouped) <= padded(batches)


def test_a_seed_gives_the_samples_of_the_first_release() -> None:
    """A new version of Airlift or numpy that changed them would not resume where a run was."""
    order = Order([WeightedDataset(3), WeightedDataset(4, 0.5), WeightedDataset(2, 1.5)], 7)
    seen = [order.sample(position) for position in range(16)]
    assert [(sample.index, sample.epoch) for sample in seen] == [
        (0, 0), (8, 0), (7, 1), (2, 0), (4, 0), (7, 0), (1, 0), (5, 0),
        (2, 1), (3, 0), (6, 0), (1, 1), (0, 1), (7, 2), (8, 2), (8, 1),
    ]  # fmt: skip
    assert [sample_rng(7, SamplePlace(5, epoch)).integers(1000) for epoch in (-1, 0)] == [724, 95]


@given(parts=PARTS)
def test_no_sample_is_seen_twice_in_one_pass(parts: list[WeightedDataset]) -> None:
    """Masks and augmentation are drawn per pass."""
    order = Order(parts, 5)
    seen = Counter(order.sample(position) for position in range(3 * len(order)))
    assert set(seen.values()) == {1}
