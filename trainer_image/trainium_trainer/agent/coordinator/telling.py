"""Signs of life over a stream: a heartbeat in full when there is news, and now and then; else the shortest frame.

Invariants: what must be seen at once is sent at once; heartbeats are answered in their order, so an answer belongs to
the oldest that has none; a coordinator that leaves one unanswered for `REQUEST_SECONDS` is given up.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.wire.membership_change import MembershipChange
from trainium_contract.wire.messages import HeartbeatRequest, HeartbeatResponse, Membership
from trainium_contract.wire.stream import FrameKind, alive, jitter_fraction, must_send_now
from trainium_trainer.agent.coordinator.requests import REQUEST_SECONDS, CoordinatorUnavailableError
from trainium_trainer.agent.coordinator.stream import StreamEndedError, refusal_of, said

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.agent.coordinator.stream import Stream

SPREAD = (0.9, 1.1)
"""Of the interval: agents that were answered at the same moment must not stay in step for ever."""
BURST_SECONDS = 0.05
"""In which a burst of news, and a dying rank's last lines, come together for one message."""
_CONFLICT = 409


@dataclass(frozen=True, slots=True)
class _Sent:
    message: HeartbeatRequest
    at: float
    """Monotonic."""
    asked: float
    """Unix seconds."""


class Telling:
    """`beat` and `listen` beside each other; both raise CoordinatorUnavailableError."""

    def __init__(
        self,
        stream: Stream,
        heartbeat: Callable[[], HeartbeatRequest],
        news: asyncio.Event,
        *,
        on_acknowledged: Callable[[HeartbeatRequest, HeartbeatResponse, float], None],
        on_membership: Callable[[Membership], None],
        on_change: Callable[[MembershipChange], None],
        on_answer: Callable[[], None],
    ) -> None:
        """`news` is set when the next heartbeat should not wait."""
        self._stream = stream
        self._heartbeat = heartbeat
        self._news = news
        self._on_acknowledged = on_acknowledged
        self._on_membership = on_membership
        self._on_change = on_change
        self._on_answer = on_answer
        self._unanswered: deque[_Sent] = deque()
        self._detail_seconds = 0.0

    async def beat(self, seconds: float) -> None:
        """Give signs of life, `seconds` apart, until the stream ends."""
        told: HeartbeatRequest | None = None
        told_at, share = 0.0, 1.0
        while True:
            self._news.clear()
            message, now = self._heartbeat(), time.monotonic()
            self._give_up_on_the_silent(now)
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    news = must_send_now(told, message)
                    if news or now - told_at >= self._detail_seconds * share:
                        self._unanswered.append(_Sent(message, now, time.time()))
                        told, told_at = message, now
                        share = jitter_fraction(random.random(), after_news=news)  # noqa: S311
                        await self._stream.send(FrameKind.HEARTBEAT, message)
                    else:
                        await self._stream.send(FrameKind.KEEPALIVE, alive(message))
            except (StreamEndedError, TimeoutError) as error:
                raise CoordinatorUnavailableError(str(error) or "the coordinator takes nothing any more") from error
            try:
                await asyncio.wait_for(self._news.wait(), seconds * random.uniform(*SPREAD))  # noqa: S311
            except TimeoutError:
                continue
            await asyncio.sleep(min(BURST_SECONDS, seconds))

    def _give_up_on_the_silent(self, now: float) -> None:
        if self._unanswered and now - self._unanswered[0].at > REQUEST_SECONDS:
            raise CoordinatorUnavailableError(f"a heartbeat was not answered within {REQUEST_SECONDS:g} s")

    async def listen(self) -> None:
        """Take what the coordinator says until the stream ends."""
        while True:
            try:
                kind, payload = await self._stream.receive()
                self._take(kind, payload)
            except (StreamEndedError, ValidationError) as error:
                raise CoordinatorUnavailableError(str(error)) from error

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.MEMBERSHIP:
            self._on_membership(Membership.model_validate_json(payload))
        elif kind == FrameKind.MEMBERSHIP_CHANGE:
            self._on_change(MembershipChange.model_validate_json(payload))
        elif kind == FrameKind.HEARTBEAT_ACK:
            answer = HeartbeatResponse.model_validate_json(payload)
            self._detail_seconds = answer.full_heartbeat_seconds or 0.0
            self._on_answer()
            if self._unanswered:
                sent = self._unanswered.popleft()
                self._on_acknowledged(sent.message, answer, sent.asked)
        elif kind == FrameKind.ERROR:
            refusal = refusal_of(payload)
            if refusal.status != _CONFLICT:
                raise StreamEndedError(said(refusal))
            self._on_answer()  # of a generation that is over; the newer one is on its way
            if self._unanswered:
                self._unanswered.popleft()
