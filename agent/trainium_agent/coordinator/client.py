"""Keep the agent registered with the coordinator, and exchange heartbeats and memberships with it over a stream.

Guarantees:
- Training never waits for the coordinator.
- An urgent change is sent at once, as a full heartbeat; full heartbeats are also sent at intervals. Between them the
  shortest frame shows that the agent is alive.
- Heartbeats are answered in order, so an answer belongs to the oldest unanswered heartbeat.
- A coordinator that leaves a heartbeat unanswered for `REQUEST_SECONDS` is unavailable.
- Every failure is retried for ever with jittered backoff, at each address of the coordinator's name in turn, because
  only the leader answers.
- The agent registers again with each stream; a registration is idempotent.
- Token and certificate authority are read again whenever they may have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_agent.coordinator.connection import (
    REQUEST_SECONDS,
    CertificateError,
    Connector,
    CoordinatorUnavailableError,
    JobDeletedError,
    PodRefusedError,
    StreamEndedError,
    format_refusal,
    parse_refusal,
)
from trainium_contract.wire.membership_change import MembershipChange, StaleChangeError, apply_change
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    ImportedModules,
    Membership,
    RegisterRequest,
    RoleEndpoints,
)
from trainium_contract.wire.stream import FrameKind, draw_jitter, encode_keepalive, must_send_now

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from trainium_agent.coordinator.connection import Address, Stream
    from trainium_agent.settings import AgentSettings
    from trainium_contract.wire.messages import RegisterResponse

_log = logging.getLogger(__name__)
_STREAM_SECONDS = (240.0, 300.0)
"""Age at which a stream is replaced, so that its token is renewed; the coordinator closes it at 600 s."""
_FIRST_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 3.0
_REFUSED_BACKOFF_SECONDS = 30.0
"""Longest pause of a pod that is no worker of any job: only a person changes that."""
_STABLE_SECONDS = 5.0
_LOG_INTERVAL_SECONDS = 30.0
_REFUSED_LOG_INTERVAL_SECONDS = 600.0
CLOCK_CHECK_SECONDS = 60.0
"""Interval between two comparisons of the clocks."""
_JITTER = (0.9, 1.1)
"""Factors of the interval, so that agents that were answered at the same moment do not stay synchronized."""
_BURST_SECONDS = 0.05
"""Delay that collects a burst of changes, and a dying rank's last lines, into one message."""
_CONFLICT = 409


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """The functions of the agent that a connection to the coordinator calls in the event loop."""

    heartbeat: Callable[[], HeartbeatRequest]
    on_membership: Callable[[Membership], None]
    on_acknowledged: Callable[[HeartbeatRequest], None]
    on_job_deleted: Callable[[], None]
    on_job_failed: Callable[[HeartbeatRequest], None] = lambda _heartbeat: None
    """Gets each heartbeat whose answer reports that the job has failed."""
    on_endpoints: Callable[[RoleEndpoints], None] = lambda _endpoints: None
    imported: Callable[[], ImportedModules | None] = lambda: None
    """Returns the modules for the other pods."""
    on_imported: Callable[[ImportedModules], None] = lambda _imported: None
    """Gets the modules of another pod."""
    on_coordinator_time: Callable[[float, float, float], None] = lambda _time, _sent_at, _received_at: None
    """Gets the coordinator's time, and the agent's before and after, after each registration."""


