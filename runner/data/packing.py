"""Decides which documents share a sequence, from their lengths. Pure.

The method is best fit, the longest first (Johnson, 1973), as Krell et al. use it for BERT
(arXiv:2107.02027). Documents stay whole, little space is unused, and the result is always the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def fill(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts documents into as few sequences as best fit finds.

    Args:
        lengths: tokens of each document, at most `capacity`.
        capacity: tokens of a sequence.

    Returns:
        Sequences as lists of document numbers. Each document is in one of them. The sequences are
        in the order of their first documents.
    """
    sequences: list[list[int]] = []
    by_space: dict[int, list[list[int]]] = {}  # free tokens -> sequences
    spaces: list[int] = []  # the keys of `by_space`, ascending
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        index = bisect_left(spaces, lengths[number])
        if index == len(spaces):
            sequence: list[int] = []
            sequences.append(sequence)
            left = capacity
        else:
            left = spaces[index]
            sequence = by_space[left].pop()
            if not by_space[left]:
                del by_space[left], spaces[index]
        sequence.append(number)
        left -= lengths[number]
        if left:
            if left not in by_space:
                by_space[left] = []
                insort(spaces, left)
            by_space[left].append(sequence)
    return sorted(sorted(sequence) for sequence in sequences)
