"""HTTP to the API server: the one place that holds credentials and connections, on `kubernetes.aio`'s configuration.

Raw bytes only: typed models cost ten times as much per object and drop fields that they do not know.
Invariants: TLS is always verified; nothing here retries; credentials never reach a log line.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import sys
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

CONNECT_SECONDS = 10.0
CONNECTIONS = 128
"""Above the executor's 64 in flight, the watches and the elector: nobody waits for a connection."""
APPLY = "application/apply-patch+yaml"
_AWKWARD = re.compile(r"[^\x20-\x7e\U00010000-\U0010ffff]")
"""Characters to escape: line breaks, controls, marks that YAML reads in its own way, halves of surrogate pairs."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NoClusterError(Exception):
    """There is no usable configuration of a cluster; the message has the remedy."""


class ConnectionFailedError(Exception):
    """No answer: connection refused, reset, or timed out."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One HTTP answer; `headers` has lower-case keys."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class ResponseStream:
    """An answer whose body is still coming; `lines` ends when the server closes it."""

    status: int
    lines: AsyncIterator[bytes]


class Transport(Protocol):
    """The requests of `Api`; tests put an in-memory server behind it."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: Any,
        content_type: str,
        timeout: float,
    ) -> HttpResponse:
        """One exchange; `timeout` in seconds. Raises ConnectionFailedError."""
        ...

    def stream(
        self, path: str, *, query: Mapping[str, str], silence: float
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Stream a GET line by line; `silence` seconds without a byte raise ConnectionFailedError."""
        ...


def as_yaml(body: Any) -> bytes:
    """JSON that is YAML too: characters beyond U+FFFF as they are, since YAML knows no surrogates to write them by.

    An emoji in a pod's last words would otherwise have the server refuse a job's status for ever.
    """
    return _AWKWARD.sub(_escaped, json.dumps(body, ensure_ascii=False)).encode()


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"


def import_only_parts() -> None:
    """Have imports of a part of the client library leave the packages around it unread; call before the first one.

    Their `__init__` would import the synchronous client, its models and its tools: 9 MiB that nobody uses. A library
    that was imported as a whole before stays as it is.
    """
    for name in ("kubernetes", "kubernetes.aio"):
        if name in sys.modules:
            continue
        spec = find_spec(name)
        assert spec is not None  # a dependency of this package
        module = sys.modules[name] = module_from_spec(spec)  # known, and not executed
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


class KubernetesTransport:
    """Transport on aiohttp through `kubernetes.aio`; made by `connect`."""

    def __init__(self, configuration: Any, namespace: str) -> None:
        import_only_parts()
        # Imported here: it takes time, and the command line's help does not need it.
        from kubernetes.aio.client.rest import RESTClientObject  # noqa: PLC0415

        self._configuration = configuration
        server = urlsplit(configuration.host)
        if server.scheme not in getproxies() or proxy_bypass(server.hostname or ""):
            # Else each request would look for a proxy in the environment again, in a thread.
            configuration.client_session_kwargs = {"trust_env": False}
        self._client: Any = RESTClientObject(configuration)
        self.namespace = namespace

    def with_separate_pool(self, connections: int) -> KubernetesTransport:
        """Return a transport of the same identity with a separate pool of at most so many connections."""
        configuration = copy.copy(self._configuration)
        configuration.connection_pool_maxsize = connections
        return KubernetesTransport(configuration, self.namespace)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "trainium-operator"}
        # Re-reads a projected token by itself (once a minute), and asks exec plug-ins for a new one.
        for setting in (await self._configuration.auth_settings()).values():
            headers[setting["key"]] = setting["value"]
        return headers

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: Any,
        content_type: str,
        timeout: float,
    ) -> HttpResponse:
        """See Transport."""
        if body is not None and content_type == APPLY:
            # With the addition the client library sends what it is given; the server cuts it off.
            body, content_type = as_yaml(body), f"{APPLY}; charset=utf-8"
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        with _failures_of(method, path):
            headers = await self._headers(content_type)
            raw = await self._client.request(
                method, self._url(path, query), headers=headers, body=body, _request_timeout=limits
            )
            data = await raw.read()
        return HttpResponse(raw.status, {key.lower(): value for key, value in raw.headers.items()}, data)

    @asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str], silence: float) -> AsyncIterator[ResponseStream]:
        """See Transport."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence)
        with _failures_of("GET", path):
            headers = await self._headers("application/json")
            raw = await self._client.request("GET", self._url(path, query), headers=headers, _request_timeout=limits)
        try:
            yield ResponseStream(raw.status, self._lines(path, raw.response))
        finally:
            raw.response.close()

    async def _lines(self, path: str, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        with _failures_of("GET", path):
            async for line in response.content:
                yield line

    def _url(self, path: str, query: Mapping[str, str]) -> str:
        return f"{self._configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")

    async def credentials(self) -> dict[str, str | None]:
        """Return the fields of kopf's ConnectionInfo: it has separate connections. Call it again after a 401."""
        configuration = self._configuration
        settings = list((await configuration.auth_settings()).values())
        bearer: str = settings[0]["value"] or "" if settings else ""
        return {
            "server": configuration.host,
            "ca_path": configuration.ssl_ca_cert,
            "ca_data": configuration.ca_cert_data,
            "token": bearer.partition(" ")[2].strip() or None,
            "certificate_path": configuration.cert_file,
            "private_key_path": configuration.key_file,
            "default_namespace": self.namespace,
        }


@contextmanager
def _failures_of(method: str, path: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConnectionFailedError(f"{method} {path}: {error or type(error).__name__}") from error


async def connect(kubeconfig: str | None) -> KubernetesTransport:
    """Credentials from a kubeconfig file, else from the pod's ServiceAccount, else from KUBECONFIG or ~/.kube/config.

    Raises NoClusterError with what to set.
    """
    import_only_parts()
    # Imported here for the same reason as above; the package's own annotations are incomplete.
    from kubernetes.aio import config as kubernetes_config  # noqa: PLC0415
    from kubernetes.aio.client.configuration import Configuration  # noqa: PLC0415

    config: Any = kubernetes_config
    configuration = Configuration()
    namespace = "default"
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        try:
            config.load_incluster_config(client_configuration=configuration)
            namespace = (await asyncio.to_thread(_NAMESPACE_FILE.read_text)).strip()
        except (config.ConfigException, OSError) as error:
            raise NoClusterError(f"the pod's ServiceAccount token is not usable: {error}") from error
    else:
        path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        try:
            loader = await config.load_kube_config(config_file=path, client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise NoClusterError(
                f"no cluster: kubeconfig {path} is not usable ({error}); give --kubeconfig FILE, set KUBECONFIG, "
                "or run in a pod with a ServiceAccount"
            ) from error
        namespace = loader.current_context["context"].get("namespace") or "default"
    if not configuration.verify_ssl:
        raise NoClusterError(
            "the kubeconfig turns TLS verification off (insecure-skip-tls-verify); give the cluster's CA instead"
        )
    # Certificate authorities of managed clusters lack the key identifiers that Python 3.13's strict flag demands; the
    # chain and the host name are verified in any case.
    configuration.disable_strict_ssl_verification = True
    configuration.connection_pool_maxsize = CONNECTIONS
    return KubernetesTransport(configuration, namespace)
