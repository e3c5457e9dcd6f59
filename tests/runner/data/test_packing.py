"""Whole documents in sequences: each once, none too long, little left over, always the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.data.sequences import fill
from runner.data.table import read_ahead
from runner.from_stage import DamageError

CAPACITY = 32
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=120)


@given(LENGTHS)
def test_each_document_is_in_one_sequence_and_no_sequence_is_too_long(lengths: list[int]) -> None:
    sequences = fill(lengths, CAPACITY)
    assert sorted(number for sequence in sequences for number in sequence) == list(
        range(len(lengths))
    )
    assert all(0 < sum(lengths[n] for n in sequence) <= CAPACITY for sequence in sequences)


@given(LENGTHS)
def test_no_two_sequences_would_fit_into_one(lengths: list[int]) -> None:
    sums = sorted(sum(lengths[n] for n in sequence) for sequence in fill(lengths, CAPACITY))
    assert len(sums) < 2 or sums[0] + sums[1] > CAPACITY


def test_what_is_read_ahead_comes_in_order_and_its_error_where_its_item_would() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise DamageError("part-3.parquet is damaged", "fetch it again")

    found = []
    with pytest.raises(DamageError, match="part-3"):
        for item in read_ahead(items()):
            found.append(item)
    assert found == [0, 1, 2]
    assert list(read_ahead(iter([]))) == []
