"""Turn stored examples into samples: one in each sequence, or several packed into one by best fit, the longest first.

Guarantees:
- A sample is a pure function of its number.
- To the model an example is alone, with positions from 0, whatever shares its sequence.
- Packing is a pure function of the lengths. Each example is in exactly one sequence, as a whole; examples of equal
  length keep their order.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.batches.samples import Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trainium_trainer.data.batches.samples import SampleRules
    from trainium_trainer.data.examples.store import StoredExamples


def pack_examples(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the examples in the order of their sequences, and where each sequence begins (one more than there are).

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


@dataclass(frozen=True, slots=True)
class ExampleSample:
    """The examples of one sequence."""

    number: int
    examples: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]]
    """Tokens of each, and which of them are learned."""

    def row(self, rules: SampleRules) -> Row:
        """See `Sample.row`; the last token of an example is only predicted."""
        inputs = np.concatenate([ids[:-1] for ids, _ in self.examples])
        targets = np.concatenate([ids[1:] for ids, _ in self.examples])
        learned = np.concatenate([trained[1:] for _, trained in self.examples])
        if not rules.packed:
            return Row(inputs, targets, learned, None)
        left = rules.sequence_length - len(inputs)  # sees nothing either
        positions = np.concatenate([*(np.arange(len(ids) - 1) for ids, _ in self.examples), np.arange(left)])
        padding = np.full(left, rules.padding)
        return Row(
            np.concatenate([inputs, padding]),
            np.concatenate([targets, padding]),
            np.concatenate([learned, np.zeros(left, np.bool_)]),
            positions,
        )


class ExamplePart:
    """Examples of one source."""

    def __init__(
        self, name: str, stored: StoredExamples, chosen: NDArray[np.bool_], capacity: int, *, packing: bool
    ) -> None:
        """Take the examples that are `chosen`, in sequences of `capacity` tokens."""
        self.name = name
        self._stored = stored
        rows = np.flatnonzero(chosen)
        self.used = stored.lengths[rows] - 1
        """Positions that each example takes."""
        self._members, self._starts = rows, np.arange(len(rows) + 1)
        if packing:
            order, self._starts = pack_examples(self.used, capacity)
            self._members = rows[order]

    @property
    def sequences(self) -> int:
        """Samples of one epoch."""
        return len(self._starts) - 1

    def size(self, rules: SampleRules) -> int:  # noqa: ARG002 - as `SamplePart` has it
        """Return samples of one epoch."""
        return self.sequences

    def members(self, index: int) -> list[int]:
        """Return the examples of sequence number `index`, as the store numbers them."""
        start, end = self._starts[index : index + 2]
        return [int(number) for number in self._members[start:end]]

    def sample(self, rules: SampleRules, number: int, index: int) -> ExampleSample:
        """See `SamplePart.sample`."""
        examples = [self._stored.example(member) for member in self.members(index)]
        for ids, _ in examples:
            rules.checked(ids, self.name)
        return ExampleSample(number, examples)
