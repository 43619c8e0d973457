"""Serve the streams of agents: one connection for registration, keepalives, heartbeats and memberships (`wire.stream`).

Guarantees:
- A stream belongs to the pod whose token opened it, and its messages count for no other. It ends with that token and
  after `MAX_CONNECTION_SECONDS`, so that every token is checked again.
- A frame is bounded before it is stored. The stream of an agent that does not read is closed before unsent bytes
  accumulate.
- No frame is handled unless this process serves. A keepalive costs one update of the state and no answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from trainium_contract.wire.messages import (
    ErrorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    ImportedModules,
    Membership,
    RegisterRequest,
    RegisterResponse,
    RoleEndpoints,
)
from trainium_contract.wire.stream import FrameKind, FrameReader, FrameTooLongError, decode_keepalive, encode_frame
from trainium_operator.coordinator.membership_cache import MembershipCache
from trainium_operator.coordinator.messages import read_message
from trainium_operator.coordinator.state import FutureGenerationError, OldGenerationError
from trainium_operator.http.errors import RefusedError
from trainium_operator.plan.model.observed import HEARTBEAT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.wire.membership_change import MembershipChange
    from trainium_operator.coordinator.authentication import Authenticator, Caller
    from trainium_operator.coordinator.state import CoordinatorState
    from trainium_operator.plan.model.names import JobId

logger = logging.getLogger(__name__)
MAX_FRAME_BYTES = 832 * 1024
"""Above the largest heartbeat that the contract allows, with every character of its texts escaped."""
MAX_INLINE_MEMBERS = 64
"""Maximum number of members in the membership that the answer to a registration contains; a larger one is sent
separately, compressed."""

MAX_CONNECTION_SECONDS = 600.0
"""Agents open another stream after half of it."""
SILENT_SECONDS = 30.0
"""A stream without a frame for this long is closed; its agent counts as failed long before."""
SWEEP_SECONDS = 5.0
MAX_UNSENT = 1024 * 1024
"""Maximum number of bytes that an agent has not read; a membership of 1,000 is 40 kB."""
PIECE = 2 * 1024
"""Bytes passed to TLS at once, because its buffer grows to the largest piece and never shrinks."""
_PIECES_PER_TURN = 200
"""Pieces of a membership that are sent before other tasks of the loop run."""


class Stream(asyncio.Protocol):
    """The stream of one agent, created once its token is valid."""

    __slots__ = (
        "_on_closed",
        "_reader",
        "_streams",
        "_transport",
        "caller",
        "endpoints",
        "expires_at",
        "imported",
        "job_id",
        "known_generation",
        "last_seen",
    )

    def __init__(
        self,
        streams: Streams,
        caller: Caller,
        *,
        known_generation: int,
        expires_at: float,
        on_closed: Callable[[], None],
    ) -> None:
        """`known_generation`: the one that the agent has; `expires_at` by the loop's clock."""
        self.caller = caller
        self.known_generation = known_generation
        self.expires_at = expires_at
        self.endpoints: RoleEndpoints | None = None
        """The addresses of roles that were sent last."""
        self.imported: ImportedModules | None = None
        """The modules that were sent last."""
        self.last_seen = asyncio.get_running_loop().time()
        self.job_id: JobId | None = None
        """None until its registration."""
        self._streams = streams
        self._on_closed = on_closed
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._streams.opened.add(self)

    def connection_lost(self, _exc: BaseException | None) -> None:
        """Implement asyncio.Protocol."""
        self._transport = None
        self._streams.opened.discard(self)
        self._on_closed()

    def data_received(self, data: bytes) -> None:
        """Implement asyncio.Protocol."""
        try:
            for kind, payload in self._reader.split_frames(data):
                if self._transport is None:
                    return
                self._handle(kind, payload)
        except FrameTooLongError as error:
            self.end(413, str(error))

    def _handle(self, kind: int, payload: bytes) -> None:
        if not self._streams.is_serving():
            self.end(503, "not leader")
            return
        self.last_seen = asyncio.get_running_loop().time()
        try:
            status = self._answer(kind, payload)
        except Exception as error:  # noqa: BLE001 - reported to the sender, or logged as a defect
            status = self._refuse(error)
        if status and kind in (FrameKind.REGISTER, FrameKind.HEARTBEAT):
            self._streams.on_message("register" if kind == FrameKind.REGISTER else "heartbeat", status)

    def _answer(self, kind: int, payload: bytes) -> int:
        if kind == FrameKind.REGISTER:
            self.job_id, response = self._streams.register(self.caller, payload)
            if response.membership is not None:
                self.known_generation = max(self.known_generation, response.membership.generation)
            self._send(FrameKind.REGISTERED, response.model_dump_json(by_alias=True, exclude_none=True).encode())
            self._streams.send_current(self)
        elif self.job_id is None:
            self.end(400, "the first frame must be a registration")
            return 400
        elif kind == FrameKind.KEEPALIVE:
            self._streams.state.record_keepalive(self.job_id, self.caller.pod_uid, decode_keepalive(payload))
        elif kind == FrameKind.HEARTBEAT:
            ack = self._streams.handle_heartbeat(self.caller, payload)
            self._send(FrameKind.HEARTBEAT_ACK, ack.model_dump_json(by_alias=True, exclude_none=True).encode())
        elif kind == FrameKind.IMPORTED_MODULES:
            imported = read_message(ImportedModules, payload)
            self._streams.state.record_imported(self.job_id, self.caller.pod_uid, imported)
        else:
            return 0  # of a newer agent
        return 200

    def _refuse(self, error: Exception) -> int:
        if isinstance(error, OldGenerationError):
            self._send_error(error.status, str(error), error.current)
            return error.status
        if isinstance(error, FutureGenerationError):
            logger.warning("refused %s: %s", self.caller.pod_name, error)
        if isinstance(error, RefusedError):
            status, sentence = error.status, str(error)
        else:
            logger.error("answering a stream failed", exc_info=error)
            status, sentence = 500, "defect in the coordinator; its log has the details"
        self.end(status, sentence)
        return status

    def end(self, status: int, sentence: str) -> None:
        """Send the last frame, once; no frame is handled after it."""
        self._send_error(status, sentence)
        transport, self._transport = self._transport, None  # asyncio's transport fails if it is closed twice
        if transport is not None:
            transport.close()

    def abort(self) -> None:
        """Close without a frame."""
        if self._transport is not None:
            self._transport.abort()

    def send_membership(self, membership: Membership, change: MembershipChange | None) -> int:
        """Send a membership unless the agent has it; return the number of pieces sent.

        `change` is the difference to the previous one, for an agent that has that.
        """
        if self.job_id is None or self._transport is None or membership.generation <= self.known_generation:
            return 0
        before, self.known_generation = self.known_generation, membership.generation
        encoded = self._streams.memberships.encode(self.job_id, membership)
        if change is not None and (change.since, change.generation) == (before, self.known_generation):
            return self._send(FrameKind.MEMBERSHIP_CHANGE, encoded.encode_change(change))
        if encoded.packed is not None:
            return self._send(FrameKind.PACKED_MEMBERSHIP, encoded.packed)
        return self._send(FrameKind.MEMBERSHIP, encoded.plain)

    def send_endpoints(self, endpoints: RoleEndpoints) -> int:
        """Send the addresses of roles unless the agent has them; return the number of pieces sent."""
        if endpoints == self.endpoints or self._transport is None:
            return 0
        self.endpoints = endpoints
        return self._send(FrameKind.ROLE_ENDPOINTS, endpoints.model_dump_json(by_alias=True).encode())

    def send_imported(self, imported: ImportedModules) -> int:
        """Send the modules that ranks import unless the agent has them; return the number of pieces sent."""
        if imported is self.imported or self._transport is None:
            return 0
        self.imported = imported
        return self._send(FrameKind.IMPORTED_MODULES, imported.model_dump_json(by_alias=True).encode())

    def _send_error(self, status: int, sentence: str, generation: int | None = None) -> None:
        refusal = ErrorResponse(error=sentence, generation=generation, status=status)
        self._send(FrameKind.ERROR, refusal.model_dump_json(by_alias=True, exclude_none=True).encode())

    def _send(self, kind: FrameKind, payload: bytes) -> int:
        """Send a frame; return the number of pieces."""
        transport = self._transport
        if transport is None:
            return 0
        if transport.get_write_buffer_size() > MAX_UNSENT:
            transport.abort()
            return 0
        frame = encode_frame(kind, payload)
        starts = range(0, len(frame), PIECE)
        for at in starts:
            transport.write(frame[at : at + PIECE])
        return len(starts)


