"""Read, write and watch objects of an API server as parsed JSON.

During a partition nothing is sent and open watches deliver nothing, as if the network to the API server failed.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Self

from trainium_contract.api_server.aio import HttpClient
from trainium_contract.api_server.errors import ConnectionFailedError
from trainium_contract.api_server.kubeconfig import Access
from trainium_contract.api_server.responses import parse_event, parse_object, parse_refusal
from trainium_devcluster.node.api.objects import Json

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

_REQUEST_SECONDS = 15.0  # a watch has none
_PARTITION_DELAY_SECONDS = 1.0  # until a request fails while the node is partitioned
_PARTITIONED = "the node is partitioned from the API server"


class Api:
    """A client of the API server; use it as an asynchronous context manager."""

    def __init__(self, access: Access, user_agent: str, *, seconds: float = _REQUEST_SECONDS) -> None:
        self._access = access
        self._agent = user_agent
        self._seconds = seconds
        self._http: HttpClient
        self._partitioned = False

    async def __aenter__(self) -> Self:
        self._http = HttpClient(self._access, user_agent=self._agent)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def partitioned(self) -> bool:
        """Whether an injected partition is active."""
        return self._partitioned

    def partition(self, on: bool) -> None:
        """Start or end a partition from the API server; open watches deliver nothing during it."""
        self._partitioned = on

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Json:
        """Send GET.

        Raises:
            ApiError: the server refused.
            UnavailableError: the server did not answer, or failed.
        """
        return await self._request("GET", path, params=params)

    async def create(self, path: str, body: Json) -> Json:
        """Send POST; raises as `get`."""
        return await self._request("POST", path, body=body)

    async def patch(self, path: str, body: Json, kind: str = STRATEGIC_PATCH) -> Json:
        """Send PATCH with content type `kind`; raises as `get`."""
        return await self._request("PATCH", path, body=body, content_type=kind)

    async def delete(self, path: str, options: Json) -> Json:
        """Send DELETE with DeleteOptions; raises as `get`."""
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
        await self._fail_if_partitioned()
        response = await self._http.request(
            method, path, query=params or {}, body=body, content_type=content_type, timeout=self._seconds
        )
        if response.status >= 400:
            raise parse_refusal(f"{method} {path}", response.status, response.body)
        return parse_object(path, response.body) if response.body else {}

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[tuple[str, Json]]:
        """Yield (type, object) of each watch event until the server ends the watch.

        Raises:
            ApiError: the server refused, or ended the watch with an error (410: list again).
            UnavailableError: the connection broke.
        """
        await self._fail_if_partitioned()
        async with self._http.stream(path, query={**params, "watch": "true"}, silence=None) as stream:
            if stream.status >= 400:
                body = b"\n".join([line async for line in stream.lines])
                raise parse_refusal(f"watch {path}", stream.status, body)
            async for line in stream.lines:
                if self._partitioned:
                    # Events during a partition are lost; after it the watch restarts from a list.
                    raise ConnectionFailedError(_PARTITIONED)
                event = parse_event(path, line)
                yield event["type"], event["object"]

    async def _fail_if_partitioned(self) -> None:
        if self._partitioned:
            await asyncio.sleep(_PARTITION_DELAY_SECONDS)
            raise ConnectionFailedError(_PARTITIONED)
