"""Which samples of a step a data-parallel rank computes, and in which passes.

Invariants: a pure function of the sizes, the rank and the position; the ranks' shares are contiguous, differ by one
sample at most and are together the step's batch; every rank makes the same number of passes at every step, the fewest
that hold the batch. The rows that a share does not fill are its last ones: they are computed like the others, and count
for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainium_contract.sizes import passes


def samples_at(position: int, batch: int, end: int | None) -> int:
    """Samples of the step that begins at global sample `position`; the last one before `end` takes what is left."""
    # Nobody trains beyond the end, but the loader looks ahead.
    return batch if end is None or position >= end else min(batch, end - position)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One data-parallel rank's part of every step."""

    global_size: int
    """Samples of a step over all ranks, but the last."""
    micro_size: int
    dp_rank: int
    dp_size: int
    end: int | None = None
    """Samples of the whole run, where they are what is counted."""

    @property
    def passes(self) -> int:
        """Micro-batches of one step, on this and on every other rank."""
        return passes(self.global_size, self.micro_size, self.dp_size)

    @property
    def offset(self) -> int:
        """The first of this rank's samples within a full step."""
        return self._part(self.global_size).start

    @property
    def size(self) -> int:
        """Samples of a full step; 0 where there are fewer samples than ranks and this is one of those without any."""
        return len(self._part(self.global_size))

    def at(self, position: int) -> range:
        """The global positions of this rank's samples in the step that begins at `position`."""
        part = self._part(samples_at(position, self.global_size, self.end))
        return range(position + part.start, position + part.stop)

    def _part(self, samples: int) -> range:
        """Which of a step's samples are this rank's."""
        return range(self.dp_rank * samples // self.dp_size, (self.dp_rank + 1) * samples // self.dp_size)
