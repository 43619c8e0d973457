"""The agent's side of the coordinator's wire: registration, long-polled membership, heartbeats.

Invariants: training never waits for the coordinator; whatever goes wrong is retried for ever with jittered back-off, at
every address of the coordinator's name in turn, since only the leader answers; after every loss the agent registers
again, which is idempotent; token and certificate authority are read again whenever they may have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from trainium_contract.wire import messages
from trainium_contract.wire.messages import (
    ErrorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    Membership,
    RegisterRequest,
    RegisterResponse,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.agent.settings import AgentSettings, Endpoint

_Message = TypeVar("_Message", bound=BaseModel)
_log = logging.getLogger(__name__)
_REQUEST_SECONDS = 3.0
_CONNECT_SECONDS = 1.5
"""A lost replica stays an address of the Service until its node is given up, and does not even refuse."""
_POLL_SECONDS = 25.0
_BEAT_SPREAD = (0.9, 1.1)
"""Of the interval: a thousand agents that were answered at the same moment must not stay in step for ever."""
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 3.0
_STABLE_SECONDS = 5.0
_LOG_INTERVAL_SECONDS = 30.0
_CONFLICT = 409
_HALF_A_SECOND = 0.5
CLOCK_CHECK_SECONDS = 60.0
"""Between two looks at how far the clocks are apart."""


@dataclass(frozen=True, slots=True)
class Address:
    """One address of the coordinator, with the name that its certificate must bear."""

    host: str
    ip: str
    port: int

    def url(self, path: str) -> str:
        """The full URL of a path."""
        ip = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"https://{ip}:{self.port}{path}"


class CoordinatorUnavailableError(ConnectionError):
    """One address did not answer as the leader does; the text is one sentence."""


class OlderGeneration(Exception):  # noqa: N818 - an answer, not an error
    """The coordinator knows a newer generation."""


class Coordinator:
    """Requests to one coordinator, with TLS and the token."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | None = None
        self._ca = b""
        self.date = 0.0
        """The coordinator's clock, as its newest answer had it (Unix seconds); 0 for none."""

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def addresses(self) -> list[Address]:
        """Every address of every endpoint, in the order in which the resolver gives them."""
        loop = asyncio.get_running_loop()
        found: dict[Address, None] = {}
        for endpoint in self._settings.coordinator:
            for ip in await self._resolve(loop, endpoint):
                found[Address(endpoint.host, ip, endpoint.port)] = None
        if not found:
            names = ", ".join(endpoint.host for endpoint in self._settings.coordinator)
            raise CoordinatorUnavailableError(f"the coordinator's name {names} does not resolve")
        return list(found)

    async def request(
        self,
        address: Address,
        path: str,
        answer: type[_Message],
        *,
        body: BaseModel | None = None,
        query: dict[str, str] | None = None,
        seconds: float = _REQUEST_SECONDS,
    ) -> _Message | None:
        """One request to one address; None when it has nothing to say (204).

        Raises OlderGeneration for 409 and CoordinatorUnavailableError for everything else that is not a success.
        """
        try:
            token = self._settings.token_path.read_text(encoding="utf-8").strip()
            async with self._opened().request(
                "GET" if body is None else "POST",
                address.url(path),
                params=query,
                json=None if body is None else body.model_dump(mode="json", by_alias=True, exclude_none=True),
                headers={"Authorization": f"Bearer {token}", "Host": f"{address.host}:{address.port}"},
                ssl=self._context(),
                server_hostname=address.host,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS),
                allow_redirects=False,
            ) as response:
                text = await response.text()
                status = response.status
                self.date = seconds_of(response.headers.get("Date", ""))
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as error:
            self._tls = None  # read the certificate authority again: it may have been rotated
            raise CoordinatorUnavailableError(
                f"the certificate of {address.host} does not verify against {self._settings.ca_path} ({error})"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise CoordinatorUnavailableError(f"{address.host} at {address.ip}:{address.port}: {reason}") from error
        return _decoded(address, status, text, answer)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    def _context(self) -> ssl.SSLContext:
        """TLS that trusts the mounted certificate authority only, as of now."""
        ca = self._settings.ca_path.read_bytes()
        if self._tls is None or ca != self._ca:
            self._tls = ssl.create_default_context(cadata=ca.decode("ascii"))
            self._ca = ca
        return self._tls

    @staticmethod
    async def _resolve(loop: asyncio.AbstractEventLoop, endpoint: Endpoint) -> list[str]:
        try:
            found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except OSError:
            return []
        return [str(entry[4][0]) for entry in found]


def seconds_of(date: str) -> float:
    """Unix seconds of an HTTP date, which has whole seconds; 0 for none."""
    try:
        return parsedate_to_datetime(date).timestamp() + _HALF_A_SECOND
    except (ValueError, TypeError):
        return 0.0


def _decoded(address: Address, status: int, text: str, answer: type[_Message]) -> _Message | None:
    where = f"{address.host} at {address.ip}:{address.port}"
    if status == 204:
        return None
    try:
        if status == 200:
            return answer.model_validate_json(text)
        sentence = ErrorResponse.model_validate_json(text).error
    except ValidationError:
        sentence = f"an answer that is not understood: {text[:200]!r}"
    if status == _CONFLICT:
        raise OlderGeneration(sentence)
    if status in (401, 403):
        raise CoordinatorUnavailableError(f"{where} refused this pod's token ({status}): {sentence}")
    raise CoordinatorUnavailableError(f"{where} answered {status}: {sentence}")


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
        self._known_generation = 0
        self._news = asyncio.Event()
        self._poll_again = asyncio.Event()
        self._first: Address | None = None
        self._logged: dict[str, float] = {}
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

    async def _registered(self) -> tuple[Address, RegisterResponse]:
        """Register with the first address that answers as the leader."""
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
                    welcome = await self._coordinator.request(
                        address, messages.REGISTER_PATH, RegisterResponse, body=self._register
                    )
                except (CoordinatorUnavailableError, OlderGeneration) as error:
                    sentence = str(error)
                    if "does not verify" not in sentence:
                        break
                else:
                    if welcome is not None:
                        self._answered()
                        self._on_welcome(welcome.time, asked, time.time())
                        _log.info("registered with the coordinator at %s:%d", address.ip, address.port)
                        return address, welcome
        raise CoordinatorUnavailableError(sentence)

    async def _stay(self, address: Address, welcome: RegisterResponse) -> None:
        """Poll and beat at one address until it fails. Raises CoordinatorUnavailableError."""
        self._first = address
        if welcome.membership is not None:
            self._learn(welcome.membership)
        tasks = [
            asyncio.create_task(self._beat(address, welcome.heartbeat_seconds)),
            asyncio.create_task(self._poll(address)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
                await asyncio.wait_for(self._news.wait(), seconds * random.uniform(*_BEAT_SPREAD))  # noqa: S311
            except TimeoutError:
                continue
            # Let a burst of news, and a dying rank's last lines, go into one message.
            await asyncio.sleep(min(0.05, seconds))

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
                address, self._membership_path, Membership, query=query, seconds=_POLL_SECONDS + _REQUEST_SECONDS
            )
        except OlderGeneration as error:
            raise CoordinatorUnavailableError(str(error)) from error

    def _learn(self, membership: Membership) -> None:
        self._answered()
        if membership.generation > self._known_generation:
            self._known_generation = membership.generation
            self._on_membership(membership)

    def _answered(self) -> None:
        self.answered_at = time.monotonic()

    def _complain(self, sentence: str) -> None:
        """Log a sentence, the same one at most once in 30 s."""
        now = time.monotonic()
        if now - self._logged.get(sentence, -_LOG_INTERVAL_SECONDS) >= _LOG_INTERVAL_SECONDS:
            self._logged = {sentence: now, **{k: v for k, v in self._logged.items() if now - v < _LOG_INTERVAL_SECONDS}}
            _log.warning("no coordinator: %s; training goes on, trying again", sentence)
