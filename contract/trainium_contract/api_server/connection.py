"""HTTPS to the API server with the standard library, so that a command starts fast; raw bytes in and out.

Guarantees:
- TLS is verified unless the kubeconfig turns that off.
- A connection is used by one thread at a time.
- A request that may have been carried out is never sent twice.
- Credentials never reach a message.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import ssl
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from trainium_contract.api_server.errors import NoClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trainium_contract.api_server.kubeconfig import Access

RESPONSE_TIMEOUT_SECONDS = 30.0
MAX_IDLE_SECONDS = 30.0
"""Below the time after which an API server closes an idle connection (90 s), because a write is not repeated."""
_CHUNK_BYTES = 1 << 16
_ESCAPED_CHARACTERS = re.compile(r"[^\x20-\x7e\U00010000-\U0010ffff]")
"""Characters to escape: line breaks, controls, characters with a meaning in YAML, halves of surrogate pairs."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One HTTP response; `headers` has lower-case keys."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class LineStream:
    """Lines of a response that is still being received; `close` may be called from another thread and ends it."""

    def __init__(self, status: int, response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> None:
        self.status = status
        self.closed = False
        self._response = response
        self._connection = connection

    def read_rest(self) -> bytes:
        """Read the rest of an error response."""
        return self._response.read(_CHUNK_BYTES)

    def lines(self) -> Iterator[bytes]:
        """Yield lines without their ends, until the server or `close` ends the response."""
        partial = b""
        try:
            while chunk := self._response.read1(_CHUNK_BYTES):
                *complete, partial = (partial + chunk).split(b"\n")
                yield from complete
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if not self.closed:
                raise NoClusterError(f"the connection to the API server broke: {error}") from error
        if partial:
            yield partial

    def close(self) -> None:
        """End the response; a reader in another thread sees the end."""
        self.closed = True
        socket = self._connection.sock
        with contextlib.suppress(OSError):
            if socket is not None:
                socket.shutdown(2)
        self._connection.close()


class Connection:
    """The API server of one `Access`."""

    def __init__(
        self, access: Access, *, timeout: float = RESPONSE_TIMEOUT_SECONDS, user_agent: str = "kubectl-trn"
    ) -> None:
        self._idle: deque[tuple[http.client.HTTPConnection, float]] = deque()
        self.access = access
        self._user_agent = user_agent
        self._parts = urlsplit(access.server)
        self._timeout = timeout
        self._context = tls_context(access) if self._parts.scheme == "https" else None

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of sockets; None for plain HTTP."""
        return self._context

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the API server."""
        return self._parts.hostname or "", self._parts.port or (443 if self._context else 80)

    def path(self, path: str, query: Mapping[str, str] | None = None) -> str:
        """Return the path as the server sees it, also behind a proxy that adds a path."""
        return f"{self._parts.path.rstrip('/')}{path}" + (f"?{urlencode(query)}" if query else "")

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> HttpResponse:
        """Send a request whose body is bytes or JSON. Raises NoClusterError without a response."""
        data = body if isinstance(body, bytes | None) else encode_json(body)
        headers = {"Accept": accept, **({"Content-Type": content_type} if data is not None else {})}
        for idle in (self._take_idle(), None):
            connection = idle or self._open()
            try:
                self._send(connection, method, self.path(path, query), data, headers)
                response = connection.getresponse()
                http_response = HttpResponse(
                    response.status, lower_case_keys(response.headers.items()), response.read()
                )
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                # The server may close an idle connection at any time; only requests that change nothing are sent again.
                if idle is None or method != "GET":
                    raise self._connection_error(error) from error
            else:
                self._idle.append((connection, time.monotonic()))
                return http_response
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close idle connections; the object can be used again."""
        while (idle := self._take_idle()) is not None:
            idle.close()

    def __del__(self) -> None:
        self.close()

    def _take_idle(self) -> http.client.HTTPConnection | None:
        """Return a recently used connection; other threads may use the last one at any time."""
        with contextlib.suppress(IndexError):
            while True:
                connection, last_used = self._idle.pop()
                if time.monotonic() - last_used < MAX_IDLE_SECONDS:
                    return connection
                connection.close()
        return None

    @contextlib.contextmanager
    def stream(self, path: str, *, query: Mapping[str, str], silence: float | None = None) -> Iterator[LineStream]:
        """Send a GET and read it line by line on a separate connection; `silence` seconds without a byte end it."""
        connection = self._open()
        try:
            try:
                self._send(connection, "GET", self.path(path, query), None, {"Accept": "*/*"})
                response = connection.getresponse()
                if connection.sock is not None:
                    connection.sock.settimeout(silence)
            except (OSError, http.client.HTTPException) as error:
                raise self._connection_error(error) from error
            yield LineStream(response.status, response, connection)
        finally:
            connection.close()

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
    ) -> None:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in (*headers.items(), *self.access.headers, ("User-Agent", self._user_agent)):
            connection.putheader(name, value)
        if data is not None:
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)

    def _open(self) -> http.client.HTTPConnection:
        host, port = self.address
        proxy = find_proxy(self.access, self._parts.scheme, host)
        target = urlsplit(proxy) if proxy else None
        to_host, to_port = (target.hostname or "", target.port or 3128) if target else (host, port)
        connection: http.client.HTTPConnection
        if self._context is not None:
            connection = _ServerNameConnection(to_host, to_port, self._context, self.access.server_name, self._timeout)
        else:
            connection = http.client.HTTPConnection(to_host, to_port, timeout=self._timeout)
        if target:
            connection.set_tunnel(host, port, proxy_headers(target.username, target.password))
        return connection

    def _connection_error(self, error: Exception) -> NoClusterError:
        reason = str(error) or type(error).__name__
        return NoClusterError(
            f"no answer from the API server {self.access.server} (context {self.access.context or 'none'}): {reason}"
        )


class _ServerNameConnection(http.client.HTTPSConnection):
    """HTTPS with a server name that may differ from the host's (`tls-server-name`)."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, server_name: str, timeout: float) -> None:
        super().__init__(host, port, context=context, timeout=timeout)
        self._tls_context, self._tls_server_name = context, server_name

    def connect(self) -> None:
        if not self._tls_server_name:
            super().connect()
            return
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls_context.wrap_socket(self.sock, server_hostname=self._tls_server_name)


def lower_case_keys(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers of a response by lower-case names."""
    return {name.lower(): value for name, value in headers}


def encode_json(body: Any) -> bytes:
    """Encode a request body as JSON that a YAML parser reads too.

    Characters beyond U+FFFF stay unescaped, because YAML has no surrogate pairs: the API server would refuse the status
    of a job with an emoji in a pod's last output.
    """
    return _ESCAPED_CHARACTERS.sub(_escape, json.dumps(body, ensure_ascii=False)).encode()


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"


def tls_context(access: Access) -> ssl.SSLContext:
    """Build the TLS context of a kubeconfig. Raises NoClusterError if a certificate cannot be used."""
    try:
        context = ssl.create_default_context(cadata=access.authority.decode() if access.authority else None)
        # Authorities of managed clusters lack the key identifiers that Python 3.13's strict flag requires.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not access.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if access.certificate:
            _load_client_certificate(context, access)
    except (ssl.SSLError, ValueError, OSError) as error:
        raise NoClusterError(f"no cluster: a certificate of the kubeconfig cannot be used: {error}") from error
    return context


def _load_client_certificate(context: ssl.SSLContext, access: Access) -> None:
    """Load the client certificate from private files, which the library needs, and delete them at once."""
    with tempfile.TemporaryDirectory(prefix="kubectl-trn-") as folder:
        path = Path(folder) / "identity.pem"
        path.touch(mode=0o600)
        path.write_bytes(access.certificate + b"\n" + access.key)
        context.load_cert_chain(path)


def find_proxy(access: Access, scheme: str, host: str) -> str:
    """Return the proxy of the kubeconfig, else of the environment; empty for none."""
    if access.proxy:
        return access.proxy
    if host in _LOOPBACK or not any(name.lower() == f"{scheme}_proxy" for name in os.environ):
        return ""
    # Imported here: few users have a proxy, and the import takes a tenth of a command's time.
    from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415

    return "" if proxy_bypass(host) else getproxies().get(scheme, "")


def proxy_headers(user: str | None, password: str | None) -> dict[str, str]:
    """Return the headers of a proxy with a login."""
    if not user:
        return {}
    pair = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
    return {"Proxy-Authorization": f"Basic {pair}"}
