"""Divide work on the host between a job's ranks: artifacts, evaluation.

Guarantees:
- No device is used.
- Every method marked *collective* is called by all ranks in the same order.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from torch import distributed as dist

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

T = TypeVar("T")
_TIMEOUT = timedelta(hours=12)
"""The time that finished ranks wait for the slowest; a failed peer is detected at once by its connection."""


@dataclass(frozen=True, slots=True)
class Peers:
    """All ranks, and the number of this rank."""

    rank: int
    size: int
    node_rank: int = 0
    """The number of this process within its node."""
    group: ProcessGroup | None = None
    """None exactly when `size` is 1."""
    waiting: AbstractContextManager[None] = field(default_factory=contextlib.nullcontext)
    """A context of waits for the other ranks."""

    @staticmethod
    def open(rank: int, size: int, node_rank: int = 0, *, waiting: AbstractContextManager[None] | None = None) -> Peers:
        """Open a separate group over gloo. Collective."""
        group = dist.new_group(backend="gloo", timeout=_TIMEOUT) if size > 1 else None
        return Peers(rank, size, node_rank, group, waiting or contextlib.nullcontext())

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order. Collective."""
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.size
        with self.waiting:
            dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self.gather(self.rank)
