"""Clients that flood the coordinator: bad tokens, silent connections, requests that never end.

A real coordinator over TLS, and the operator's own connections to an API server over HTTP.
"""

import asyncio
import socket
import ssl
import time
from asyncio import sslproto
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.api.http_api_server import HttpApiServer
from tests.testing.api.token_issuer import ISSUER
from tests.testing.operator.coordinator_fixture import LLAMA, heartbeat, register, tls_of_server
from tests.testing.operator.stream_client import StreamClient
from tests.testing.suite.timeouts import async_until
from trainium_contract.wire.stream import STREAM_PATH, FrameKind
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import LEASES
from trainium_operator.cluster.api.transport import connect
from trainium_operator.cluster.coordinator_adapters import KEYS_PATH, read_token_keys
from trainium_operator.cluster.lease import LeaseElector, LeaseTimes
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.coordinator.server import CoordinatorServer
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.coordinator.token_verifier import PAUSE_SECONDS, TokenVerifier
from trainium_operator.http import limiter, listener
from trainium_operator.main import LEASE_CONNECTIONS
from trainium_operator.plan.model.names import JobId

AGENTS = 12
GENEROUS = 60.0


class RecordingApiServer(HttpApiServer):
    """An API server that counts renewals of the Lease and requests for keys."""

    def __init__(self) -> None:
        super().__init__(FakeApiServer(time.time))
        self.renewals = 0
        self.key_reads = 0

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.renewals += request.method == "PUT" and "/leases/" in request.path
        self.key_reads += request.path == KEYS_PATH
        return await super()._answer(request)


