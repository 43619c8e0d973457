"""Metrics over TLS: authorization by the API server, caching, and limits of unknown clients."""

import asyncio
import time
from itertools import count
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.api.http_api_server import HttpApiServer
from tests.testing.api.token_issuer import ISSUER
from tests.testing.operator.endpoints import PROMETHEUS, USER, run_endpoints
from tests.testing.suite.timeouts import async_until
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.transport import connect
from trainium_operator.cluster.lease import LeaseElector
from trainium_operator.endpoints import reviews, servers
from trainium_operator.endpoints.servers import Exposition, ProbeServer
from trainium_operator.http import limiter, listener
from trainium_operator.main import LEASE_CONNECTIONS
from trainium_operator.monitoring.metrics import Metrics

LONG_SECONDS = 60.0


async def test_metrics_are_authorised_by_a_review_of_the_complete_user() -> None:
    cluster = FakeApiServer()
    async with run_endpoints(cluster) as endpoints, endpoints.session() as session:
        assert await endpoints.get(session, "good") == (200, "made 1\n")
        token, right = (write.body for write in cluster.writes)
        assert (token["apiVersion"], token["kind"]) == ("authentication.k8s.io/v1", "TokenReview")
        assert token["spec"] == {"token": "good"}, "for the audience of the API server itself"
        assert (right["apiVersion"], right["kind"]) == ("authorization.k8s.io/v1", "SubjectAccessReview")
        assert right["spec"] == {
            "user": PROMETHEUS,
            "uid": "sa-uid",
            "groups": USER["groups"],
            "extra": USER["extra"],
            "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        }
        assert endpoints.answers == [("/metrics", 200)]


async def test_other_readers_are_refused_with_a_message() -> None:
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session() as session:
        assert await endpoints.get(session) == (
            401,
            "send a token of this cluster as `Authorization: Bearer <token>`\n",
        )
        assert (await endpoints.get(session, Authorization="Basic Z29vZDpnb29k"))[0] == 401
        status, sentence = await endpoints.get(session, "forged")
        assert (status, "not valid" in sentence) == (401, True)
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session() as session:
        status, sentence = await endpoints.get(session, "tenant")
        assert status == 403
        assert sentence == "system:serviceaccount:team:default may not get the nonResourceURL /metrics\n"
        assert (await endpoints.get(session, "good", "/livez"))[0] == 404
        async with session.post("/metrics", headers={"Authorization": "Bearer good"}) as response:
            assert response.status == 405


async def test_reviews_are_cached_for_a_minute() -> None:
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session() as session:
        for _ in range(10):
            assert (await endpoints.get(session, "good"))[0] == 200
        assert endpoints.reviews == ["tokenreviews", "subjectaccessreviews"]
        endpoints.cluster.may = lambda _spec: False
        endpoints.now += 61
        assert (await endpoints.get(session, "good"))[0] == 403
        endpoints.cluster.may = lambda _spec: True
        assert (await endpoints.get(session, "good"))[0] == 200, "no refusal is cached"


async def test_known_readers_can_read_during_an_outage() -> None:
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session() as session:
        assert (await endpoints.get(session, "good"))[0] == 200
        endpoints.cluster.down = True
        endpoints.now += 300
        assert (await endpoints.get(session, "good"))[0] == 200
        assert await endpoints.get(session, "tenant") == (503, "the operator cannot check tokens now; try again\n")
        endpoints.now += 600
        assert (await endpoints.get(session, "good"))[0] == 503


async def test_a_token_is_accepted_until_its_expiry() -> None:
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session() as session:
        expiring = ISSUER.sign({"exp": endpoints.now + 30})
        endpoints.cluster.tokens[expiring] = USER
        assert (await endpoints.get(session, expiring))[0] == 200
        del endpoints.cluster.tokens[expiring]
        endpoints.now += 31
        assert (await endpoints.get(session, expiring))[0] == 401
        endpoints.cluster.down = True
        endpoints.now += 6
        assert (await endpoints.get(session, expiring))[0] == 503


async def test_metrics_are_rendered_once_a_second() -> None:
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session() as session:
        answers = {await endpoints.get(session, "good") for _ in range(20)}
        assert answers == {(200, "made 1\n")}
        endpoints.now += 1
        assert await endpoints.get(session, "good") == (200, "made 2\n")


async def test_an_oversized_header_is_refused_without_a_review() -> None:
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session() as session:
        assert (await endpoints.get(session, "x" * 8_100))[0] == 401
        assert (await endpoints.get(session, "x" * 9_000))[0] == 400
        assert endpoints.reviews == []


class SlowReviews(HttpApiServer):
    """An API server over HTTP that never answers reviews of bad tokens."""

    def __init__(self) -> None:
        super().__init__(FakeApiServer(time.time))
        self.renewals = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.renewals += request.method == "PUT" and "/leases/" in request.path
        if request.path.endswith("/tokenreviews") and (await request.json())["spec"]["token"].startswith("bad"):
            await asyncio.sleep(LONG_SECONDS)
        return await super()._answer(request)


async def test_bad_tokens_delay_neither_the_lease_nor_scrapes(tmp_path: Path) -> None:
    api = SlowReviews()
    await api.start()
    transport = await connect(str(api.kubeconfig(tmp_path)))
    lease_transport = transport.open_separate_pool(LEASE_CONNECTIONS)
    elector = LeaseElector(Api(lease_transport), "system", "lease", "me", wall_clock=time.time)
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    number = count()
    async with (
        run_endpoints(api.cluster, transport) as endpoints,
        endpoints.session() as prometheus,
        endpoints.session("127.0.0.9") as hostile,
    ):
        assert (await endpoints.get(prometheus, "good"))[0] == 200

        async def flood() -> None:
            while True:
                try:
                    await endpoints.get(hostile, f"bad-{next(number)}")
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.05)

        floods = [asyncio.create_task(flood()) for _ in range(100)]
        before, endpoints.max_pending = api.renewals, 0
        answers = set()
        while api.renewals < before + 2 or next(number) < 500:
            answers.add((await endpoints.get(prometheus, "good"))[0])
        rotated = ISSUER.sign({"sub": PROMETHEUS})
        api.cluster.tokens[rotated] = USER
        most_running, endpoints.max_pending = endpoints.max_pending, 0
        async with endpoints.session("127.0.0.3") as again:
            assert (await endpoints.get(again, rotated))[0] == 200, "a flood of one address delays no review of another"
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        assert most_running == reviews.MAX_PER_ADDRESS
        assert answers == {200}
        assert elector.may_act()
        assert not holding.done()
    holding.cancel()
    await lease_transport.close()
    await transport.close()
    await api.stop()


