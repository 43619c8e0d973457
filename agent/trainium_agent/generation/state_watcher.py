"""Watch the state that the agents of a generation share, through publications of the agent of node rank 0.

Only that agent polls, its own server and at any size as often. It publishes the shared state as soon as it changed or
an agent notified it, else each second. The others wait for the publication in the store, so that waiting costs each of
them two messages a publication.

Guarantees:
- A publication holds the whole shared state, so an agent that missed some gets everything with the next.
- Where there is none (the first agent has left) the state is polled at intervals.
- No wait outlives a nudge.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.generation.store import GenerationStore, StoreLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.wire.messages import Membership

LONGEST_TURN_SECONDS = 1.0
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.2
_RECONNECT_SECONDS = 1.0
_LONGEST_BEGIN_SECONDS = 0.5
_KEPT = 64
"""Turns that late readers still find; who comes later begins with the newest."""
_OVER = ""
"""The turn after which none are called."""


def _count_key(store: GenerationStore) -> str:
    return store.key("turns")


def _turn_key(store: GenerationStore, number: int) -> str:
    return store.key("turn", number)


class StatePublisher:
    """Publishes the state of a generation from a separate thread, in the agent that serves its store."""

    def __init__(self, membership: Membership) -> None:
        self._store = GenerationStore(membership)
        self._rung = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turn-caller", daemon=True)

    def start(self) -> None:
        """Begin to call; the shared state has to exist."""
        self._thread.start()

    def notify(self) -> None:
        """Call a turn now: something changed in the store that is not in the shared state."""
        self._rung.set()

    def stop(self) -> None:
        """Call the last turn and end; does not wait for it."""
        self._stopped.set()
        self._rung.set()

    def _run(self) -> None:
        try:
            self._call_turns()
            self._call(_OVER)
        except StoreLostError:
            pass  # then an agent that waits notices the store's end, or its wait times out
        finally:
            self._store.close()

    def _call_turns(self) -> None:
        store, last, publish_at = self._store, "", 0.0
        while not self._stopped.is_set():
            rung = self._rung.wait(_POLL_SECONDS)
            self._rung.clear()
            try:
                if not store.connected:
                    store.connect()
                state = store.get(store.key("state"))  # as it is written, with what only newer agents know of it
                if rung or state != last or time.monotonic() >= publish_at:
                    self._call(state)
                    last, publish_at = state, time.monotonic() + LONGEST_TURN_SECONDS
            except StoreLostError:
                last = ""  # publish what was notified
                time.sleep(_RETRY_SECONDS)

    def _call(self, text: str) -> None:
        store = self._store
        number = store.count(_count_key(store)) + 1
        store.set(_turn_key(store, number), text)
        store.count(_count_key(store), 1)
        if number > _KEPT:
            store.remove(_turn_key(store, number - _KEPT))


class StateWatcher:
    """Follows the shared state from a separate thread and reports, from there, each change and a lost store."""

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
        # Where no turns are called all agents ask one server: at sixty members each 0.05 s, at a thousand each 0.8 s.
        self._interval = max(0.05, len(membership.members) * 0.0008)
        self._turn = 0
        """The last one received; 0 while none is expected."""
        self._last_turn = 0
        """Nothing followed it when it was last awaited."""
        self._observed = threading.Condition()
        self._observations = 0
        self._state: GenerationState | None = None
        self._thread = threading.Thread(target=self._run, name="state-watcher", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """End soon; does not wait for an operation that is under way."""
        self._stopped.set()

    @property
    def observations(self) -> int:
        """Counts turns and nudges; see `next_observation`."""
        with self._observed:
            return self._observations

    def nudge(self, seen: GenerationState | None = None) -> None:
        """End the wait of who waits for a look."""
        with self._observed:
            self._state = seen or self._state
            self._observations += 1
            self._observed.notify_all()

    def next_observation(self, after: int, seconds: float) -> GenerationState | None:
        """Return the shared state once `observations` is beyond `after`; None where that takes longer."""
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
                if not self._store.connected:
                    self._store.connect()
                    lost = False
                state = self._next_state()
            except StoreLostError:
                if not lost and not self._stopped.is_set():
                    self._on_loss()
                lost = True
                self._stopped.wait(_RECONNECT_SECONDS)
                continue
            if state is not None:
                self.nudge(state)
                if state != last and not self._stopped.is_set():
                    self._on_change(state)
                last = state
            if not self._turn:
                pause = self._interval if last is not None else min(2 * pause, _LONGEST_BEGIN_SECONDS)
                self._stopped.wait(pause)

    def _next_state(self) -> GenerationState | None:
        """Return the state of the next publication, or the current one where there is none; None without a change."""
        if self._turn:
            return self._await_turn(self._turn + 1)
        if self._is_new() and not self._store.has_started():
            return None
        number = self._store.count(_count_key(self._store))  # before the state: what changes after it has a later turn
        state = self._store.state()
        self._turn = number if number != self._last_turn else 0
        return state

    def _is_new(self) -> bool:
        with self._observed:
            return self._state is None

    def _await_turn(self, number: int) -> GenerationState | None:
        # Until it arrives it counts as the missing one.
        self._turn, self._last_turn = 0, number - 1
        text = self._store.get(_turn_key(self._store, number))
        if text == _OVER:
            self._last_turn = number
            return None
        self._turn = number
        return GenerationState.decode(text)
