"""Heartbeats and memberships over one open stream.

Guarantees:
- A change that the coordinator must see at once is sent at once, as a full heartbeat; full heartbeats also go out now
  and then. Between them the shortest frame shows that the agent lives.
- Heartbeats are answered in order, so an answer belongs to the oldest heartbeat that has none.
- A coordinator that leaves a heartbeat unanswered for `REQUEST_SECONDS` is unavailable.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_agent.coordinator.connection import REQUEST_SECONDS, CoordinatorUnavailableError
from trainium_agent.coordinator.stream import StreamEndedError, format_refusal, parse_refusal
from trainium_contract.wire.membership_change import MembershipChange
from trainium_contract.wire.messages import HeartbeatRequest, HeartbeatResponse, Membership
from trainium_contract.wire.stream import FrameKind, alive, jitter_fraction, must_send_now

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_agent.coordinator.stream import Stream

_JITTER = (0.9, 1.1)
"""Factors of the interval: agents that were answered at the same moment must not stay in step."""
_BURST_SECONDS = 0.05
"""Collects a burst of changes, and a dying rank's last lines, into one message."""
_CONFLICT = 409


@dataclass(frozen=True, slots=True)
class _Sent:
    message: HeartbeatRequest
    at: float
    """Monotonic."""
    wall_time: float
    """Unix seconds."""
    answered: asyncio.Future[None] | None = None
    """Set when the answer arrives."""


class Session:
    """Run `send_heartbeats` and `receive_frames` together; both raise CoordinatorUnavailableError."""

    def __init__(
        self,
        stream: Stream,
        heartbeat: Callable[[], HeartbeatRequest],
        send_now: asyncio.Event,
        *,
        on_acknowledged: Callable[[HeartbeatRequest, HeartbeatResponse, float], None],
        on_membership: Callable[[Membership], None],
        on_change: Callable[[MembershipChange], None],
        on_answer: Callable[[], None],
    ) -> None:
        """`send_now` is set when the next heartbeat should not wait.

        `on_acknowledged` gets the heartbeat, its answer and the Unix time at which the heartbeat was sent.
        """
        self._stream = stream
        self._heartbeat = heartbeat
        self._send_now = send_now
        self._on_acknowledged = on_acknowledged
        self._on_membership = on_membership
        self._on_change = on_change
        self._on_answer = on_answer
        self._unanswered: deque[_Sent] = deque()
        self._detail_seconds = 0.0
        self._flush: asyncio.Future[None] | None = None

    async def flush(self) -> None:
        """Send a full heartbeat now and wait for its answer."""
        flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flush = flushed
        self._send_now.set()
        await flushed

    async def send_heartbeats(self, seconds: float) -> None:
        """Send a heartbeat every `seconds` until the stream ends."""
        last: HeartbeatRequest | None = None
        last_at, share = 0.0, 1.0
        while True:
            self._send_now.clear()
            message, now = self._heartbeat(), time.monotonic()
            if self._unanswered and now - self._unanswered[0].at > REQUEST_SECONDS:
                raise CoordinatorUnavailableError(f"a heartbeat was not answered within {REQUEST_SECONDS:g} s")
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    changed = must_send_now(last, message)
                    if changed or self._flush is not None or now - last_at >= self._detail_seconds * share:
                        self._unanswered.append(_Sent(message, now, time.time(), self._flush))
                        last, last_at, self._flush = message, now, None
                        share = jitter_fraction(random.random(), after_news=changed)  # noqa: S311
                        await self._stream.send(FrameKind.HEARTBEAT, message)
                    else:
                        await self._stream.send(FrameKind.KEEPALIVE, alive(message))
            except (StreamEndedError, TimeoutError) as error:
                raise CoordinatorUnavailableError(str(error) or "the coordinator no longer reads the stream") from error
            try:
                await asyncio.wait_for(self._send_now.wait(), seconds * random.uniform(*_JITTER))  # noqa: S311
            except TimeoutError:
                continue
            await asyncio.sleep(min(_BURST_SECONDS, seconds))

    async def receive_frames(self) -> None:
        """Handle the coordinator's frames until the stream ends."""
        while True:
            try:
                kind, payload = await self._stream.receive()
                self._handle(kind, payload)
            except (StreamEndedError, ValidationError) as error:
                raise CoordinatorUnavailableError(str(error)) from error

    def _handle(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.MEMBERSHIP:
            self._on_membership(Membership.model_validate_json(payload))
        elif kind == FrameKind.MEMBERSHIP_CHANGE:
            self._on_change(MembershipChange.model_validate_json(payload))
        elif kind == FrameKind.HEARTBEAT_ACK:
            answer = HeartbeatResponse.model_validate_json(payload)
            self._detail_seconds = answer.full_heartbeat_seconds
            if (sent := self._answered()) is not None:
                self._on_acknowledged(sent.message, answer, sent.wall_time)
        elif kind == FrameKind.ERROR:
            refusal = parse_refusal(payload)
            if refusal.status != _CONFLICT:
                raise StreamEndedError(format_refusal(refusal))
            self._answered()  # the heartbeat's generation is over; the newer one is on its way

    def _answered(self) -> _Sent | None:
        """Return the oldest unanswered heartbeat, which an answer belongs to."""
        self._on_answer()
        if not self._unanswered:
            return None
        sent = self._unanswered.popleft()
        if sent.answered is not None and not sent.answered.done():
            sent.answered.set_result(None)
        return sent
