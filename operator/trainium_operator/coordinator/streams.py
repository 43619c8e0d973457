"""Agents' streams: one connection for registration, signs of life, heartbeats and memberships (`wire.stream`).

Invariants: a stream belongs to the pod whose token opened it, ends with that token and after `LONGEST_SECONDS`, so that
every token is asked about again; a frame is bounded before it is kept; an agent that takes nothing from its connection
is closed before what waits for it adds up; nothing is taken unless this process serves. A sign of life costs one look
at the state and no answer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from trainium_contract.wire.messages import ErrorResponse
from trainium_contract.wire.stream import FrameKind, FrameReader, FrameTooLongError, frame, step_of
from trainium_operator.coordinator.hearing import objection
from trainium_operator.coordinator.state import FutureGenerationError
from trainium_operator.http.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.wire.membership_change import MembershipChange
    from trainium_contract.wire.messages import Membership
    from trainium_operator.coordinator.authentication import Caller
    from trainium_operator.coordinator.hearing import Hearing
    from trainium_operator.coordinator.spoken import Phrasebook
    from trainium_operator.plan.model.names import JobId

logger = logging.getLogger(__name__)

LONGEST_SECONDS = 600.0
"""Agents open another after half of it."""
SILENT_SECONDS = 30.0
"""A stream over which nothing came for so long is closed; its agent was given up long before."""
SWEEP_SECONDS = 5.0
MOST_WAITING = 1024 * 1024
"""Bytes that an agent has not taken from its connection; a membership of 1,000 is 40 kB."""
PIECE = 2 * 1024
"""Bytes that TLS is given at once: what it writes them to grows to the largest piece, and stays so for good."""
_AT_A_TIME = 200
"""Pieces of a membership that streams are given before others have their turn."""


class Stream(asyncio.Protocol):
    """One of them; made when its token is known to be good."""

    __slots__ = (
        "_left",
        "_reader",
        "_streams",
        "_transport",
        "after",
        "caller",
        "ends",
        "heard",
        "job_id",
    )

    def __init__(self, streams: Streams, caller: Caller, *, after: int, ends: float, left: Callable[[], None]) -> None:
        """`after`: the generation that the agent has; `ends`: of the loop's clock."""
        self.caller = caller
        self.after = after
        self.ends = ends
        self.heard = asyncio.get_running_loop().time()
        self.job_id: JobId | None = None
        """Known from its registration on."""
        self._streams = streams
        self._left = left
        self._reader = FrameReader(streams.longest_frame)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._streams.opened.add(self)

    def connection_lost(self, _exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._streams.opened.discard(self)
        self._left()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            for kind, payload in self._reader.frames(data):
                if self._transport is None:
                    return
                self._take(kind, payload)
        except FrameTooLongError as error:
            self.end(413, str(error))

    def _take(self, kind: int, payload: bytes) -> None:
        if not self._streams.is_serving():
            self.end(503, "not leader")
            return
        self.heard = asyncio.get_running_loop().time()
        try:
            status = self._answer(kind, payload)
        except Exception as error:  # noqa: BLE001 - told to whoever sent it, or logged as a defect
            status = self._refuse(error)
        if status and kind != FrameKind.KEEPALIVE:
            self._streams.on_message("register" if kind == FrameKind.REGISTER else "heartbeat", status)

    def _answer(self, kind: int, payload: bytes) -> int:
        hearing = self._streams.hearing
        if kind == FrameKind.REGISTER:
            self.job_id, welcome = hearing.register(self.caller, payload)
            if welcome.membership is not None:
                self.after = max(self.after, welcome.membership.generation)
            self._send(FrameKind.REGISTERED, welcome.model_dump_json(by_alias=True, exclude_none=True).encode())
            self._streams.tell(self)
        elif self.job_id is None:
            self.end(400, "the first frame must be a registration")
            return 400
        elif kind == FrameKind.KEEPALIVE:
            hearing.state.alive(self.job_id, self.caller.pod_uid, step_of(payload))
        elif kind == FrameKind.HEARTBEAT:
            heard = hearing.heartbeat(self.caller, payload)
            self._send(FrameKind.HEARTBEAT_ACK, heard.model_dump_json(by_alias=True, exclude_none=True).encode())
        else:
            return 0  # of a newer agent
        return 200

    def _refuse(self, error: Exception) -> int:
        found = objection(error)
        if isinstance(error, FutureGenerationError):
            logger.warning("refused %s: %s", self.caller.pod_name, error)
        if found is not None and found.status == 409:
            self._say_no(found.status, found.sentence, found.generation)
            return found.status
        status, sentence = (found.status, found.sentence) if found is not None else (403, str(error))
        if found is None and not isinstance(error, RefusedError):
            logger.error("answering a stream failed", exc_info=error)
            status, sentence = 500, "defect in the coordinator; its log has the details"
        self.end(status, sentence)
        return status

    def end(self, status: int, sentence: str) -> None:
        """The last word: it is said once, and nothing is taken after it."""
        self._say_no(status, sentence)
        transport, self._transport = self._transport, None  # asyncio's cannot be used any more once it is closed twice
        if transport is not None:
            transport.close()

    def abort(self) -> None:
        """Without a word."""
        if self._transport is not None:
            self._transport.abort()

    def bring(self, membership: Membership, change: MembershipChange | None) -> int:
        """Tell of a membership, unless the agent knows it; how many pieces that took.

        `change` leads to it from the one before, for an agent that knows that one.
        """
        if self.job_id is None or self._transport is None or membership.generation <= self.after:
            return 0
        before, self.after = self.after, membership.generation
        said = self._streams.phrasebook.say(self.job_id, membership)
        if change is not None and (change.since, change.generation) == (before, self.after):
            return self._send(FrameKind.MEMBERSHIP_CHANGE, said.changed(change))
        if said.packed is not None:
            return self._send(FrameKind.PACKED_MEMBERSHIP, said.packed)
        return self._send(FrameKind.MEMBERSHIP, said.plain)

    def _say_no(self, status: int, sentence: str, generation: int | None = None) -> None:
        refusal = ErrorResponse(error=sentence, generation=generation, status=status)
        self._send(FrameKind.ERROR, refusal.model_dump_json(by_alias=True, exclude_none=True).encode())

    def _send(self, kind: FrameKind, payload: bytes) -> int:
        """In how many pieces."""
        transport = self._transport
        if transport is None:
            return 0
        if transport.get_write_buffer_size() > MOST_WAITING:
            transport.abort()
            return 0
        whole = frame(kind, payload)
        starts = range(0, len(whole), PIECE)
        for at in starts:
            transport.write(whole[at : at + PIECE])
        return len(starts)


class Streams:
    """All streams of this process; `run` it beside the server."""

    def __init__(
        self,
        hearing: Hearing,
        phrasebook: Phrasebook,
        *,
        is_serving: Callable[[], bool],
        on_message: Callable[[str, int], None],
        longest_frame: int,
    ) -> None:
        """`on_message(kind, status)` follows each frame but signs of life."""
        self.hearing = hearing
        self.phrasebook = phrasebook
        self.is_serving = is_serving
        self.on_message = on_message
        self.longest_frame = longest_frame
        self.opened: set[Stream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        hearing.state.on_publish = self._published

    def tell(self, stream: Stream) -> int:
        """Bring the stream what is served, if that is news to its agent; how many pieces that took."""
        state, job_id = self.hearing.state, stream.job_id
        membership = state.membership(job_id) if job_id is not None else None
        if job_id is None or membership is None:
            return 0
        return stream.bring(membership, state.change(job_id))

    def _published(self, job_id: JobId) -> None:
        concerned = [stream for stream in self.opened if stream.job_id == job_id]
        if concerned:
            telling = asyncio.get_running_loop().create_task(self._tell_all(concerned))
            self._tasks.add(telling)
            telling.add_done_callback(self._tasks.discard)

    async def _tell_all(self, concerned: list[Stream]) -> None:
        pieces = 0
        for stream in concerned:
            pieces += self.tell(stream)
            if pieces >= _AT_A_TIME:
                pieces = 0
                await asyncio.sleep(0)

    async def run(self) -> None:
        """Close what has ended, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Once."""
        now = asyncio.get_running_loop().time()
        for stream in list(self.opened):
            if now - stream.heard > SILENT_SECONDS:
                stream.abort()
            elif now > stream.ends:
                stream.end(401, "this stream is over; open another")

    def close(self) -> None:
        """Send everybody to the next coordinator."""
        for stream in list(self.opened):
            stream.end(503, "the coordinator is shutting down; try the next address")
