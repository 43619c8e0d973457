"""Who of a generation has finished or yielded: counters in its store, and how its agents part at the end.

Invariants: node 0 hosts the store, so it stays until the others have seen that all are finished; a store that cannot be
reached is no answer, never an error.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainium_contract.wire.messages import WorkerPhase
from trainium_trainer.agent.generation.generation_store import StoreLostError

if TYPE_CHECKING:
    from trainium_trainer.agent.generation.generation_store import GenerationStore

_POLL_SECONDS = 0.1
_FAREWELL_SECONDS = 5.0
_ORPHANED_SECONDS = 30.0


class Roll:
    """One agent's view of the roll; used by the generation's worker only."""

    def __init__(self, store: GenerationStore, node_rank: int, members: int) -> None:
        self._store = store
        self._node_rank = node_rank
        self._members = members
        self._seen_at = 0.0

    def sign(self, attempt: int, phase: WorkerPhase) -> None:
        """This pod's ranks all ended so."""
        self._seen_at = time.monotonic()
        store = self._store
        self._add(store.key(attempt, phase), 1)

    def all_signed(self, attempt: int) -> bool:
        """Whether the ranks of all members have ended in peace."""
        return (
            sum(self._count(attempt, phase) for phase in (WorkerPhase.YIELDED, WorkerPhase.FINISHED)) >= self._members
        )

    def all_finished(self, attempt: int) -> bool:
        """Whether every member has finished."""
        store = self._store
        if not store.connected:
            try:
                store.connect()
            except StoreLostError:
                # Node 0 leaves once all are finished; had it been lost, a newer generation would have come by now.
                return time.monotonic() > self._seen_at + _ORPHANED_SECONDS
        self._seen_at = time.monotonic()
        return self._count(attempt, WorkerPhase.FINISHED) == self._members

    def part(self) -> None:
        """Leave after all have finished."""
        key, others = self._store.key("left"), self._members - 1
        if self._node_rank != 0:
            self._add(key, 1)
            return
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < deadline and self._add(key, 0) < others:
            time.sleep(_POLL_SECONDS)

    def _count(self, attempt: int, phase: WorkerPhase) -> int:
        return self._add(self._store.key(attempt, phase), 0)

    def _add(self, key: str, amount: int) -> int:
        try:
            return self._store.count(key, amount)
        except StoreLostError:
            return 0
