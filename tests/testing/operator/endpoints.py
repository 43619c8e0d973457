"""The HTTPS port for metrics and pages over TLS, with a fake API server and a user who may read."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.operator.coordinator_fixture import tls_of_server
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import ACCESS_REVIEWS, TOKEN_REVIEWS
from trainium_operator.cluster.api.transport import Transport
from trainium_operator.cluster.coordinator_adapters import Reviewer
from trainium_operator.endpoints.access import Access
from trainium_operator.endpoints.pages import Jobs
from trainium_operator.endpoints.servers import EndpointServer, Exposition

Review = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

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


class EndpointsFixture:
    """An endpoint server, its API server `cluster`, and the clock `now` of the operator."""

    def __init__(self, cluster: FakeApiServer) -> None:
        self.cluster = cluster
        cluster.tokens["good"] = USER
        cluster.tokens["tenant"] = {"username": "system:serviceaccount:team:default", "groups": []}
        cluster.may = may_read_metrics
        self.now = time.time()
        self.answers: list[tuple[str, int]] = []
        self.pending = self.max_pending = 0
        """Number of reviews that the operator waits for, and the most at one time."""
        self.expositions = 0
        self.server: EndpointServer
        self.port = 0
        self.trust: ssl.SSLContext

    def exposition(self) -> bytes:
        self.expositions += 1
        return f"made {self.expositions}\n".encode()

    def count(self, review: Review) -> Review:
        async def counting_review(spec: dict[str, Any]) -> dict[str, Any]:
            self.pending += 1
            self.max_pending = max(self.max_pending, self.pending)
            try:
                return await review(spec)
            finally:
                self.pending -= 1

        return counting_review

    @property
    def reviews(self) -> list[str]:
        """Return the kinds of the requested reviews."""
        return [path.rpartition("/")[2] for method, path in self.cluster.requests if method == "POST"]

    @asynccontextmanager
    async def session(self, address: str = "127.0.0.1") -> AsyncIterator[aiohttp.ClientSession]:
        """Open a session whose connections come from this address."""
        connector = aiohttp.TCPConnector(ssl=self.trust, limit=0, local_addr=(address, 0))
        async with aiohttp.ClientSession(f"https://localhost:{self.port}", connector=connector) as session:
            yield session

    async def get(
        self, session: aiohttp.ClientSession, token: str = "", path: str = "/metrics", **headers: str
    ) -> tuple[int, str]:
        """Return status and text of a GET."""
        if token:
            headers["Authorization"] = f"Bearer {token}"
        async with session.get(path, headers=headers) as response:
            return response.status, await response.text()


@asynccontextmanager
async def run_endpoints(
    cluster: FakeApiServer, transport: Transport | None = None, jobs: Callable[[EndpointsFixture], Jobs] | None = None
) -> AsyncIterator[EndpointsFixture]:
    """Start an endpoint server wired as in `Runtime`; `jobs` provides the pages."""
    endpoints = EndpointsFixture(cluster)
    api = Api(transport or cluster)
    tokens, rights = (endpoints.count(Reviewer(api, kind).review) for kind in (TOKEN_REVIEWS, ACCESS_REVIEWS))
    access = Access(tokens, rights, wall_clock=lambda: endpoints.now)
    exposition = Exposition(endpoints.exposition, lambda: endpoints.now)
    endpoints.server = EndpointServer(
        access,
        exposition,
        jobs=jobs(endpoints) if jobs is not None else None,
        clock=lambda: endpoints.now,
        on_answer=lambda *answer: endpoints.answers.append(answer),
    )
    context, endpoints.trust = tls_of_server()
    endpoints.port = await endpoints.server.start("0.0.0.0", 0, context)
    try:
        yield endpoints
    finally:
        await endpoints.server.stop()
        await asyncio.sleep(0)