async def test_a_source_of_bad_tokens_is_rate_limited() -> None:
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session("127.0.0.9") as hostile:
        answers = []
        for number in range(12):
            async with endpoints.session("127.0.0.9") as session:
                answers.append((await endpoints.get(session, f"bad-{number}"))[0])
        assert answers == [401] * 10 + [429] * 2
        assert endpoints.reviews == ["tokenreviews"] * 10
        async with endpoints.session() as other:
            assert (await endpoints.get(other, "good"))[0] == 200
        assert (await endpoints.get(hostile, "good"))[0] == 200, "cached reviews are not repeated"
        assert (await endpoints.get(hostile, "tenant"))[0] == 429


async def test_concurrent_bad_tokens_are_rate_limited() -> None:
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session("127.0.0.9") as hostile:
        answers = await asyncio.gather(*(endpoints.get(hostile, f"bad-{number}") for number in range(60)))
        assert {status for status, _ in answers} == {401, 429}
        assert 10 <= len(endpoints.reviews) < 10 + reviews.MAX_PER_ADDRESS


async def test_a_valid_token_without_the_right_is_rate_limited() -> None:
    """Each pod has such a token: it counts as unauthenticated, also for the limits of connections."""
    async with run_endpoints(FakeApiServer()) as endpoints:
        for number in range(12):
            name = f"system:serviceaccount:team:number-{number}"
            endpoints.cluster.tokens[f"tenant-{number}"] = {"username": name, "groups": []}
        answers = []
        for number in range(12):
            async with endpoints.session("127.0.0.9") as session:
                answers.append((await endpoints.get(session, f"tenant-{number}"))[0])
                assert endpoints.server.http.limiter.anonymous > 0
        assert answers == [403] * 10 + [429] * 2


async def test_silent_connections_are_limited_and_a_known_reader_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "MAX_ANONYMOUS", 50)
    monkeypatch.setattr(limiter, "ANONYMOUS_SECONDS", 3.0)
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 3.0)
    async with run_endpoints(FakeApiServer()) as endpoints, endpoints.session() as prometheus:
        assert (await endpoints.get(prometheus, "good"))[0] == 200
        writers = []
        for _ in range(120):
            _, writer = await asyncio.open_connection("127.0.0.1", endpoints.port, local_addr=("127.0.0.9", 0))
            writers.append(writer)
        connections = endpoints.server.http.limiter
        assert connections.anonymous <= 50
        assert (await endpoints.get(prometheus, "good"))[0] == 200
        await async_until(lambda: connections.anonymous == 0, "unauthenticated connections are closed")
        assert endpoints.server.http.connections == 1
        for writer in writers:
            writer.transport.abort()


async def test_connections_to_the_probe_port_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limiter, "ANONYMOUS_SECONDS", 3.0)
    health = ProbeServer(live=lambda: "", ready=lambda: "", metrics=Exposition(lambda: b"", lambda: 0.0))
    port = await health.start("0.0.0.0", 0)
    writers = []
    for _ in range(300):
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.9", 0))
        writers.append(writer)
    assert health._http.limiter.anonymous <= 256
    for writer in writers:
        writer.close()
    monkeypatch.setattr(limiter, "WINDOW_SECONDS", LONG_SECONDS)
    for _ in range(limiter.MAX_FAILED):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.abort()
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/livez") as response:
        assert response.status == 200
    await async_until(lambda: health._http.limiter.anonymous == 0, "unauthenticated connections are closed")
    await health.stop()


def test_requests_are_counted_by_known_pages() -> None:
    metrics = Metrics()
    for path in ("/metrics", "/metrics/", "/anything/else", "", "*"):
        metrics.record_read(path, 401)
    text = metrics.render().decode()
    assert 'https_requests_total{code="401",page="metrics"} 2.0' in text
    assert 'https_requests_total{code="401",page="other"} 3.0' in text