class LeadingCoordinator:
    """A coordinator over TLS that holds the Lease, and its API server."""

    server: CoordinatorServer
    elector: LeaseElector
    api: RecordingApiServer
    url: str
    port: int
    trust: ssl.SSLContext

    def find_job(self, _namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
        return LLAMA if pod_name.startswith("w-") and pod_uid == f"uid-{pod_name}" else None

    @asynccontextmanager
    async def agents(self, address: str = "127.0.0.1") -> AsyncIterator["Agents"]:
        """Yield all agents, which connect from this address."""
        agents = Agents(self, address)
        try:
            yield agents
        finally:
            for stream in agents.streams:
                stream.close()

    async def open_stream(self, pod: str, address: str = "127.0.0.1") -> StreamClient:
        """Open a connection and request a stream with this pod's token."""
        return await StreamClient.open(self.port, pod, trust=self.trust, source=address)

    @asynccontextmanager
    async def hostile_client(self) -> AsyncIterator[Callable[[str, str], Awaitable[int]]]:
        """Yield `get(path, token)`, which sends a request from another address and returns its status."""
        connector = aiohttp.TCPConnector(ssl=self.trust, limit=0, local_addr=("127.0.0.9", 0))
        async with aiohttp.ClientSession(self.url, connector=connector) as session:

            async def get(path: str, bearer: str) -> int:
                headers = {"Authorization": f"Bearer {bearer}"}
                async with session.get(path, params={"podUid": "uid-w-99"}, headers=headers) as response:
                    await response.read()
                    return response.status

            yield get


class Agents:
    """Streams of all workers."""

    def __init__(self, coordinator: LeadingCoordinator, address: str) -> None:
        self._coordinator, self._address = coordinator, address
        self.streams: list[StreamClient] = []

    async def register(self) -> set[int]:
        """Register all and return their statuses."""
        self.streams = await asyncio.gather(
            *(self._coordinator.open_stream(f"w-{number}", self._address) for number in range(AGENTS))
        )
        return await self._exchange(FrameKind.REGISTER, register)

    async def send_heartbeats(self) -> set[int]:
        """Send one heartbeat of each and return their statuses."""
        return await self._exchange(FrameKind.HEARTBEAT, lambda pod: heartbeat(pod, generation=0, phase="Standby"))

    async def _exchange(self, kind: FrameKind, build_body: Callable[[str], Any]) -> set[int]:
        sent = (stream.exchange(kind, build_body(f"w-{number}")) for number, stream in enumerate(self.streams))
        return {status for status, _ in await asyncio.gather(*sent)}


@asynccontextmanager
async def run_coordinator(folder: Path) -> AsyncIterator[LeadingCoordinator]:
    """Start a leading coordinator, connected as in `main`."""
    coordinator = LeadingCoordinator()
    coordinator.api = RecordingApiServer()
    await coordinator.api.start()
    transport = await connect(str(coordinator.api.kubeconfig(folder)))
    lease_transport = transport.open_separate_pool(LEASE_CONNECTIONS)
    # Servers and the 300 clients share one processor here, so the Lease has more time than by default.
    times = LeaseTimes.of(duration=15.0, renew_deadline=10.0, retry=1.0)
    coordinator.elector = LeaseElector(Api(lease_transport), "system", "lease", "me", wall_clock=time.time, times=times)
    await coordinator.elector.acquire()
    holding = asyncio.create_task(coordinator.elector.hold())
    verifier = TokenVerifier(partial(read_token_keys, Api(transport)))
    coordinator.server = CoordinatorServer(
        CoordinatorState(time.time),
        Authenticator(verifier.verify, coordinator.find_job),
        is_serving=lambda: True,
        notify=lambda *_: None,
    )
    context, coordinator.trust = tls_of_server()
    coordinator.port = await coordinator.server.start("0.0.0.0", 0, context)
    coordinator.url = f"https://localhost:{coordinator.port}"
    try:
        yield coordinator
        assert not holding.done()
        assert coordinator.elector.leading
    finally:
        holding.cancel()
        await coordinator.server.stop()
        await lease_transport.close()
        await transport.close()
        await coordinator.api.stop()


async def test_bad_tokens_delay_neither_agents_nor_the_lease(tmp_path: Path) -> None:
    async with (
        run_coordinator(tmp_path) as coordinator,
        coordinator.agents() as agents,
        coordinator.hostile_client() as get,
    ):
        began = time.monotonic()
        assert await agents.register() == {200}
        number, claims = count(), ISSUER.claims("w-99")

        async def flood() -> None:
            while True:
                try:
                    await get(STREAM_PATH, ISSUER.sign(claims, kid=f"unknown-{next(number)}"))
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.05)

        floods = [asyncio.create_task(flood()) for _ in range(300)]
        before = coordinator.api.renewals
        answers: set[int] = set()
        while coordinator.api.renewals < before + 2 or next(number) < 2_000:
            answers |= await agents.send_heartbeats()
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        assert answers == {200}
        assert coordinator.elector.leading
        assert coordinator.elector.may_act()
        async with coordinator.agents("127.0.0.3") as late:
            assert await late.register() == {200}
        assert coordinator.api.key_reads <= 1 + (time.monotonic() - began) / PAUSE_SECONDS


async def test_refused_clients_have_to_connect_again_until_their_address_is_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "MAX_FAILED", 5)
    monkeypatch.setattr(limiter, "WINDOW_SECONDS", GENEROUS)
    async with (
        run_coordinator(tmp_path) as coordinator,
        coordinator.agents() as agents,
        coordinator.hostile_client() as get,
    ):
        assert await agents.register() == {200}
        stranger = ISSUER.token("x-99", "uid-w-99")  # valid, but of a pod that is no worker
        requests = [(STREAM_PATH, "bad"), (STREAM_PATH, stranger), ("/anything", "bad"), (STREAM_PATH, "")]
        assert [await get(*request) for request in (*requests, requests[0])] == [401, 403, 404, 401, 401]
        await async_until(lambda: coordinator.server.http.limiter.anonymous == 0, "refused connections are closed")
        with pytest.raises(aiohttp.ClientError):
            await get(STREAM_PATH, stranger)
        assert await agents.send_heartbeats() == {200}


