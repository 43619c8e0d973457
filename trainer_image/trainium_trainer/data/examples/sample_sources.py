"""Turn stored examples into samples: one in each sequence, or several packed into one by best fit, the longest first.

Guarantees:
- A sample is a pure function of its number.
- An example does not attend to the other examples of its sequence and has positions from 0, unless examples are joined
  without a mask.
- Packing is a pure function of the lengths. Each example is whole and in exactly one sequence; examples of equal length
  keep their order.
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
    """Return the examples in the order of their sequences, and the start of each sequence plus the end of the last.

    No length is above `capacity`.
    """
    order = np.argsort(-lengths, kind="stable")
    sequences: list[list[int]] = []
    spaces: list[int] = []  # free spaces of sequences, ascending and unique
    sequences_by_space: dict[int, list[int]] = {}
    for number in order.tolist():
        length = int(lengths[number])
        index = bisect.bisect_left(spaces, length)
        if index < len(spaces):
            space = spaces[index]
            sequence = sequences_by_space[space].pop()
            if not sequences_by_space[space]:
                del sequences_by_space[space], spaces[index]
            sequences[sequence].append(number)
        else:
            space, sequence = capacity, len(sequences)
            sequences.append([number])
        remaining = space - length
        if remaining:
            if remaining not in sequences_by_space:
                bisect.insort(spaces, remaining)
                sequences_by_space[remaining] = []
            sequences_by_space[remaining].append(sequence)
    members = np.array([number for sequence in sequences for number in sequence], np.int64)
    starts = np.cumsum([0, *(len(sequence) for sequence in sequences)])
    return members, starts.astype(np.int64)


@dataclass(frozen=True, slots=True)
class ExampleSample:
    """The examples of one sequence."""

    number: int
    examples: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]]
    """The tokens of each example, and which of them are learned."""

    def list_rows(self, rules: SampleRules) -> tuple[Row, ...]:
        """See `Sample.list_rows`; the last token of an example is only a target.

        Without a mask the next example follows it, whose first token is not learned.
        """
        if not rules.packed:
            tokens = np.concatenate([ids for ids, _ in self.examples])
            borders = np.cumsum([0, *(len(ids) for ids, _ in self.examples[:-1])])
            predicted = np.concatenate([loss_mask for _, loss_mask in self.examples])
            predicted[borders] = False
            return (Row(tokens[:-1], tokens[1:], predicted[1:], None),)
        inputs = np.concatenate([ids[:-1] for ids, _ in self.examples])
        targets = np.concatenate([ids[1:] for ids, _ in self.examples])
        loss_mask = np.concatenate([loss_mask[1:] for _, loss_mask in self.examples])
        padded = rules.sequence_length - len(inputs)  # padding attends to no example either
        positions = np.concatenate([*(np.arange(len(ids) - 1) for ids, _ in self.examples), np.arange(padded)])
        padding = np.full(padded, rules.padding)
        row = Row(
            np.concatenate([inputs, padding]),
            np.concatenate([targets, padding]),
            np.concatenate([loss_mask, np.zeros(padded, np.bool_)]),
            positions,
        )
        return (row,)


class ExampleSampleSource:
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
        """Pack the `chosen` examples into sequences of `capacity` tokens."""
        self.name = name
        self._stored = stored
        rows = np.flatnonzero(chosen)
        self.input_lengths = stored.lengths[rows] - 1
        """The number of positions of each example."""
        self._members, self._starts = rows, np.arange(len(rows) + 1)
        if packing:
            # Without a mask, the last token of an example is an input too, except in the last example of a sequence.
            order, self._starts = pack_examples(self.input_lengths + (not masked), capacity + (not masked))
            self._members = rows[order]

    def count_samples(self, rules: SampleRules) -> int:  # noqa: ARG002 - as `SampleSource` has it
        """Return the number of samples of one epoch."""
        return len(self._starts) - 1

    def list_members(self, index: int) -> list[int]:
        """Return the examples of sequence `index`, as indices into the store."""
        start, end = self._starts[index : index + 2]
        return [int(number) for number in self._members[start:end]]

    def sample(self, rules: SampleRules, number: int, index: int) -> ExampleSample:
        """See `SampleSource.sample`."""
        examples = [self._stored.read_example(member) for member in self.list_members(index)]
        for ids, _ in examples:
            rules.check_tokens(ids, self.name)
        return ExampleSample(number, examples)


@dataclass(frozen=True, slots=True)
class PairSample:
    """The preferred and the rejected answer to a prompt."""

    number: int
    examples: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]]
    """The tokens of each answer with its prompt, and which of them are learned."""
    answers: tuple[int, int]
    """The index of the first token of each answer; 0 where only tokens of the answer are learned."""
    references: tuple[float, float]
    """The log-probability of each answer by the reference model; 0 if it is not computed ahead."""

    def list_rows(self, rules: SampleRules) -> tuple[Row, ...]:  # noqa: ARG002 - as `Sample` has it
        """See `Sample.list_rows`."""
        return tuple(
            Row(ids[:-1], ids[1:], loss_mask[1:], None, max(0, answer - 1), reference)
            for (ids, loss_mask), answer, reference in zip(self.examples, self.answers, self.references, strict=True)
        )


class PairSampleSource:
    """The pairs of one source: the two answers of a pair are adjacent in the store."""

    def __init__(self, name: str, stored: StoredExamples, chosen: NDArray[np.bool_], *, learns_prompts: bool) -> None:
        """Open the `chosen` pairs."""
        self.name = name
        self.stored = stored
        self.references: NDArray[np.float32] | None = None
        """The log-probability of each stored answer by the reference model; None if it is not computed ahead."""
        self._preferred = np.flatnonzero(chosen)[::2]
        self._learns_prompts = learns_prompts
        self.input_lengths = stored.lengths[np.flatnonzero(chosen)] - 1
        """The number of positions of each answer with its prompt."""

    def count_samples(self, rules: SampleRules) -> int:  # noqa: ARG002 - as `SampleSource` has it
        """Return the number of samples of one epoch."""
        return len(self._preferred)

    def sample(self, rules: SampleRules, number: int, index: int) -> PairSample:
        """See `SampleSource.sample`."""
        return self.read_pair(rules, number, int(self._preferred[index]))

    def read_pair(self, rules: SampleRules, number: int, first: int) -> PairSample:
        """Return the pair whose preferred answer is example `first` of the store, as sample `number`."""
        members = (first, first + 1)
        examples = [self.stored.read_example(member) for member in members]
        for ids, _ in examples:
            rules.check_tokens(ids, self.name)
        answers = [int(self.stored.answers[member]) if self._learns_prompts else 0 for member in members]
        log_probs = self.references
        references = [0.0 if log_probs is None else float(log_probs[member]) for member in members]
        return PairSample(number, examples, (answers[0], answers[1]), (references[0], references[1]))
