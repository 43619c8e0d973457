"""Which samples of a step a data-parallel rank computes, and in which passes.

Invariants: a pure function of the sizes and the rank; the ranks' shares are contiguous, differ by one sample at most
and are together the global batch; every rank makes the same number of passes, the fewest that hold it. The rows that a
share does not fill are its last ones: they are computed like the others, and count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainium_contract.sizes import passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One data-parallel rank's part of every step."""

    global_size: int
    micro_size: int
    dp_rank: int
    dp_size: int

    @property
    def passes(self) -> int:
        """Micro-batches of one step, on this and on every other rank."""
        return passes(self.global_size, self.micro_size, self.dp_size)

    @property
    def offset(self) -> int:
        """The first of this rank's samples within the global batch."""
        return self.dp_rank * self.global_size // self.dp_size

    @property
    def size(self) -> int:
        """Samples of one step; 0 where there are fewer samples than ranks and this is one of those without any."""
        return (self.dp_rank + 1) * self.global_size // self.dp_size - self.offset

    @property
    def empty_passes(self) -> int:
        """Passes at the end of a step that hold no sample at all."""
        return self.passes - -(-self.size // self.micro_size)
