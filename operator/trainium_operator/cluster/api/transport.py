"""HTTP to the API server: the only module with credentials and connections.

Guarantees:
- TLS is always verified.
- POST and PATCH are never sent twice here; `client.py` decides what is retried.
- Credentials never reach a log line. Those of the pod are read again every minute, others before they expire.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Protocol

from trainium_contract.api_server.aio import HttpClient, ResponseStream
from trainium_contract.api_server.connection import HttpResponse
from trainium_contract.api_server.errors import NoClusterError
from trainium_contract.api_server.kubeconfig import Access, find_access, read_pod_access

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

__all__ = ["HttpClient", "HttpResponse", "ResponseStream", "Transport", "connect"]

AGENT = "trainium-operator"
CONNECTIONS = 128
"""Above the executor's 64 writes in flight, the watches and the elector, so nothing waits for a connection."""


class Transport(Protocol):
    """The HTTP requests of `Api`; tests use an in-memory server."""

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
        """Send a request and return the response; `timeout` in seconds. Raises ConnectionFailedError."""
        ...

    def stream(
        self, path: str, *, query: Mapping[str, str], silence: float
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Stream a GET line by line; `silence` seconds without a byte raise ConnectionFailedError."""
        ...


async def connect(kubeconfig: str | None) -> HttpClient:
    """Load credentials from a kubeconfig file, else from the pod's ServiceAccount, KUBECONFIG or ~/.kube/config.

    Raises NoClusterError, which names what to set.
    """

    def find_valid_access() -> Access:
        in_pod = kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ
        access = read_pod_access(os.environ) if in_pod else find_access(kubeconfig, None, os.environ)
        if not access.configuration.verify_ssl:
            raise NoClusterError(
                "the kubeconfig turns TLS verification off (insecure-skip-tls-verify); give the cluster's CA instead"
            )
        return access

    access = await asyncio.to_thread(find_valid_access)
    return HttpClient(access, user_agent=AGENT, connections=CONNECTIONS)
