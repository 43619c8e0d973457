"""Requests to one address of the coordinator, with TLS and the pod's token.

Invariants: token and certificate authority are read again whenever they may have changed; every way in which an address
does not answer as the leader does is a CoordinatorUnavailableError with one sentence.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

import aiohttp
from pydantic import BaseModel, ValidationError

from trainium_contract.wire.messages import ErrorResponse
from trainium_contract.wire.stream import STREAM_PATH, UPGRADE
from trainium_trainer.agent.coordinator.names import Names
from trainium_trainer.agent.coordinator.stream import Stream, StreamRefusedError

if TYPE_CHECKING:
    from trainium_trainer.agent.settings import AgentSettings

_Message = TypeVar("_Message", bound=BaseModel)
REQUEST_SECONDS = 3.0
"""Until an answer."""
_CONNECT_SECONDS = 1.5
"""A lost replica stays an address of the Service until its node is given up, and does not even refuse."""
_CONFLICT = 409
_HALF_A_SECOND = 0.5
_NOT_FOUND = 404


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
        self._names = Names()
        self.date = 0.0
        """The coordinator's clock, as its newest answer had it (Unix seconds); 0 for none."""

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def addresses(self) -> list[Address]:
        """Every address of every endpoint, in the order in which the resolver gives them.

        Raises CoordinatorUnavailableError where there are none.
        """
        found: dict[Address, None] = {}
        for endpoint in self._settings.coordinator:
            for ip in await self._names.addresses(endpoint):
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
        seconds: float = REQUEST_SECONDS,
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
            raise self._untrusted(address, error) from error
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise CoordinatorUnavailableError(f"{address.host} at {address.ip}:{address.port}: {reason}") from error
        return _decoded(address, status, text, answer)

    async def stream(self, address: Address, query: dict[str, str]) -> Stream | None:
        """A stream to one address; None where the coordinator is of a version that knows none.

        Raises CoordinatorUnavailableError.
        """
        try:
            token = self._settings.token_path.read_text(encoding="utf-8").strip()
            async with asyncio.timeout(REQUEST_SECONDS):
                return await Stream.open(
                    (address.ip, address.port),
                    self._context(),
                    address.host,
                    f"GET {STREAM_PATH}?{urlencode(query)} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
                    f"Connection: Upgrade\r\nUpgrade: {UPGRADE}\r\nAuthorization: Bearer {token}\r\n\r\n",
                )
        except StreamRefusedError as error:
            if error.status == _NOT_FOUND:
                return None
            _decoded(address, error.status, error.body, ErrorResponse)
            raise CoordinatorUnavailableError(f"{address.host} at {address.ip}: {error}") from error
        except ssl.SSLError as error:
            raise self._untrusted(address, error) from error
        except (OSError, ValueError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise CoordinatorUnavailableError(f"{address.host} at {address.ip}:{address.port}: {reason}") from error

    def _untrusted(self, address: Address, error: Exception) -> CoordinatorUnavailableError:
        self._tls = None  # read the certificate authority again: it may have been rotated
        return CoordinatorUnavailableError(
            f"the certificate of {address.host} does not verify against {self._settings.ca_path} ({error})"
        )

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
