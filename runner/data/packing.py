"""Which documents share a sequence: pure arithmetic on their lengths.

Best fit, the longest first (Johnson, 1973), as for BERT by Krell et al. (arXiv:2107.02027): whole documents, little
left over, always the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def fill(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts documents into as few sequences as best fit finds.

    Args:
        lengths: tokens of each document, at most `capacity`.

    Returns:
        Sequences as numbers of documents, each document once; in the order of the first document in each.
    """
    sequences: list[list[int]] = []
    with_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # the keys of `with_room`, ascending
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        place = bisect_left(rooms, lengths[number])
        if place == len(rooms):
            sequence: list[int] = []
            sequences.append(sequence)
            left = capacity
        else:
            left = rooms[place]
            sequence = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[place]
        sequence.append(number)
        left -= lengths[number]
        if left:
            if left not in with_room:
                with_room[left] = []
                insort(rooms, left)
            with_room[left].append(sequence)
    return sorted(sorted(sequence) for sequence in sequences)