@dataclass(eq=False)
class Streams:
    """All streams of this process: applies their messages to the state, and notifies the plan of what matters."""

    state: CoordinatorState
    authenticator: Authenticator
    _: KW_ONLY
    is_serving: Callable[[], bool]
    notify: Callable[[str, str, bool], None]
    on_change: Callable[[HeartbeatRequest, HeartbeatRequest], None]
    on_message: Callable[[str, int], None]
    """`on_message(kind, status)` is called after each frame except keepalives."""
    has_failed: Callable[[JobId], bool] = lambda _job_id: False
    """Returns whether a job has failed."""
    memberships: MembershipCache = field(default_factory=MembershipCache, init=False)
    opened: set[Stream] = field(default_factory=set, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.state.on_publish = self._send_membership

    def register(self, caller: Caller, body: bytes) -> tuple[JobId, RegisterResponse]:
        """Register an agent. Raises RefusedError."""
        message = read_message(RegisterRequest, body)
        job_id = self.authenticator.check(caller, message)
        if self.state.register(job_id, message):
            about = {"namespace": message.namespace, "job": message.job, "node": message.node_name}
            logger.info("%s registered", message.pod_name, extra={**about, "pod": message.pod_name})
            self.notify(message.namespace, message.job, True)
        membership = self.state.get_membership(job_id)
        answer = RegisterResponse(
            heartbeat_seconds=HEARTBEAT_SECONDS,
            membership=membership if membership and len(membership.members) <= MAX_INLINE_MEMBERS else None,
            time=time.time(),
        )
        return job_id, answer

    def handle_heartbeat(self, caller: Caller, body: bytes) -> HeartbeatResponse:
        """Apply a heartbeat. Raises RefusedError."""
        message = read_message(HeartbeatRequest, body)
        job_id = self.authenticator.check(caller, message)
        accepted = self.state.record_heartbeat(job_id, message)
        if accepted.is_urgent and accepted.before is not None:
            self.on_change(accepted.before, message)
        if accepted.is_urgent or accepted.has_progressed:
            self.notify(message.namespace, message.job, accepted.is_urgent)
        return HeartbeatResponse(
            generation=self.state.get_published_generation(job_id),
            full_heartbeat_seconds=self.state.get_full_heartbeat_seconds(job_id),
            time=time.time(),
            job_failed=self.has_failed(job_id),
        )

    def send_current(self, stream: Stream) -> int:
        """Send what is served and the agent does not have: addresses of roles, membership, modules.

        Returns the number of pieces sent.
        """
        job_id = stream.job_id
        if job_id is None:
            return 0
        membership, endpoints = self.state.get_membership(job_id), self.state.get_endpoints(job_id)
        pieces = 0 if endpoints is None else stream.send_endpoints(endpoints)
        if membership is not None:
            pieces += stream.send_membership(membership, self.state.get_membership_change(job_id))
        imported = self.state.get_imported_modules(job_id, stream.caller.pod_uid)
        if imported is not None:
            pieces += stream.send_imported(imported)
        return pieces

    def _send_membership(self, job_id: JobId) -> None:
        streams = [stream for stream in self.opened if stream.job_id == job_id]
        if streams:
            sending = asyncio.get_running_loop().create_task(self._send_all(streams))
            self._tasks.add(sending)
            sending.add_done_callback(self._tasks.discard)

    async def _send_all(self, streams: list[Stream]) -> None:
        pieces = 0
        for stream in streams:
            pieces += self.send_current(stream)
            if pieces >= _PIECES_PER_TURN:
                pieces = 0
                await asyncio.sleep(0)

    async def run(self) -> None:
        """Close streams that have ended, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep()

    def sweep(self) -> None:
        """Close silent and expired streams, once."""
        now = asyncio.get_running_loop().time()
        for stream in list(self.opened):
            if now - stream.last_seen > SILENT_SECONDS:
                stream.abort()
            elif now > stream.expires_at:
                stream.end(401, "this stream is over; open another")

    def close(self) -> None:
        """Redirect all agents to the next coordinator."""
        for stream in list(self.opened):
            stream.end(503, "the coordinator is shutting down; try the next address")
