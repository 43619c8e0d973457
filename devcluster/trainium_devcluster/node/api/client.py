"""Read, write and watch objects of an API server over one aiohttp session, as parsed JSON.

Guarantees:
- TLS is verified against the kubeconfig's certificate authority.
- During a partition nothing is sent and open watches are cut, as if the network to the API server failed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Self

import aiohttp

from trainium_contract.api_server.connection import tls_context
from trainium_contract.api_server.kubeconfig import Access
from trainium_devcluster.node.api.objects import Json

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

_REQUEST_TIMEOUT = 15.0  # seconds; a watch has none
_PARTITION_DELAY = 1.0  # seconds until a request fails while the node is partitioned
_MAX_LINE = 16 * 1024 * 1024


class ApiError(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class Unreachable(Exception):  # noqa: N818 - reads as what it is
    """The API server did not answer."""


class Api:
    """The client. Use as an asynchronous context manager."""

    def __init__(self, access: Access, user_agent: str, *, seconds: float = _REQUEST_TIMEOUT) -> None:
        self._access = access
        self._agent = user_agent
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None
        self._partitioned = False

    async def __aenter__(self) -> Self:
        headers = {"User-Agent": self._agent, "Accept": "application/json", **dict(self._access.headers)}
        connector = aiohttp.TCPConnector(limit=0, ssl=tls_context(self._access), keepalive_timeout=60)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=self._seconds)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def partitioned(self) -> bool:
        """Whether the API server is out of reach on purpose."""
        return self._partitioned

    def partition(self, on: bool) -> None:
        """Cut this client off from the API server, or let it through again; open watches deliver nothing meanwhile."""
        self._partitioned = on

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Json:
        """GET.

        Raises:
            ApiError: the server refused.
            Unreachable: the server did not answer.
        """
        return await self._request("GET", path, params=params)

    async def create(self, path: str, body: Json) -> Json:
        """POST; raises as `get`."""
        return await self._request("POST", path, body=body)

    async def patch(self, path: str, body: Json, kind: str = STRATEGIC_PATCH) -> Json:
        """PATCH with content type `kind`; raises as `get`."""
        return await self._request("PATCH", path, body=body, content_type=kind)

    async def delete(self, path: str, options: Json) -> Json:
        """DELETE with DeleteOptions; raises as `get`."""
        return await self._request("DELETE", path, body={"apiVersion": "v1", "kind": "DeleteOptions", **options})

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        assert self._session is not None
        if self._partitioned:
            await asyncio.sleep(_PARTITION_DELAY)
            raise Unreachable("the node is partitioned from the API server")
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if data else {}
        url = self._access.server + path
        try:
            async with self._session.request(method, url, params=params, data=data, headers=headers) as response:
                raw = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{method} {path}: {error or type(error).__name__}") from error
        if status >= 400:
            raise _error(status, raw)
        result: Json = json.loads(raw) if raw else {}
        return result

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[tuple[str, Json]]:
        """Yield (type, object) of each watch event until the server ends the watch.

        Raises:
            ApiError: the server refused, or ended the watch with an error (410: list again).
            Unreachable: the connection broke.
        """
        assert self._session is not None
        if self._partitioned:
            await asyncio.sleep(_PARTITION_DELAY)
            raise Unreachable("the node is partitioned from the API server")
        url = self._access.server + path
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_TIMEOUT)
        try:
            async with self._session.get(url, params={**params, "watch": "true"}, timeout=timeout) as response:
                if response.status >= 400:
                    raise _error(response.status, await response.read())
                async for line in self._lines(response):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"watch {path}: {error or type(error).__name__}") from error

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        pending = bytearray()
        while True:
            chunk = await response.content.readany()
            if self._partitioned:
                # What arrives during a partition is lost; the watch starts over from a list when it is healed.
                raise Unreachable("the node is partitioned from the API server")
            if not chunk:
                return
            pending += chunk
            while (end := pending.find(b"\n")) >= 0:
                line = bytes(pending[:end])
                del pending[: end + 1]
                if line:
                    yield line
            if len(pending) > _MAX_LINE:
                raise Unreachable("a watch event of more than 16 MiB")


def _error(status: int, raw: bytes) -> ApiError:
    try:
        body = json.loads(raw)
        return ApiError(status, body.get("reason", ""), body.get("message", ""))
    except (ValueError, AttributeError):
        return ApiError(status, "", raw[:500].decode(errors="replace"))
