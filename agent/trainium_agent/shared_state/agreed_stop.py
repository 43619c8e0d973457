"""Stop all ranks of an attempt after the same step, if their program asks its agent whether to stop.

A rank asks at each step. One that asks after the stop was requested waits for the answer; one that asked before
continues with its step. Each agent requests the stop of its ranks, then reads how often they have asked, and publishes
the highest count. All ranks stop at the next check after the highest count of all, which no rank has passed. They need
not save to storage if each agent knows that the memory of its node remains.

Guarantees:
- All agents choose the same check. If a rank has never asked in this attempt they choose none, and the ranks of an
  agent that has to leave get a signal.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from trainium_agent.shared_state.store import GenerationStore, StoreLostError
from trainium_worker.progress_record import read_progress, release_stop, request_stop, stop_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainium_contract.wire.messages import Membership

_POLL_SECONDS = 0.05


class _Answer(NamedTuple):
    """The check at which all ranks stop, and whether the memory of all nodes remains then."""

    check: int
    memory_remains: bool


class AgreedStop:
    """Takes part in the stop of an attempt for one agent, in a separate thread."""

    def __init__(
        self,
        membership: Membership,
        node_rank: int,
        attempt: int,
        records: Sequence[Path],
        *,
        memory_remains: bool,
        timeout: float,
        store: GenerationStore | None = None,
    ) -> None:
        """Prepare the stop.

        records: the progress files of this pod's ranks. memory_remains: their next attempt has the memory of this one.
        """
        self.attempt = attempt
        self._generation = membership.generation
        self._members = len(membership.members)
        self._node_rank = node_rank
        self._records = tuple(records)
        self._memory_remains = memory_remains
        self._answer: _Answer | None = None
        self._timeout = timeout
        self._lock = threading.Lock()
        self._failed = False
        self._signal_ranks: Callable[[], None] | None = None
        self._store = store or GenerationStore(membership)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self.run, name="agreed-stop", daemon=True).start()

    def run(self) -> None:
        """Agree with the other agents, then publish the answer to the ranks, or signal them."""
        try:
            answer = self._agree(self._request())
        except (StoreLostError, ValueError):  # ValueError: an agent of another version
            answer = None
        finally:
            self._store.close()
        with self._lock:
            self._answer = answer
            self._publish()
            self._failed = answer is None
            signal_ranks = self._signal_ranks
        if answer is None and signal_ranks is not None:
            signal_ranks()

    def end_memory(self) -> None:
        """Let the ranks save to storage, because the memory of this node will not remain after all. Thread-safe."""
        with self._lock:
            self._memory_remains = False
            if self._answer is not None:
                self._publish()

    def _publish(self) -> None:
        for record in self._records:
            if self._answer is None:
                release_stop(record)
            else:
                check, memory_remains = self._answer
                stop_at(record, check, memory_remains=memory_remains and self._memory_remains)

    def signal_on_failure(self, signal_ranks: Callable[[], None]) -> None:
        """Signal the ranks of this pod if no stop is agreed; without this call they continue then. Thread-safe."""
        with self._lock:
            self._signal_ranks, failed = signal_ranks, self._failed
        if failed:
            signal_ranks()

    def _request(self) -> int:
        """Request the stop and return the highest count of checks of this pod's ranks; 0 if a rank never asked."""
        for record in self._records:
            if self._count_checks(record):
                request_stop(record)
        checks = [self._count_checks(record) for record in self._records]
        return max(checks) if all(checks) else 0

    def _count_checks(self, path: Path) -> int:
        record = read_progress(path)
        is_current = record is not None and (record.generation, record.attempt) == (self._generation, self.attempt)
        return record.stop_checks if record is not None and is_current else 0

    def _agree(self, max_checks: int) -> _Answer | None:
        """Return how all ranks stop; None if the agents do not agree in time."""
        store = self._store
        store.connect()
        keys = [store.format_key(self.attempt, "stop", node_rank) for node_rank in range(self._members)]
        store.set(keys[self._node_rank], f"{max_checks} {self._memory_remains:d}")
        deadline = time.monotonic() + self._timeout
        while not store.has(*keys):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        answers = [[int(value) for value in store.get(key).split()] for key in keys]
        checks = [check for check, _ in answers]
        return _Answer(max(checks) + 1, all(remains for _, remains in answers)) if all(checks) else None
