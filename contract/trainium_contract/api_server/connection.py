"""Requests to the API server with the `kubernetes` library; raw bytes in and out.

Guarantees:
- TLS is verified unless the kubeconfig turns that off.
- A request that may have been carried out is never sent twice.
- Credentials never reach a message.
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import urllib3
from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from urllib3.util.ssl_ import create_urllib3_context

from trainium_contract.api_server.errors import ConnectionFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from trainium_contract.api_server.kubeconfig import Access

RESPONSE_TIMEOUT_SECONDS = 30.0
MAX_CONNECTIONS = 64
"""Above the threads of any command; urllib3 warns when it drops a connection."""
BEARER = ("BearerToken",)
"""The library's name of its authentication."""
NO_ADDRESS = "none.invalid"
_CHUNK_BYTES = 1 << 16
_ESCAPED_CHARACTERS = re.compile(r"[^\x20-\x7e\U00010000-\U0010ffff]")
"""Characters to escape: line breaks, controls, characters with a meaning in YAML, halves of surrogate pairs."""
_RETRIES = urllib3.Retry(
    total=None, connect=0, redirect=0, status=0, other=0, read=1, allowed_methods=["GET"], raise_on_redirect=False
)
"""The server may close an idle connection at any time; only a request that changes nothing is sent again."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One HTTP response; look headers up by their lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class LineStream:
    """Lines of a response that is still being received; `close` may be called from another thread and ends it."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self.status = response.status
        self.closed = False
        self._response = response

    def read_lines(self) -> Iterator[bytes]:
        """Yield lines without their ends, until the server or `close` ends the response."""
        partial = b""
        try:
            while chunk := self._response.read1(_CHUNK_BYTES):
                *complete, partial = (partial + chunk).split(b"\n")
                yield from complete
        except (OSError, urllib3.exceptions.HTTPError, ValueError, AttributeError) as error:
            if not self.closed:
                raise ConnectionFailedError(f"the connection to the API server broke: {error}") from error
        if partial:
            yield partial

    def close(self) -> None:
        """End the response; a reader in another thread sees the end."""
        self.closed = True
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._response.shutdown()


class Connection:
    """The API server of one `Access`; threads may share it."""

    def __init__(
        self, access: Access, *, timeout: float = RESPONSE_TIMEOUT_SECONDS, user_agent: str = "kubectl-trn"
    ) -> None:
        self.access = access
        self._timeout = timeout
        configuration = access.configuration
        configuration.retries = _RETRIES
        configuration.connection_pool_maxsize = MAX_CONNECTIONS
        _set_proxy(access)
        self._client = ApiClient(configuration)
        self._client.user_agent = user_agent
        # From Python 3.13 on urllib3 sets VERIFY_X509_STRICT, which EKS's authorities fail (the library's issue 2394).
        context = create_urllib3_context(
            cert_reqs=ssl.CERT_REQUIRED if configuration.verify_ssl else ssl.CERT_NONE, verify_flags=0
        )
        if not configuration.ssl_ca_cert:
            context.load_default_certs()
        self._client.rest_client.pool_manager.connection_pool_kw["ssl_context"] = context

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
        """Send a request with a JSON body. Raises ConnectionFailedError without a response."""
        response = self._send(method, path, query, accept, self._timeout, body=body, content_type=content_type)
        with self._wrap_errors():
            return HttpResponse(response.status, response.headers, response.data)

    @contextlib.contextmanager
    def stream(self, path: str, *, query: Mapping[str, str], silence: float | None = None) -> Iterator[LineStream]:
        """Send a GET and read it line by line; `silence` seconds without a byte end it."""
        response = self._send("GET", path, query, "*/*", silence)
        try:
            yield LineStream(response)
        finally:
            response.close()

    def serialize(
        self, method: str, path: str, query: Iterable[tuple[str, str]], **headers: str
    ) -> tuple[str, urllib3.HTTPHeaderDict]:
        """Return URL and headers of a request, with the credentials."""
        _, url, fields, _, _ = self._client.param_serialize(
            method, path, query_params=list(query), header_params=headers, auth_settings=BEARER
        )
        combined = urllib3.HTTPHeaderDict(fields)
        for name, value in self.access.impersonation:
            combined.add(name, value)
        return url, combined

    def close(self) -> None:
        """Close idle connections; the object can be used again."""
        self._client.rest_client.close()

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        accept: str,
        timeout: float | None,
        *,
        body: Any = None,
        content_type: str = "application/json",
    ) -> urllib3.BaseHTTPResponse:
        url, headers = self.serialize(method, path, (query or {}).items(), Accept=accept)
        if body is not None:
            headers["Content-Type"] = content_type
            body = encode_body(body, content_type)
        with self._wrap_errors():
            response = self._client.call_api(
                method, url, headers, body=body, _request_timeout=(self._timeout, timeout)
            ).response
        assert isinstance(response, urllib3.BaseHTTPResponse)
        return response

    @contextlib.contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except (ApiException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            access = self.access
            raise ConnectionFailedError(
                f"no answer from the API server {access.server} (context {access.context or 'none'}): "
                f"{_describe_failure(error)}"
            ) from error


def _set_proxy(access: Access) -> None:
    """Set exactly the chosen proxy, or none; otherwise parts of the library would apply the environment again."""
    configuration = access.configuration
    configuration.proxy = access.proxy.url or f"http://{NO_ADDRESS}"
    configuration.no_proxy = NO_ADDRESS if access.proxy.url else "*"
    if access.proxy.login:
        configuration.proxy_headers = urllib3.make_headers(proxy_basic_auth=access.proxy.login)


def encode_body(body: Any, content_type: str) -> Any:
    """Encode a body as YAML; the library encodes other bodies as JSON."""
    return encode_yaml(body) if "yaml" in content_type and not isinstance(body, bytes) else body


def encode_yaml(body: Any) -> bytes:
    """Encode a request body as JSON that a YAML parser reads too.

    Characters beyond U+FFFF stay unescaped, because YAML has no surrogate pairs: the API server would refuse the status
    of a job with an emoji in a pod's last output.
    """
    return _ESCAPED_CHARACTERS.sub(_escape, json.dumps(body, ensure_ascii=False)).encode()


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"


def _describe_failure(error: BaseException) -> str:
    """Return why there is no response, without urllib3's names of objects."""
    if isinstance(error, ApiException):
        return " ".join(str(error.reason).split())
    while isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    if isinstance(error, urllib3.exceptions.NewConnectionError) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__
