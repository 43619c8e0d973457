"""HTTPS to the API server for programs with an event loop: the operator, and the nodes of the development cluster.

It needs aiohttp (extra `aio`). Requests and responses are bytes: typed models cost ten times as much per object and
drop unknown fields.

Guarantees:
- TLS is verified unless the kubeconfig disables that.
- POST and PATCH are never sent twice.
- Credentials never reach a message.
- Credentials that expire are read again in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from trainium_contract.api_server.connection import HttpResponse, encode_json, find_proxy, lower_case_keys, tls_context
from trainium_contract.api_server.errors import NoClusterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    import aiohttp

    from trainium_contract.api_server.kubeconfig import Access

CONNECT_SECONDS = 10.0
MAX_LINE_BYTES = 16 << 20
"""Largest watch event; etcd stores no larger object."""
logger = logging.getLogger(__name__)


class ConnectionFailedError(Exception):
    """No answer: connection refused, reset, or timed out."""


@dataclass(frozen=True, slots=True)
class ResponseStream:
    """A response whose body is still being received; `lines` ends when the server closes it."""

    status: int
    lines: AsyncIterator[bytes]


class HttpClient:
    """Connections to one API server; created within an event loop and used in it."""

    def __init__(
        self, access: Access, *, user_agent: str, connections: int = 0, find_access: Callable[[], Access] | None = None
    ) -> None:
        """Connect lazily; `connections` is the largest number, 0 without a limit.

        `find_access` renews expiring credentials. Raises NoClusterError if a certificate cannot be used.
        """
        import aiohttp  # noqa: PLC0415 - an extra

        self.access = access
        self._find_access = find_access
        self._read_at = time.monotonic()
        self._user_agent = user_agent
        server = urlsplit(access.server)
        tls = tls_context(access) if server.scheme == "https" else True
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections, ssl=tls))
        self._proxy = find_proxy(access, server.scheme, server.hostname or "") or None
        self._client_timeout = aiohttp.ClientTimeout
        self._connection_errors = (aiohttp.ClientError, TimeoutError, OSError)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str], body: Any, content_type: str, timeout: float
    ) -> HttpResponse:
        """Send a request with a JSON body and return the response. Raises ConnectionFailedError.

        `timeout` in seconds.
        """
        timeouts = self._client_timeout(total=timeout, sock_connect=CONNECT_SECONDS)
        with self._wrap_errors(method, path):
            async with await self._send(method, path, query, timeouts, content_type, body) as response:
                content = await response.read()
        return HttpResponse(response.status, lower_case_keys(response.headers.items()), content)

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], silence: float | None
    ) -> AsyncIterator[ResponseStream]:
        """Stream a GET line by line; `silence` seconds without a byte raise ConnectionFailedError."""
        timeouts = self._client_timeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence)
        with self._wrap_errors("GET", path):
            response = await self._send("GET", path, query, timeouts)
        try:
            yield ResponseStream(response.status, self._lines(path, response.content))
        finally:
            response.close()

    async def refresh_access(self) -> Access:
        """Return the credentials, read again if they have expired."""
        valid_seconds, now = self.access.valid_seconds, time.monotonic()
        if self._find_access is not None and valid_seconds is not None and now >= self._read_at + valid_seconds:
            self._read_at = now  # other tasks use the old ones meanwhile
            try:
                fresh = await asyncio.to_thread(self._find_access)
            except NoClusterError as error:
                logger.warning("the credentials cannot be read again: %s", error)
            else:
                self.access = replace(self.access, headers=fresh.headers, valid_seconds=fresh.valid_seconds)
        return self.access

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeouts: aiohttp.ClientTimeout,
        content_type: str = "application/json",
        body: Any = None,
    ) -> aiohttp.ClientResponse:
        access = await self.refresh_access()
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": self._user_agent}
        url = f"{access.server}{path}" + (f"?{urlencode(query)}" if query else "")
        return await self._session.request(
            method,
            url,
            data=None if body is None else encode_json(body),
            headers={**headers, **dict(access.headers)},
            timeout=timeouts,
            proxy=self._proxy,
            server_hostname=access.server_name or None,
            allow_redirects=method == "GET",
        )

    async def _lines(self, path: str, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        partial = bytearray()
        with self._wrap_errors("GET", path):
            while chunk := await content.readany():
                *complete, rest = chunk.split(b"\n")
                for line in complete:
                    yield bytes(partial + line)
                    partial.clear()
                partial += rest
                if len(partial) > MAX_LINE_BYTES:
                    raise ConnectionFailedError(f"GET {path}: a line of more than {MAX_LINE_BYTES >> 20} MiB")
        if partial:
            yield bytes(partial)

    @contextmanager
    def _wrap_errors(self, method: str, path: str) -> Iterator[None]:
        try:
            yield
        except self._connection_errors as error:
            raise ConnectionFailedError(f"{method} {path}: {error or type(error).__name__}") from error
