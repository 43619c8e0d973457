"""What became of the records: what a person wants to know before the run, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BARS = 12
_USUAL = 0.98


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of all sources together."""

    records: int
    examples: int
    """That are left, those that are held back among them."""
    held_back: int
    filtered: int
    """By data.examples.where."""
    left_out: int
    """By the user's function."""
    skipped: int
    """That could not be used."""
    cut: int
    dropped: int
    sequences: int
    """Samples of one epoch."""
    tokens: int
    """Positions that examples take in them."""
    sequence_length: int
    lengths: NDArray[Any]
    """Tokens of each example before it was cut or dropped."""
    unused: dict[str, int]
    """Records that hold what no example depends on, by its name."""

    @property
    def used(self) -> float:
        """Share of the positions of an epoch that hold an example."""
        return self.tokens / max(1, self.sequences * self.sequence_length)

    def line(self) -> str:
        """All of it in a line."""
        parts = [f"{self.examples:,} examples of {self.records:,} records"]
        named = (
            (self.filtered, "filtered"),
            (self.left_out, "left out by the function"),
            (self.skipped, "skipped"),
            (self.dropped, "dropped as too long"),
            (self.cut, "cut"),
            (self.held_back, "held back"),
        )
        parts += [f"{count:,} {name}" for count, name in named if count]
        parts.append(f"{self.sequences:,} sequences with {self.used:.1%} of their positions used")
        return ", ".join(parts)

    def histogram(self) -> list[tuple[int, int, int]]:
        """First and last length of a bar, and how many examples have such a length.

        Bars are of one width but for the last one, which holds the few that are much longer than the others.
        """
        if not len(self.lengths):
            return []
        width = max(1, -(-int(np.quantile(self.lengths, _USUAL)) // _BARS))
        counts = np.bincount(np.minimum((self.lengths - 1) // width, _BARS))
        bars = [(number * width + 1, (number + 1) * width, int(count)) for number, count in enumerate(counts)]
        first, last, count = bars[-1]
        return [*bars[:-1], (first, max(last, int(self.lengths.max())), count)]
