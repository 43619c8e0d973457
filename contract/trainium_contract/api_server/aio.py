"""Requests to the API server with `kubernetes.aio`, for programs with an event loop; raw bytes in and out.

Typed models cost ten times as much per object and drop unknown fields.

Guarantees:
- TLS is verified unless the kubeconfig turns that off.
- POST and PATCH are never sent twice.
- Credentials never reach a message.
- Credentials that expire are read again in time.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import urllib3
from kubernetes.aio.client import ApiClient, Configuration
from multidict import CIMultiDict

from trainium_contract.api_server.connection import BEARER, HttpResponse, encode_body
from trainium_contract.api_server.errors import ConnectionFailedError, NoClusterError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterator, Mapping

    from trainium_contract.api_server.kubeconfig import Access

CONNECT_SECONDS = 10.0
MAX_LINE_BYTES = 16 << 20
"""Largest watch event; etcd stores no larger object."""
_REDIRECTS = range(300, 400)
_SHARED = ("host", "api_key", "ssl_ca_cert", "ca_cert_data", "cert_file", "key_file", "verify_ssl", "tls_server_name")
"""Fields that the library's two kinds of configuration have in common."""


@dataclass(frozen=True, slots=True)
class ResponseStream:
    """A response whose body is still being received; `lines` ends when the server closes it."""

    status: int
    lines: AsyncIterator[bytes]


class HttpClient:
    """Connections to one API server; created within an event loop and used in it."""

    def __init__(self, access: Access, *, user_agent: str, connections: int = 0) -> None:
        """Connect lazily; `connections` is the largest number, 0 without a limit.

        Raises NoClusterError if a certificate cannot be used.
        """
        self.access = access
        try:
            self._client = ApiClient(_build_configuration(access, connections))
        except (OSError, ValueError) as error:
            raise NoClusterError(f"no cluster: a certificate of the kubeconfig cannot be used: {error}") from error
        self._client.user_agent = user_agent

    def open_separate_pool(self, connections: int) -> HttpClient:
        """Return a client of the same identity with a separate pool of at most so many connections."""
        return HttpClient(self.access, user_agent=self._client.user_agent, connections=connections)

    @property
    def tls(self) -> ssl.SSLContext:
        """TLS context of the connections."""
        context: ssl.SSLContext = self._client.rest_client.ssl_context
        return context

    async def build_headers(self, **headers: str) -> CIMultiDict[str]:
        """Return these headers and the credentials, which are read again if they have expired."""
        _, _, fields, _, _ = await self._client.param_serialize("GET", "", header_params=headers, auth_settings=BEARER)
        return CIMultiDict([*fields.items(), *self.access.impersonation])

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str], body: Any, content_type: str, timeout: float
    ) -> HttpResponse:
        """Send a request with a JSON body and return the response. Raises ConnectionFailedError.

        `timeout` in seconds.
        """
        timeouts = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        with _wrap_errors(method, path):
            async with await self._send(method, path, query, timeouts, content_type, body) as response:
                content = await response.read()
        return HttpResponse(response.status, response.headers, content)

    @asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], silence: float | None
    ) -> AsyncIterator[ResponseStream]:
        """Stream a GET line by line; `silence` seconds without a byte raise ConnectionFailedError."""
        timeouts = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence)
        with _wrap_errors("GET", path):
            response = await self._send("GET", path, query, timeouts)
        try:
            yield ResponseStream(response.status, _read_lines(path, response.content))
        finally:
            response.close()

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        timeouts: aiohttp.ClientTimeout,
        content_type: str = "application/json",
        body: Any = None,
    ) -> aiohttp.ClientResponse:
        # As kubectl: the keys of tokens have another type, application/jwk-set+json.
        headers = await self.build_headers(**{"Accept": "application/json, */*", "Content-Type": content_type})
        body = encode_body(body, content_type)
        if isinstance(body, bytes):
            # The library encodes a body of exactly this type again; the API server ignores the parameter.
            headers["Content-Type"] = f"{content_type}; charset=utf-8"
        url = self._client.configuration.host + path
        if query:
            url += "?" + self._client.parameters_to_url_query(list(query.items()), None)
        response = await self._client.call_api(method, url, headers, body=body, _request_timeout=timeouts)
        found: aiohttp.ClientResponse = response.response
        return found


def _build_configuration(access: Access, connections: int) -> Configuration:
    source = access.configuration
    configuration = Configuration(connection_pool_maxsize=connections, proxy=access.proxy.url or None)
    if access.proxy.login:
        configuration.proxy_headers = urllib3.make_headers(proxy_basic_auth=access.proxy.login)
    for name in _SHARED:
        setattr(configuration, name, getattr(source, name))
    # Authorities of managed clusters lack the key identifiers that Python 3.13's strict flag requires.
    configuration.disable_strict_ssl_verification = True
    # `access` has chosen the proxy already.
    configuration.client_session_kwargs = {"trust_env": False, "middlewares": (_refuse_redirected_write,)}

    async def renew(_: Configuration) -> None:
        # A login program or a file must not block the event loop. Both configurations share the credentials.
        if access.renewal is not None and access.renewal.is_due():
            await asyncio.to_thread(access.renewal, source)

    configuration.refresh_api_key_hook = renew
    return configuration


async def _refuse_redirected_write(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Fail instead of sending a write to another address."""
    response = await handler(request)
    if response.status in _REDIRECTS and request.method != "GET":
        response.close()
        raise aiohttp.ClientError(f"a write was redirected ({response.status})")
    return response


async def _read_lines(path: str, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    partial = bytearray()
    with _wrap_errors("GET", path):
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
def _wrap_errors(method: str, path: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConnectionFailedError(f"{method} {path}: {error or type(error).__name__}") from error