class CoordinatorClient:
    """Stays connected to the leading coordinator until it is cancelled.

    It registers again every `CLOCK_CHECK_SECONDS`, because a clock may be set wrong later.
    """

    def __init__(self, settings: AgentSettings, rendezvous_port: int, version: str, callbacks: Callbacks) -> None:
        self._settings = settings
        self._connector = Connector(settings)
        self._callbacks = callbacks
        self._registration_request = RegisterRequest(
            namespace=settings.namespace,
            job=settings.job,
            pod_name=settings.pod_name,
            pod_uid=settings.pod_uid,
            pod_ip=settings.pod_ip,
            node_name=settings.node_name,
            rendezvous_port=rendezvous_port,
            agent_version=version,
        )
        self._newest: Membership | None = None
        self._needs_whole_membership = False
        self._send_now = asyncio.Event()
        self._session: StreamSession | None = None
        self._preferred: Address | None = None
        self._broken: Address | None = None
        """The address whose stream broke last; a machine without power costs each attempt the whole time limit."""
        self._logged: dict[str, float] = {}
        self._next_clock_check = time.monotonic() + CLOCK_CHECK_SECONDS
        self.answered_at = time.monotonic()
        """Monotonic time of the last successful exchange."""

    def send_heartbeat_now(self) -> None:
        """Send the next heartbeat at once; call it in the event loop's thread."""
        self._send_now.set()

    async def run(self) -> None:
        """Register and exchange messages until the task is cancelled or the job is deleted."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            started, longest = time.monotonic(), _MAX_BACKOFF_SECONDS
            try:
                await self._serve(*await self._connect())
            except CoordinatorUnavailableError as error:
                longest = _REFUSED_BACKOFF_SECONDS if isinstance(error, PodRefusedError) else longest
                self._log_unavailable(error)
                self._broken, self._preferred = self._preferred or self._broken, None
            except JobDeletedError as error:
                _log.warning("%s", error)
                self._callbacks.on_job_deleted()
                return
            if time.monotonic() - started > _STABLE_SECONDS:
                backoff = _FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries
            backoff = min(backoff * 2, longest)

    async def flush(self, seconds: float) -> None:
        """Send a last heartbeat over the open stream, if any, and wait up to `seconds` for its answer."""
        if self._session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._session.flush()

    async def _connect(self) -> tuple[Stream, RegisterResponse]:
        """Register with the first address that answers as the leader.

        Raises CoordinatorUnavailableError, JobDeletedError.
        """
        addresses = await self._connector.resolve_addresses()
        random.shuffle(addresses)
        addresses.sort(key=lambda address: (address == self._broken, address != self._preferred))
        failure = CoordinatorUnavailableError("")
        for address in addresses:
            # The second attempt is for a certificate authority that was rotated since the first.
            for _ in range(2):
                sent_at = time.time()
                try:
                    stream, registration = await self._open(address)
                except CoordinatorUnavailableError as error:
                    failure = failure if isinstance(failure, PodRefusedError) else error
                    if not isinstance(error, CertificateError):
                        break
                else:
                    self._record_answer()
                    self._callbacks.on_coordinator_time(registration.time, sent_at, time.time())
                    if address != self._preferred:
                        _log.info("registered with the coordinator at %s:%d", address.ip, address.port)
                    self._preferred, self._broken = address, None
                    return stream, registration
        raise failure

    async def _open(self, address: Address) -> tuple[Stream, RegisterResponse]:
        after = 0 if self._needs_whole_membership else self._generation
        stream = await self._connector.open_stream(address, {"podUid": self._settings.pod_uid, "after": str(after)})
        try:
            return stream, await stream.register(self._registration_request, REQUEST_SECONDS)
        except StreamEndedError as error:
            raise CoordinatorUnavailableError(f"{address}: {error}") from error

    async def _serve(self, stream: Stream, registration: RegisterResponse) -> None:
        """Exchange messages until the stream fails or expires. Raises CoordinatorUnavailableError."""
        if registration.membership is not None:
            self._receive_membership(registration.membership)
        self._session = StreamSession(
            stream,
            self._callbacks,
            self._send_now,
            on_acknowledged=self._handle_heartbeat_ack,
            on_membership=self._receive_membership,
            on_change=self._receive_change,
            on_answer=self._record_answer,
        )
        try:
            async with asyncio.timeout(random.uniform(*_STREAM_SECONDS)):  # noqa: S311 - spreads load
                await _run_until_one_ends(
                    self._session.send_heartbeats(registration.heartbeat_seconds), self._session.receive_frames()
                )
        except TimeoutError:
            return
        finally:
            self._session = None
            stream.close()

    def _handle_heartbeat_ack(self, message: HeartbeatRequest, answer: HeartbeatResponse, sent_at: float) -> None:
        self._callbacks.on_acknowledged(message)
        if answer.job_failed:
            self._callbacks.on_job_failed(message)
        if time.monotonic() > self._next_clock_check:
            self._next_clock_check = time.monotonic() + CLOCK_CHECK_SECONDS
            self._callbacks.on_coordinator_time(answer.time, sent_at, time.time())

    @property
    def _generation(self) -> int:
        return self._newest.generation if self._newest is not None else 0

    def _receive_membership(self, membership: Membership) -> None:
        self._record_answer()
        self._needs_whole_membership = False
        if membership.generation > self._generation:
            self._newest = membership
            self._callbacks.on_membership(membership)

    def _receive_change(self, change: MembershipChange) -> None:
        """Apply the change.

        Raises CoordinatorUnavailableError if it does not match: the next stream gets everything.
        """
        if change.generation <= self._generation:
            return
        try:
            self._receive_membership(apply_change(change, self._newest))
        except StaleChangeError as error:
            self._needs_whole_membership = True
            raise CoordinatorUnavailableError(f"{error}; requesting the whole membership") from error

    def _record_answer(self) -> None:
        self.answered_at = time.monotonic()

    def _log_unavailable(self, error: CoordinatorUnavailableError) -> None:
        """Log the reason, the same one at most once in an interval."""
        now, sentence, is_refused = time.monotonic(), str(error), isinstance(error, PodRefusedError)
        interval = _REFUSED_LOG_INTERVAL_SECONDS if is_refused else _LOG_INTERVAL_SECONDS
        if now - self._logged.get(sentence, -interval) < interval:
            return
        self._logged = {k: v for k, v in self._logged.items() if now - v < _REFUSED_LOG_INTERVAL_SECONDS}
        self._logged[sentence] = now
        _log.warning(
            "%s (%s): until then ranks restart in place only, and no lost worker is replaced; retrying",
            "the operator does not serve this pod"
            if is_refused
            else f"no operator has answered for {now - self.answered_at:.0f} s",
            sentence,
        )


async def _run_until_one_ends(*coroutines: Coroutine[None, None, None]) -> None:
    """Run all coroutines until the first one ends, raise its error and cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Sent:
    message: HeartbeatRequest
    at: float
    """Monotonic seconds."""
    wall_time: float
    """Unix seconds."""
    answered: asyncio.Future[None] | None = None
    """Set when the answer arrives."""


