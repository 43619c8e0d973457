"""The agent's side of the coordinator's wire: registration, memberships, heartbeats, over a stream where there is one.

Invariants: training never waits for the coordinator; whatever goes wrong is retried for ever with jittered back-off, at
every address of the coordinator's name in turn, since only the leader answers; after every loss the agent registers
again, which is idempotent; token and certificate authority are read again whenever they may have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from typing import TYPE_CHECKING

from trainium_contract.wire import messages
from trainium_contract.wire.membership_change import StaleChangeError, apply_change
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    Membership,
    RegisterRequest,
    RegisterResponse,
)
from trainium_trainer.agent.coordinator.requests import (
    REQUEST_SECONDS,
    Address,
    Coordinator,
    CoordinatorUnavailableError,
    OlderGeneration,
)
from trainium_trainer.agent.coordinator.stream import StreamEndedError
from trainium_trainer.agent.coordinator.telling import BURST_SECONDS, SPREAD, Telling

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from trainium_contract.wire.membership_change import MembershipChange
    from trainium_trainer.agent.coordinator.stream import Stream
    from trainium_trainer.agent.settings import AgentSettings

_log = logging.getLogger(__name__)
_POLL_SECONDS = 25.0
_STREAM_SECONDS = (240.0, 300.0)
"""Until a stream is opened anew, with the token of then; the coordinator ends it after 600."""
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 3.0
_STABLE_SECONDS = 5.0
_LOG_INTERVAL_SECONDS = 30.0
CLOCK_CHECK_SECONDS = 60.0
"""Between two looks at how far the clocks are apart."""


class CoordinatorClient:
    """Keeps the agent in touch with whoever leads, for ever."""

    def __init__(
        self,
        settings: AgentSettings,
        rendezvous_port: int,
        version: str,
        *,
        heartbeat: Callable[[], HeartbeatRequest],
        on_membership: Callable[[Membership], None],
        on_acknowledged: Callable[[HeartbeatRequest], None],
        on_welcome: Callable[[float, float, float], None] = lambda _theirs, _asked, _answered: None,
    ) -> None:
        """`on_welcome(the coordinator's time or 0, our time before and after)` follows each registration.

        It comes again now and then, because a clock may be set wrong later.
        """
        self._settings = settings
        self._coordinator = Coordinator(settings)
        self._heartbeat = heartbeat
        self._on_membership = on_membership
        self._on_acknowledged = on_acknowledged
        self._on_welcome = on_welcome
        self._register = RegisterRequest(
            namespace=settings.namespace,
            job=settings.job,
            pod_name=settings.pod_name,
            pod_uid=settings.pod_uid,
            pod_ip=settings.pod_ip,
            node_name=settings.node_name,
            rendezvous_port=rendezvous_port,
            agent_version=version,
            seals=True,
        )
        self._membership_path = messages.MEMBERSHIP_PATH.format(namespace=settings.namespace, job=settings.job)
        self._known: Membership | None = None
        """The newest."""
        self._reads_changes = True
        self._news = asyncio.Event()
        self._poll_again = asyncio.Event()
        self._first: Address | None = None
        self._logged: dict[str, float] = {}
        self._clock_due = time.monotonic() + CLOCK_CHECK_SECONDS
        self.answered_at = time.monotonic()
        """Monotonic time of the last successful exchange."""

    def heartbeat_now(self) -> None:
        """Send the next heartbeat at once; to be called in the loop's thread."""
        self._news.set()

    async def run(self) -> None:
        """Register, poll and beat until cancelled."""
        backoff = _FIRST_BACKOFF_SECONDS
        try:
            while True:
                began = time.monotonic()
                try:
                    await self._stay(*await self._registered())
                except CoordinatorUnavailableError as error:
                    self._complain(str(error))
                    self._first = None
                if time.monotonic() - began > _STABLE_SECONDS:
                    backoff = _FIRST_BACKOFF_SECONDS
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries
                backoff = min(backoff * 2, _LONGEST_BACKOFF_SECONDS)
        finally:
            await self._coordinator.close()

    async def say_last(self, seconds: float) -> None:
        """One last heartbeat to the coordinator that was talked to, for no longer than this."""
        if self._first is None:
            return
        with contextlib.suppress(CoordinatorUnavailableError, OlderGeneration, TimeoutError):
            async with asyncio.timeout(seconds):
                await self._coordinator.request(
                    self._first, messages.HEARTBEAT_PATH, HeartbeatResponse, body=self._heartbeat()
                )

    async def _registered(self) -> tuple[Address, Stream | None, RegisterResponse]:
        """Register with the first address that answers as the leader; without a stream where it knows none."""
        addresses = await self._coordinator.addresses()
        random.shuffle(addresses)
        if self._first in addresses:
            addresses.sort(key=lambda address: address != self._first)
        sentence = ""
        for address in addresses:
            # The second try is for a certificate authority that was rotated since the first.
            for _ in range(2):
                asked = time.time()
                try:
                    stream, welcome = await self._introduced(address)
                except (CoordinatorUnavailableError, OlderGeneration) as error:
                    sentence = str(error)
                    if "does not verify" not in sentence:
                        break
                else:
                    self._answered()
                    self._on_welcome(welcome.time, asked, time.time())
                    if address != self._first:
                        _log.info("registered with the coordinator at %s:%d", address.ip, address.port)
                    return address, stream, welcome
        raise CoordinatorUnavailableError(sentence)

    async def _introduced(self, address: Address) -> tuple[Stream | None, RegisterResponse]:
        query = {"podUid": self._settings.pod_uid, "after": str(self._known_generation)}
        if self._reads_changes:
            query["changes"] = "1"
        stream = await self._coordinator.stream(address, query)
        if stream is not None:
            try:
                return stream, await stream.register(self._register, REQUEST_SECONDS)
            except StreamEndedError as error:
                raise CoordinatorUnavailableError(f"{address.host} at {address.ip}:{address.port}: {error}") from error
        welcome = await self._coordinator.request(
            address, messages.REGISTER_PATH, RegisterResponse, body=self._register
        )
        if welcome is None:
            raise CoordinatorUnavailableError(f"{address.host} at {address.ip} answered a registration with nothing")
        return None, welcome

    async def _stay(self, address: Address, stream: Stream | None, welcome: RegisterResponse) -> None:
        """Poll and beat at one address until it fails, or the stream is old. Raises CoordinatorUnavailableError."""
        self._first = address
        if welcome.membership is not None:
            self._learn(welcome.membership)
        if stream is None:
            await _first_of(self._beat(address, welcome.heartbeat_seconds), self._poll(address))
            return
        telling = Telling(
            stream,
            self._heartbeat,
            self._news,
            on_acknowledged=self._heard,
            on_membership=self._learn,
            on_change=self._follow,
            on_answer=self._answered,
        )
        try:
            async with asyncio.timeout(random.uniform(*_STREAM_SECONDS)):  # noqa: S311 - spreads load
                await _first_of(telling.beat(welcome.heartbeat_seconds), telling.listen())
        except TimeoutError:
            return
        finally:
            stream.close()

    def _heard(self, message: HeartbeatRequest, answer: HeartbeatResponse, asked: float) -> None:
        """A heartbeat was taken; the coordinator's clock comes with that."""
        self._on_acknowledged(message)
        if time.monotonic() > self._clock_due:
            self._clock_due = time.monotonic() + CLOCK_CHECK_SECONDS
            self._on_welcome(answer.time or 0.0, asked, time.time())

    async def _beat(self, address: Address, seconds: float) -> None:
        clock_due = time.monotonic() + CLOCK_CHECK_SECONDS
        while True:
            self._news.clear()
            message = self._heartbeat()
            asked = time.time()
            try:
                answer = await self._coordinator.request(
                    address, messages.HEARTBEAT_PATH, HeartbeatResponse, body=message
                )
            except OlderGeneration:
                self._answered()
                self._poll_again.set()
            else:
                self._answered()
                self._on_acknowledged(message)
                if time.monotonic() > clock_due:
                    clock_due = time.monotonic() + CLOCK_CHECK_SECONDS
                    self._on_welcome(self._coordinator.date, asked, time.time())
                if answer is not None and answer.generation > self._known_generation:
                    self._poll_again.set()
            try:
                await asyncio.wait_for(self._news.wait(), seconds * random.uniform(*SPREAD))  # noqa: S311
            except TimeoutError:
                continue
            await asyncio.sleep(min(BURST_SECONDS, seconds))

    async def _poll(self, address: Address) -> None:
        while True:
            self._poll_again.clear()
            poll = asyncio.create_task(self._ask_membership(address))
            again = asyncio.create_task(self._poll_again.wait())
            try:
                await asyncio.wait({poll, again}, return_when=asyncio.FIRST_COMPLETED)
                if again.done() and not poll.done():
                    # A heartbeat says that there is news which this poll has not brought: ask anew, soon.
                    await asyncio.wait({poll}, timeout=0.5)
                if poll.done():
                    membership = poll.result()
                    if membership is not None:
                        self._learn(membership)
            finally:
                for task in (poll, again):
                    task.cancel()
                await asyncio.gather(poll, again, return_exceptions=True)

    async def _ask_membership(self, address: Address) -> Membership | None:
        query = {
            "after": str(self._known_generation),
            "podUid": self._settings.pod_uid,
            "timeoutSeconds": f"{_POLL_SECONDS:.0f}",
        }
        try:
            return await self._coordinator.request(
                address, self._membership_path, Membership, query=query, seconds=_POLL_SECONDS + REQUEST_SECONDS
            )
        except OlderGeneration as error:
            raise CoordinatorUnavailableError(str(error)) from error

    @property
    def _known_generation(self) -> int:
        return self._known.generation if self._known is not None else 0

    def _learn(self, membership: Membership) -> None:
        self._answered()
        if membership.generation > self._known_generation:
            self._known = membership
            self._on_membership(membership)

    def _follow(self, change: MembershipChange) -> None:
        """Raises CoordinatorUnavailableError where it does not fit: the next stream brings the whole, and any later."""
        if change.generation <= self._known_generation:
            return
        try:
            self._learn(apply_change(change, self._known))
        except StaleChangeError as error:
            self._reads_changes = False
            raise CoordinatorUnavailableError(f"{error}; asking for the whole") from error

    def _answered(self) -> None:
        self.answered_at = time.monotonic()

    def _complain(self, sentence: str) -> None:
        """Log a sentence, the same one at most once in 30 s."""
        now = time.monotonic()
        if now - self._logged.get(sentence, -_LOG_INTERVAL_SECONDS) >= _LOG_INTERVAL_SECONDS:
            self._logged = {sentence: now, **{k: v for k, v in self._logged.items() if now - v < _LOG_INTERVAL_SECONDS}}
            _log.warning("no coordinator: %s; training goes on, trying again", sentence)


async def _first_of(*works: Coroutine[None, None, None]) -> None:
    """Until one of them ends, with its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
