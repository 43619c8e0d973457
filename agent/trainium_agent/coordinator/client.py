"""Keeps the agent registered with the coordinator and exchanges heartbeats and memberships with it over a stream.

Guarantees:
- Training never waits for the coordinator.
- Every failure is retried for ever with jittered back-off, at every address of the coordinator's name in turn, because
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
from typing import TYPE_CHECKING

from trainium_agent.coordinator.connection import (
    REQUEST_SECONDS,
    Connector,
    CoordinatorUnavailableError,
    JobDeletedError,
)
from trainium_agent.coordinator.session import Session
from trainium_agent.coordinator.stream import StreamEndedError
from trainium_contract.wire.membership_change import StaleChangeError, apply_change
from trainium_contract.wire.messages import RegisterRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from trainium_agent.coordinator.connection import Address
    from trainium_agent.coordinator.stream import Stream
    from trainium_agent.settings import AgentSettings
    from trainium_contract.wire.membership_change import MembershipChange
    from trainium_contract.wire.messages import HeartbeatRequest, HeartbeatResponse, Membership, RegisterResponse

_log = logging.getLogger(__name__)
_STREAM_SECONDS = (240.0, 300.0)
"""Until a stream is replaced, so that its token is renewed; the coordinator ends it after 600."""
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 3.0
_STABLE_SECONDS = 5.0
_LOG_INTERVAL_SECONDS = 30.0
CLOCK_CHECK_SECONDS = 60.0
"""Between two comparisons of the clocks."""


class CoordinatorClient:
    """Stays connected to the leading coordinator until it is cancelled."""

    def __init__(
        self,
        settings: AgentSettings,
        rendezvous_port: int,
        version: str,
        *,
        heartbeat: Callable[[], HeartbeatRequest],
        on_membership: Callable[[Membership], None],
        on_acknowledged: Callable[[HeartbeatRequest], None],
        on_job_deleted: Callable[[], None],
        on_coordinator_time: Callable[[float, float, float], None] = lambda _theirs, _asked, _answered: None,
    ) -> None:
        """`on_coordinator_time(the coordinator's time, our time before and after)` follows each registration.

        It is repeated every `CLOCK_CHECK_SECONDS`, because a clock may be set wrong later.
        """
        self._settings = settings
        self._connector = Connector(settings)
        self._heartbeat = heartbeat
        self._on_membership = on_membership
        self._on_acknowledged = on_acknowledged
        self._on_job_deleted = on_job_deleted
        self._on_coordinator_time = on_coordinator_time
        self._register = RegisterRequest(
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
        self._session: Session | None = None
        self._preferred: Address | None = None
        self._logged: dict[str, float] = {}
        self._next_clock_check = time.monotonic() + CLOCK_CHECK_SECONDS
        self.answered_at = time.monotonic()
        """Monotonic time of the last successful exchange."""

    def heartbeat_now(self) -> None:
        """Send the next heartbeat at once; call it in the event loop's thread."""
        self._send_now.set()

    async def run(self) -> None:
        """Register and exchange messages until cancelled, or until the job is deleted."""
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            started = time.monotonic()
            try:
                await self._serve(*await self._connect())
            except CoordinatorUnavailableError as error:
                self._log_unavailable(str(error))
                self._preferred = None
            except JobDeletedError as error:
                _log.warning("%s", error)
                self._on_job_deleted()
                return
            if time.monotonic() - started > _STABLE_SECONDS:
                backoff = _FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries
            backoff = min(backoff * 2, _LONGEST_BACKOFF_SECONDS)

    async def flush(self, seconds: float) -> None:
        """Send a last heartbeat over the open stream, if any, and wait at most `seconds` for its answer."""
        if self._session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._session.flush()

    async def _connect(self) -> tuple[Stream, RegisterResponse]:
        """Register with the first address that answers as the leader.

        Raises CoordinatorUnavailableError, JobDeletedError.
        """
        addresses = await self._connector.addresses()
        random.shuffle(addresses)
        if self._preferred in addresses:
            addresses.sort(key=lambda address: address != self._preferred)
        sentence = ""
        for address in addresses:
            # The second attempt is for a certificate authority that was rotated since the first.
            for _ in range(2):
                sent_at = time.time()
                try:
                    stream, welcome = await self._open(address)
                except CoordinatorUnavailableError as error:
                    sentence = str(error)
                    if "does not verify" not in sentence:
                        break
                else:
                    self._answered()
                    self._on_coordinator_time(welcome.time, sent_at, time.time())
                    if address != self._preferred:
                        _log.info("registered with the coordinator at %s:%d", address.ip, address.port)
                    self._preferred = address
                    return stream, welcome
        raise CoordinatorUnavailableError(sentence)

    async def _open(self, address: Address) -> tuple[Stream, RegisterResponse]:
        after = 0 if self._needs_whole_membership else self._generation
        stream = await self._connector.open_stream(address, {"podUid": self._settings.pod_uid, "after": str(after)})
        try:
            return stream, await stream.register(self._register, REQUEST_SECONDS)
        except StreamEndedError as error:
            raise CoordinatorUnavailableError(f"{address}: {error}") from error

    async def _serve(self, stream: Stream, welcome: RegisterResponse) -> None:
        """Exchange messages until the stream fails or is old. Raises CoordinatorUnavailableError."""
        if welcome.membership is not None:
            self._receive_membership(welcome.membership)
        self._session = Session(
            stream,
            self._heartbeat,
            self._send_now,
            on_acknowledged=self._acknowledged,
            on_membership=self._receive_membership,
            on_change=self._receive_change,
            on_answer=self._answered,
        )
        try:
            async with asyncio.timeout(random.uniform(*_STREAM_SECONDS)):  # noqa: S311 - spreads load
                await _run_until_one_ends(
                    self._session.send_heartbeats(welcome.heartbeat_seconds), self._session.receive_frames()
                )
        except TimeoutError:
            return
        finally:
            self._session = None
            stream.close()

    def _acknowledged(self, message: HeartbeatRequest, answer: HeartbeatResponse, sent_at: float) -> None:
        self._on_acknowledged(message)
        if time.monotonic() > self._next_clock_check:
            self._next_clock_check = time.monotonic() + CLOCK_CHECK_SECONDS
            self._on_coordinator_time(answer.time, sent_at, time.time())

    @property
    def _generation(self) -> int:
        return self._newest.generation if self._newest is not None else 0

    def _receive_membership(self, membership: Membership) -> None:
        self._answered()
        self._needs_whole_membership = False
        if membership.generation > self._generation:
            self._newest = membership
            self._on_membership(membership)

    def _receive_change(self, change: MembershipChange) -> None:
        """Apply the change. Raises CoordinatorUnavailableError where it does not fit: the next stream asks for all."""
        if change.generation <= self._generation:
            return
        try:
            self._receive_membership(apply_change(change, self._newest))
        except StaleChangeError as error:
            self._needs_whole_membership = True
            raise CoordinatorUnavailableError(f"{error}; requesting the whole membership") from error

    def _answered(self) -> None:
        self.answered_at = time.monotonic()

    def _log_unavailable(self, sentence: str) -> None:
        """Log a sentence, the same one at most once in 30 s."""
        now = time.monotonic()
        if now - self._logged.get(sentence, -_LOG_INTERVAL_SECONDS) >= _LOG_INTERVAL_SECONDS:
            self._logged = {sentence: now, **{k: v for k, v in self._logged.items() if now - v < _LOG_INTERVAL_SECONDS}}
            _log.warning("no coordinator: %s; training continues, retrying", sentence)


async def _run_until_one_ends(*coroutines: Coroutine[None, None, None]) -> None:
    """Run all until the first one ends, raise its error and cancel the others."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
