"""How the agents of a generation find out together why ranks stand still: one asks, all answer through the store.

An agent whose rank is overdue raises the inquiry's number in the shared state. Every agent that sees it writes down how
long each of its ranks has been still. The one who asked reads the answers once all are there, or after a moment.

Invariants: asking changes nothing for the ranks; an answer belongs to one inquiry of one attempt; when the one who
asked is lost, another asks anew; while somebody is excused, questions get rarer.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_trainer.agent.hang import detection
from trainium_trainer.agent.hang.detection import Finding, FindingKind, Standstill

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.agent.exits.restart_policy import GenerationState
    from trainium_trainer.agent.generation.generation_store import GenerationStore

_PATIENCE_SECONDS = 2.0
_SECONDS_PER_MEMBER = 0.002
"""What the slowest of many agents needs to see the question (see `StateWatcher`) and to answer it."""
_TAKE_OVER_SECONDS = 10.0


class Inquiry:
    """One agent's part in the inquiries of one generation; used by the generation's worker only."""

    def __init__(
        self,
        store: GenerationStore,
        node_rank: int,
        members: int,
        look: Callable[[], tuple[Standstill, ...]],
    ) -> None:
        """`look` gives this agent's own word."""
        self._store = store
        self._node_rank = node_rank
        self._members = members
        self._look = look
        self._asked = 0
        self._deadline = 0.0
        self._answered = 0
        self._heard_of_at = 0.0
        self._not_before = 0.0

    @property
    def open(self) -> bool:
        """Whether this agent waits for answers."""
        return self._asked > 0

    def forget(self) -> None:
        """Another attempt begins."""
        self._asked = 0
        self._heard_of_at = self._not_before = 0.0

    def ask(self, attempt: int) -> None:
        """A local rank is overdue: ask all, unless somebody is asking or everybody was excused a moment ago.

        Raises StoreLostError.
        """
        now = time.monotonic()
        if self.open or now < self._not_before or now < self._heard_of_at + _TAKE_OVER_SECONDS:
            return
        own = self._node_rank

        def asked(state: GenerationState) -> GenerationState:
            if state.attempt != attempt or state.stopped is not None:
                return state
            return replace(state, inquiry=state.inquiry + 1, asked_in=attempt, asked_by=own)

        state = self._store.change(asked)
        if (state.asked_in, state.asked_by) != (attempt, own):
            return
        self._asked = state.inquiry
        self._deadline = now + _PATIENCE_SECONDS + self._members * _SECONDS_PER_MEMBER
        self.answer(state)

    def answer(self, state: GenerationState) -> None:
        """Say what is seen of the local ranks, once per inquiry. Raises StoreLostError."""
        if state.inquiry <= self._answered or state.asked_in != state.attempt:
            return
        self._answered = state.inquiry
        if state.asked_by != self._node_rank:
            self._heard_of_at = time.monotonic()
            self._asked = 0  # somebody else asked at the same time, or took over
        store = self._store
        store.set(self._key(state.attempt, self._node_rank), f"{state.inquiry} {detection.encode(self._look())}")
        store.count(self._key(state.attempt, "answers", state.inquiry), 1)

    def conclude(self, attempt: int) -> Finding | None:
        """What the answers say, when all are there or time is up; None before. Raises StoreLostError."""
        if not self.open:
            return None
        store = self._store
        heard = store.count(self._key(attempt, "answers", self._asked))
        if heard < self._members and time.monotonic() < self._deadline:
            return None
        finding = detection.find(self._testimony(store, attempt), self._members)
        self._asked = 0
        self._not_before = time.monotonic() + finding.retry_seconds
        return finding

    def publish(self, attempt: int, finding: Finding) -> None:
        """Let all know the finding before the attempt ends. Raises StoreLostError."""
        self._store.set(self._key(attempt, "finding"), finding.encode())

    def published(self, attempt: int) -> Finding:
        """The finding that ended an attempt; that nobody is odd, where none was left. Raises StoreLostError."""
        store, key = self._store, self._key(attempt, "finding")
        return Finding.decode(store.get(key)) if store.has(key) else Finding(FindingKind.COLLECTIVE)

    def _testimony(self, store: GenerationStore, attempt: int) -> dict[int, tuple[Standstill, ...]]:
        found = {}
        for node_rank in range(self._members):
            key = self._key(attempt, node_rank)
            if store.has(key):
                number, _, text = store.get(key).partition(" ")
                if int(number) == self._asked:
                    found[node_rank] = detection.decode(text)
        return found

    def _key(self, attempt: int, *parts: object) -> str:
        return self._store.key(attempt, "standstill", *parts)