async def test_silent_and_endless_connections_are_limited_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limiter, "MAX_ANONYMOUS", 100)
    monkeypatch.setattr(limiter, "ANONYMOUS_SECONDS", 3.0)
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 3.0)
    async with run_coordinator(tmp_path) as coordinator, coordinator.agents() as agents:
        assert await agents.register() == {200}
        writers = []
        for kind in range(250):
            _, writer = await asyncio.open_connection(
                "127.0.0.1",
                coordinator.port,
                ssl=coordinator.trust if kind % 2 else None,
                local_addr=("127.0.0.9", 0),
                server_hostname="localhost" if kind % 2 else None,
            )
            if kind % 2:
                writer.write(b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nContent-Length: 700000\r\n")
            writers.append(writer)
        assert coordinator.server.http.limiter.anonymous <= 100
        assert await agents.send_heartbeats() == {200}
        await async_until(
            lambda: coordinator.server.http.limiter.anonymous == 0, "unauthenticated connections are closed"
        )
        # The agents close the streams of their heartbeat themselves, and the server reads that a moment later.
        await async_until(lambda: coordinator.server.http.connections == 0, "no connection is left")
        assert await agents.send_heartbeats() == {200}
        for writer in writers:
            writer.transport.abort()


async def test_a_body_is_read_only_after_authentication(tmp_path: Path) -> None:
    async with run_coordinator(tmp_path) as coordinator:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", coordinator.port, ssl=coordinator.trust, server_hostname="localhost"
        )
        head = "GET /v1/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer bad\r\nContent-Length: 700000\r\n\r\n"
        writer.write(head.encode())  # and the body never comes
        assert (await reader.readline()).split()[1] == b"401"
        writer.transport.abort()


async def test_a_hanging_renewal_is_retried(tmp_path: Path) -> None:
    async with run_coordinator(tmp_path) as coordinator:
        cluster, hung = coordinator.api.cluster, []
        request = cluster.request

        async def hang_once(method: str, path: str, **rest: Any) -> Any:
            if method == "PUT" and not hung:
                hung.append(path)
                await asyncio.sleep(GENEROUS)
            return await request(method, path, **rest)

        cluster.request = hang_once  # type: ignore[method-assign]
        version = cluster.version
        await async_until(lambda: bool(hung) and cluster.version > version, "renewed by another try")
        assert cluster.get(LEASES, "system", "lease")["spec"]["holderIdentity"] == "me"


async def test_a_few_connections_are_accepted_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open connections would otherwise wait for all of their handshakes."""
    connection_count, turns, handshakes = 120, count(), Counter[int]()
    original_do_handshake = sslproto.SSLProtocol._do_handshake  # type: ignore[attr-defined]
    turn, anonymous = 0, [0]

    def count_handshake(protocol: sslproto.SSLProtocol) -> None:
        if not protocol._sslobj._sslobj.server_side:  # type: ignore[attr-defined]
            return original_do_handshake(protocol)
        handshakes[turn] += 1
        return original_do_handshake(protocol)

    async with run_coordinator(tmp_path) as coordinator, coordinator.agents() as agents:
        assert await agents.register() == {200}
        monkeypatch.setattr(sslproto.SSLProtocol, "_do_handshake", count_handshake)
        loop, ended = asyncio.get_running_loop(), False

        def next_turn() -> None:
            nonlocal turn
            turn = next(turns)
            anonymous.append(coordinator.server.http.limiter.anonymous)
            if not ended:
                loop.call_soon(next_turn)

        hello = _client_hello()
        sockets = [
            socket.create_connection(("127.0.0.1", coordinator.port)) for _ in range(connection_count)
        ]  # this blocks the loop
        for connection in sockets:
            connection.sendall(hello)
        loop.call_soon(next_turn)
        await async_until(lambda: handshakes.total() >= connection_count, "all handshakes have started")
        ended = True
        await asyncio.sleep(0)
        assert max(later - before for before, later in pairwise(anonymous)) <= listener.ACCEPTED_AT_ONCE
        assert max(handshakes.values()) <= 2 * listener.ACCEPTED_AT_ONCE, "those that start, and those that end"
        for connection in sockets:
            connection.close()


def _client_hello() -> bytes:
    """Return the first message of a TLS client."""
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()