class StreamSession:
    """Exchanges messages over one open stream: run `send_heartbeats` and `receive_frames` together.

    Both raise CoordinatorUnavailableError.
    """

    def __init__(
        self,
        stream: Stream,
        callbacks: Callbacks,
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
        self._callbacks = callbacks
        self._send_now = send_now
        self._on_acknowledged = on_acknowledged
        self._on_membership = on_membership
        self._on_change = on_change
        self._on_answer = on_answer
        self._unanswered: deque[_Sent] = deque()
        self._full_heartbeat_seconds = 0.0
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
        sent_imported: ImportedModules | None = None
        while True:
            self._send_now.clear()
            message, now = self._callbacks.heartbeat(), time.monotonic()
            if self._unanswered and now - self._unanswered[0].at > REQUEST_SECONDS:
                raise CoordinatorUnavailableError(f"a heartbeat was not answered within {REQUEST_SECONDS:g} s")
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    changed = must_send_now(last, message)
                    if changed or self._flush is not None or now - last_at >= self._full_heartbeat_seconds * share:
                        self._unanswered.append(_Sent(message, now, time.time(), self._flush))
                        last, last_at, self._flush = message, now, None
                        share = draw_jitter(random.random(), after_change=changed)  # noqa: S311
                        await self._stream.send(FrameKind.HEARTBEAT, message)
                    else:
                        await self._stream.send(FrameKind.KEEPALIVE, encode_keepalive(message))
                    imported = self._callbacks.imported()
                    if imported is not None and imported is not sent_imported:
                        sent_imported = imported
                        await self._stream.send(FrameKind.IMPORTED_MODULES, imported)
            except TimeoutError as error:
                raise CoordinatorUnavailableError("the coordinator no longer reads the stream") from error
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
            except ValidationError as error:
                raise CoordinatorUnavailableError(str(error)) from error

    def _handle(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.MEMBERSHIP:
            self._on_membership(Membership.model_validate_json(payload))
        elif kind == FrameKind.MEMBERSHIP_CHANGE:
            self._on_change(MembershipChange.model_validate_json(payload))
        elif kind == FrameKind.ROLE_ENDPOINTS:
            self._callbacks.on_endpoints(RoleEndpoints.model_validate_json(payload))
        elif kind == FrameKind.IMPORTED_MODULES:
            self._callbacks.on_imported(ImportedModules.model_validate_json(payload))
        elif kind == FrameKind.HEARTBEAT_ACK:
            answer = HeartbeatResponse.model_validate_json(payload)
            self._full_heartbeat_seconds = answer.full_heartbeat_seconds
            if (sent := self._pop_answered()) is not None:
                self._on_acknowledged(sent.message, answer, sent.wall_time)
        elif kind == FrameKind.ERROR:
            refusal = parse_refusal(payload)
            if refusal.status != _CONFLICT:
                raise StreamEndedError(format_refusal(refusal))
            self._pop_answered()  # the heartbeat's generation is over; the newer one is on its way

    def _pop_answered(self) -> _Sent | None:
        """Return the heartbeat that an answer belongs to: the oldest unanswered one."""
        self._on_answer()
        if not self._unanswered:
            return None
        sent = self._unanswered.popleft()
        if sent.answered is not None and not sent.answered.done():
            sent.answered.set_result(None)
        return sent
