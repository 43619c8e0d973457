"""Watch the state that the agents of a generation share, through publications of the agent of node rank 0.

Only that agent polls, and only its own server, at the same rate for any number of members. It publishes the shared
state when it changed or an agent notified it, and at least each second. The other agents wait for the publication in
the store, which costs each of them two messages a publication.

Guarantees:
- A publication holds the whole shared state, so an agent that missed some is complete with the next.
- Without publications (node rank 0 has left) the agents poll the state at intervals.
- `interrupt` ends every wait.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.shared_state.store import GenerationStore, StoreLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.wire.messages import Membership

MAX_PUBLISH_INTERVAL_SECONDS = 1.0
_POLL_SECONDS = 0.05
POLL_SECONDS_PER_MEMBER = 0.0008
"""Without publications all agents poll one server: each every 0.05 s with 60 members, every 0.8 s with 1,000."""
_RETRY_SECONDS = 0.2
_RECONNECT_SECONDS = 1.0
_MAX_BEGIN_PAUSE_SECONDS = 0.5
_KEPT = 64
"""Publications that are kept for late readers; an even later reader continues with the newest."""
_LAST_PUBLICATION = ""
"""The text of the last publication."""


def _count_key(store: GenerationStore) -> str:
    return store.format_key("publications")


def _format_publication_key(store: GenerationStore, number: int) -> str:
    return store.format_key("publication", number)


class StatePublisher:
    """Publishes the shared state from a separate thread, in the agent that serves the store."""

    def __init__(self, membership: Membership) -> None:
        self._store = GenerationStore(membership)
        self._notified = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="state-publisher", daemon=True)

    def start(self) -> None:
        """Start the thread; the shared state must exist."""
        self._thread.start()

    def notify(self) -> None:
        """Publish now: something changed in the store that is not in the shared state."""
        self._notified.set()

    def stop(self) -> None:
        """Request the last publication and the end of the thread; do not wait for them."""
        self._stopped.set()
        self._notified.set()

    def _run(self) -> None:
        try:
            self._publish_changes()
            self._publish(_LAST_PUBLICATION)
        except StoreLostError:
            pass  # waiting agents then notice the end of the store, or their wait times out
        finally:
            self._store.close()

    def _publish_changes(self) -> None:
        store, last, publish_at = self._store, "", 0.0
        while not self._stopped.is_set():
            notified = self._notified.wait(_POLL_SECONDS)
            self._notified.clear()
            try:
                store.connect()
                state = store.get(
                    store.format_key("state")
                )  # the stored text, which keeps fields that only newer agents know
                if notified or state != last or time.monotonic() >= publish_at:
                    self._publish(state)
                    last, publish_at = state, time.monotonic() + MAX_PUBLISH_INTERVAL_SECONDS
            except StoreLostError:
                last = ""  # publish the state again after the store returns
                time.sleep(_RETRY_SECONDS)

    def _publish(self, text: str) -> None:
        store = self._store
        number = store.count(_count_key(store)) + 1
        store.set(_format_publication_key(store, number), text)
        store.count(_count_key(store), 1)
        if number > _KEPT:
            store.remove(_format_publication_key(store, number - _KEPT))


class WaitInterruptedError(Exception):
    """The agent must leave the generation while it waits for the other agents."""


class StateWatcher:
    """Follows the shared state in a separate thread; calls back from it for each change and when the store is lost."""

    def __init__(
        self,
        membership: Membership,
        on_change: Callable[[GenerationState], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._store = GenerationStore(membership)
        self._on_change = on_change
        self._on_loss = on_loss
        self._stopped = threading.Event()
        self._interval = max(_POLL_SECONDS, len(membership.members) * POLL_SECONDS_PER_MEMBER)
        self._publication = 0
        """Number of the last publication received; 0 while none is expected."""
        self._previous_publication = 0
        """Number of the last publication received before the newest wait, which ended without another one."""
        self.is_interrupted = False
        """Whether the agent must leave the generation."""
        self._observed = threading.Condition()
        self._observations = 0
        self._state: GenerationState | None = None
        self._thread = threading.Thread(target=self._run, name="state-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Request the end of the thread; do not wait for a pending operation."""
        self._stopped.set()

    @property
    def observations(self) -> int:
        """Number of publications and interruptions; see `wait_for_observation`."""
        with self._observed:
            return self._observations

    def interrupt(self) -> None:
        """End this wait and all later ones, because the agent must leave the generation. Thread-safe."""
        self.is_interrupted = True
        self._add_observation(self._state)

    def raise_if_interrupted(self) -> None:
        """Raise WaitInterruptedError if the agent must leave the generation."""
        if self.is_interrupted:
            raise WaitInterruptedError("ordered to leave")

    def _add_observation(self, state: GenerationState | None) -> None:
        with self._observed:
            self._state = state
            self._observations += 1
            self._observed.notify_all()

    def wait_for_observation(self, after: int, seconds: float) -> GenerationState | None:
        """Return the shared state once `observations` exceeds `after`; None after `seconds`."""
        with self._observed:
            return self._state if self._observed.wait_for(lambda: self._observations > after, seconds) else None

    def _run(self) -> None:
        try:
            self._follow()
        finally:
            self._store.close()

    def _follow(self) -> None:
        last: GenerationState | None = None
        lost = False
        pause = self._interval
        while not self._stopped.is_set():
            try:
                self._store.connect()
                state = self._read_next_state()
                lost = False
            except StoreLostError:
                if not lost and not self._stopped.is_set():
                    self._on_loss()
                lost = True
                self._stopped.wait(_RECONNECT_SECONDS)
                continue
            if state is not None:
                self._add_observation(state)
                if state != last and not self._stopped.is_set():
                    self._on_change(state)
                last = state
            if not self._publication:
                pause = self._interval if last is not None else min(2 * pause, _MAX_BEGIN_PAUSE_SECONDS)
                self._stopped.wait(pause)

    def _read_next_state(self) -> GenerationState | None:
        """Return the state of the next publication, or the current state if there are none; None without a change."""
        if self._publication:
            return self._await_publication(self._publication + 1)
        if self._state is None and not self._store.has_state():
            return None
        number = self._store.count(_count_key(self._store))  # read first: a later change has a later publication
        state = self._store.read_state()
        self._publication = number if number != self._previous_publication else 0
        return state

    def _await_publication(self, number: int) -> GenerationState | None:
        # Until the publication arrives it counts as missing.
        self._publication, self._previous_publication = 0, number - 1
        text = self._store.get(_format_publication_key(self._store, number))
        if text == _LAST_PUBLICATION:
            self._previous_publication = number
            return None
        self._publication = number
        return GenerationState.decode(text)
