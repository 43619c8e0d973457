"""Share out work of a job's ranks on the host: artifacts, evaluation.

Guarantees:
- Nothing here touches a device.
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
"""Ranks that are done wait this long for the slowest; a lost peer is noticed at once, by its connection."""


@dataclass(frozen=True, slots=True)
class Peers:
    """All ranks, and this one's number."""

    rank: int
    size: int
    node_rank: int = 0
    """Number of this process within its node."""
    group: ProcessGroup | None = None
    """None exactly when `size` is 1."""
    waiting: AbstractContextManager[None] = field(default_factory=contextlib.nullcontext)
    """Entered while the others are waited for."""

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
        """Return when all ranks have come here. Collective."""
        self.gather(self.rank)
