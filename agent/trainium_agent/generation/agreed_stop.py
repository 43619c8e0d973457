"""Let all ranks of an attempt stop after the same step, where their program asks its agent whether to stop.

A rank that asks after the request waits for the answer; one that asked before it has gone on. So each agent requests
the stop of its ranks, then reads how often they have asked, and publishes the highest number. The answer is the number
above all of these, which no rank has passed.

Guarantees:
- All agents choose the same answer, or none where a rank has never asked in this attempt. The ranks of an agent that
  has to leave get a signal then.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from trainium_agent.generation.store import GenerationStore, StoreLostError
from trainium_worker import read_progress, release_stop, request_stop, stop_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainium_contract.wire.messages import Membership

_POLL_SECONDS = 0.05


class AgreedStop:
    """One agent's part in the stop of an attempt, in a separate thread."""

    def __init__(
        self,
        membership: Membership,
        node_rank: int,
        attempt: int,
        records: Sequence[Path],
        *,
        timeout: float,
        store: GenerationStore | None = None,
    ) -> None:
        """Take part for the ranks of this pod, whose records are given."""
        self.attempt = attempt
        self._generation = membership.generation
        self._members = len(membership.members)
        self._node_rank = node_rank
        self._records = tuple(records)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._failed = False
        self._signal_ranks: Callable[[], None] | None = None
        self._store = store or GenerationStore(membership)

    def start(self) -> None:
        """Begin; does not wait."""
        threading.Thread(target=self.run, name="agreed-stop", daemon=True).start()

    def run(self) -> None:
        """Agree with the other agents, and let the ranks stop, or signal them."""
        try:
            answer = self._agree(self._request())
        except StoreLostError:
            answer = None
        finally:
            self._store.close()
        for record in self._records:
            if answer is None:
                release_stop(record)
            else:
                stop_at(record, answer)
        with self._lock:
            self._failed = answer is None
            signal_ranks = self._signal_ranks
        if answer is None and signal_ranks is not None:
            signal_ranks()

    def or_signal(self, signal_ranks: Callable[[], None]) -> None:
        """Have the ranks of this pod signalled where no stop is agreed; without it they go on then. From any thread."""
        with self._lock:
            self._signal_ranks, failed = signal_ranks, self._failed
        if failed:
            signal_ranks()

    def _request(self) -> int:
        """Return how often the ranks of this pod have asked at most; 0 where one never has."""
        for record in self._records:
            if self._checks(record):
                request_stop(record)
        checks = [self._checks(record) for record in self._records]
        return max(checks) if all(checks) else 0

    def _checks(self, path: Path) -> int:
        record = read_progress(path)
        current = record is not None and (record.generation, record.attempt) == (self._generation, self.attempt)
        return record.stop_checks if record is not None and current else 0

    def _agree(self, checks: int) -> int | None:
        """Return the check at which all ranks stop; None where they cannot agree in time."""
        store = self._store
        if not store.connected:
            store.connect()
        keys = [store.key(self.attempt, "stop", node_rank) for node_rank in range(self._members)]
        store.set(keys[self._node_rank], str(checks))
        deadline = time.monotonic() + self._timeout
        while not store.has(*keys):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        found = [int(store.get(key)) for key in keys]
        return max(found) + 1 if all(found) else None
