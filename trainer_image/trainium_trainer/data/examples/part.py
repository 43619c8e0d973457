"""Turn stored examples into samples: one in each sequence, or several packed into one by best fit, the longest first.

Guarantees:
- A sample is a pure function of its number.
- To the model an example is alone, with positions from 0, whatever shares its sequence, unless examples are joined
  without a mask.
- Packing is a pure function of the lengths. Each example is in exactly one sequence, as a whole; examples of equal
  length keep their order.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainium_trainer.data.batches.samples import Row, SampleRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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

    def rows(self, rules: SampleRules) -> tuple[Row, ...]:
        """See `Sample.rows`; the last token of an example is only predicted.

        Without a mask it is followed by the next example, whose first token nobody has to guess.
        """
        if not rules.packed:
            joined = np.concatenate([ids for ids, _ in self.examples])
            borders = np.cumsum([0, *(len(ids) for ids, _ in self.examples[:-1])])
            predicted = np.concatenate([trained for _, trained in self.examples])
            predicted[borders] = False
            return (Row(joined[:-1], joined[1:], predicted[1:], None),)
        inputs = np.concatenate([ids[:-1] for ids, _ in self.examples])
        targets = np.concatenate([ids[1:] for ids, _ in self.examples])
        learned = np.concatenate([trained[1:] for _, trained in self.examples])
        left = rules.sequence_length - len(inputs)  # sees nothing either
        positions = np.concatenate([*(np.arange(len(ids) - 1) for ids, _ in self.examples), np.arange(left)])
        padding = np.full(left, rules.padding)
        row = Row(
            np.concatenate([inputs, padding]),
            np.concatenate([targets, padding]),
            np.concatenate([learned, np.zeros(left, np.bool_)]),
            positions,
        )
        return (row,)


class ExamplePart:
    """Examples of one source."""

    def __init__(
        self,
        name: str,
        stored: StoredExamples,
        chosen: NDArray[np.bool_],
        capacity: int,
        *,
        packing: bool,
        masked: bool,
    ) -> None:
        """Take the examples that are `chosen`, in sequences of `capacity` tokens."""
        self.name = name
        self._stored = stored
        rows = np.flatnonzero(chosen)
        self.used = stored.lengths[rows] - 1
        """Positions that each example takes."""
        self._members, self._starts = rows, np.arange(len(rows) + 1)
        if packing:
            # Joined, all but the last example of a sequence have their last token in it.
            order, self._starts = pack_examples(self.used + (not masked), capacity + (not masked))
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


@dataclass(frozen=True, slots=True)
class PairSample:
    """The preferred answer to a prompt, and another one."""

    number: int
    examples: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]]
    """Tokens of each with the prompt before it, and which of them are learned."""
    answers: tuple[int, int]
    """The first token of each answer; 0 where all that is learned is of the answer."""
    references: tuple[float, float]
    """Log-probability of each answer by the reference model; 0 where it is not computed ahead."""

    def rows(self, rules: SampleRules) -> tuple[Row, ...]:  # noqa: ARG002 - as `Sample` has it
        """See `Sample.rows`."""
        return tuple(
            Row(ids[:-1], ids[1:], trained[1:], None, max(0, answer - 1), reference)
            for (ids, trained), answer, reference in zip(self.examples, self.answers, self.references, strict=True)
        )


class PairPart:
    """Pairs of one source: the store has the two answers of a pair one after the other."""

    def __init__(self, name: str, stored: StoredExamples, chosen: NDArray[np.bool_], *, whole: bool) -> None:
        """Take the pairs that are `chosen`; `whole`: the prompt is learned too."""
        self.name = name
        self.stored = stored
        self.references: NDArray[np.float32] | None = None
        """Log-probability of each stored answer by the reference model; None where it is not computed ahead."""
        self._firsts = np.flatnonzero(chosen)[::2]
        self._whole = whole
        self.used = stored.lengths[np.flatnonzero(chosen)] - 1
        """Positions that each answer takes with its prompt."""

    @property
    def sequences(self) -> int:
        """Samples of one epoch."""
        return len(self._firsts)

    def size(self, rules: SampleRules) -> int:  # noqa: ARG002 - as `SamplePart` has it
        """Return samples of one epoch."""
        return self.sequences

    def sample(self, rules: SampleRules, number: int, index: int) -> PairSample:
        """See `SamplePart.sample`."""
        return self.pair(rules, number, int(self._firsts[index]))

    def pair(self, rules: SampleRules, number: int, first: int) -> PairSample:
        """Return the pair whose preferred answer is example `first` of the store, as sample `number`."""
        both = (first, first + 1)
        examples = [self.stored.example(member) for member in both]
        for ids, _ in examples:
            rules.checked(ids, self.name)
        answers = [int(self.stored.answers[member]) if self._whole else 0 for member in both]
        known = self.references
        references = [0.0 if known is None else float(known[member]) for member in both]
        return PairSample(number, examples, (answers[0], answers[1]), (references[0], references[1]))
