"""The operator's HTTPS port for readers, over TLS, beside an API server that can be slow, and a user who may read."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.testing.operator.coordinator_world import CountedReviews, tls_of_server
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import ACCESS_REVIEWS, TOKEN_REVIEWS
from trainium_operator.cluster.coordinator_ports import Reviewer
from trainium_operator.endpoints.access import Access
from trainium_operator.endpoints.servers import EndpointServer, Exposition

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from tests.testing.api.fake_kubernetes import FakeCluster
    from trainium_operator.cluster.api.transport import Transport
    from trainium_operator.endpoints.pages import Jobs

PROMETHEUS = "system:serviceaccount:monitoring:prometheus"
USER = {
    "username": PROMETHEUS,
    "uid": "sa-uid",
    "groups": ["system:serviceaccounts", "system:authenticated"],
    "extra": {"authentication.kubernetes.io/pod-name": ["prometheus-0"]},
}


def may_read_metrics(spec: dict[str, Any]) -> bool:
    wanted = {"path": "/metrics", "verb": "get"}
    return bool(spec["user"] == PROMETHEUS and spec.get("nonResourceAttributes") == wanted)


class ReadersWorld(CountedReviews):
    """`cluster` is the API server; `now` the operator's clock."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        cluster.tokens["good"] = USER
        cluster.tokens["tenant"] = {"username": "system:serviceaccount:team:default", "groups": []}
        cluster.may = may_read_metrics
        self.now = time.time()
        self.answers: list[tuple[str, int]] = []
        self.made = 0
        self.server: EndpointServer
        self.port = 0
        self.trust: ssl.SSLContext

    def exposition(self) -> bytes:
        self.made += 1
        return f"made {self.made}\n".encode()

    @property
    def reviews(self) -> list[str]:
        """Kinds of the reviews that were asked for."""
        return [path.rpartition("/")[2] for method, path in self.cluster.requests if method == "POST"]

    @asynccontextmanager
    async def session(self, address: str = "127.0.0.1") -> AsyncIterator[aiohttp.ClientSession]:
        """Connections that come from this address."""
        connector = aiohttp.TCPConnector(ssl=self.trust, limit=0, local_addr=(address, 0))
        async with aiohttp.ClientSession(f"https://localhost:{self.port}", connector=connector) as session:
            yield session

    async def get(
        self, session: aiohttp.ClientSession, token: str = "", path: str = "/metrics", **headers: str
    ) -> tuple[int, str]:
        """Status and text."""
        if token:
            headers["Authorization"] = f"Bearer {token}"
        async with session.get(path, headers=headers) as response:
            return response.status, await response.text()


@asynccontextmanager
async def readers_world(
    cluster: FakeCluster, transport: Transport | None = None, jobs: Callable[[ReadersWorld], Jobs] | None = None
) -> AsyncIterator[ReadersWorld]:
    """Wired as `Runtime` does it; `transport` leads to the API server. `jobs`: what there are pages of."""
    world = ReadersWorld(cluster)
    api = Api(transport or cluster)
    tokens, rights = (world.counted(Reviewer(api, kind).review) for kind in (TOKEN_REVIEWS, ACCESS_REVIEWS))
    access = Access(tokens, rights, wall_clock=lambda: world.now)
    exposition = Exposition(world.exposition, lambda: world.now)
    world.server = EndpointServer(
        access,
        exposition,
        jobs=jobs(world) if jobs is not None else None,
        clock=lambda: world.now,
        on_answer=lambda *answer: world.answers.append(answer),
    )
    context, world.trust = tls_of_server()
    world.port = await world.server.start("0.0.0.0", 0, context)
    try:
        yield world
    finally:
        await world.server.stop()
        await asyncio.sleep(0)
