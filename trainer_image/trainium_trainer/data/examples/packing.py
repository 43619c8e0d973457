"""Which examples share a sequence: best fit, the longest first.

Invariants: a pure function of the lengths; each example is in exactly one sequence, as a whole; examples of equal
length keep their order.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def packed(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The examples in the order of their sequences, and where each sequence begins (one more than there are).

    No length is above `capacity`.
    """
    order = np.argsort(-lengths, kind="stable")
    sequences: list[list[int]] = []
    spaces: list[int] = []  # that some sequence has left, ascending, each once
    having: dict[int, list[int]] = {}  # sequences by the space that they have left
    for number in order.tolist():
        length = int(lengths[number])
        place = bisect.bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            sequence = having[space].pop()
            if not having[space]:
                del having[space], spaces[place]
            sequences[sequence].append(number)
        else:
            space, sequence = capacity, len(sequences)
            sequences.append([number])
        left = space - length
        if left:
            if left not in having:
                bisect.insort(spaces, left)
                having[left] = []
            having[left].append(sequence)
    members = np.array([number for sequence in sequences for number in sequence], np.int64)
    starts = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    return members, starts.astype(np.int64)
