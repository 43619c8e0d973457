"""Agents' streams over real TLS: what comes over one connection, what ends it, and what it costs the coordinator."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.operator.coordinator_world import LLAMA, World, heartbeat, membership, register, tls_of_server
from tests.testing.operator.stream_client import SWITCHING, StreamClient
from tests.testing.suite.timeouts import scaled
from trainium_contract.wire.stream import FrameKind, frame
from trainium_operator.coordinator import streams
from trainium_operator.coordinator.state import FULL_HEARTBEATS_PER_SECOND
from trainium_operator.coordinator.streams import LONGEST_FRAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GENEROUS = 20.0


class Site(World):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[StreamClient] = []

    async def ask(self, pod: str = "w-0", *, after: int = 0, **headers: str) -> StreamClient:
        """A connection on which a stream was requested."""
        client = await StreamClient.open(self.port, pod, trust=self.trust, after=after, **headers)
        self.opened.append(client)
        return client

    async def stream(self, pod: str = "w-0", *, after: int = 0) -> StreamClient:
        """An open stream over which the pod has registered."""
        client = await self.ask(pod, after=after)
        assert client.status == SWITCHING
        client.send(FrameKind.REGISTER, register(pod))
        kind, welcome = await client.next()
        assert kind == FrameKind.REGISTERED
        assert welcome["heartbeatSeconds"] == 1.0
        return client


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as found:
        yield found


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    site = Site()
    context, site.trust = tls_of_server()
    await site.start(context)
    try:
        yield site
    finally:
        await site.stop()
        for client in site.opened:
            client.close()
        await asyncio.sleep(0)


async def test_one_connection_carries_registration_heartbeats_and_memberships(site: Site) -> None:
    client = await site.stream()
    client.send(FrameKind.HEARTBEAT, heartbeat(generation=0, phase="Standby"))
    kind, reply = await client.next()
    assert (kind, reply["generation"]) == (FrameKind.HEARTBEAT_ACK, 0)
    assert abs(reply["time"] - time.time()) < scaled(GENEROUS)
    site.state.publish(LLAMA, membership(1))
    kind, received = await client.next()
    assert (kind, received["generation"], len(received["members"])) == (FrameKind.MEMBERSHIP, 1, 2)
    assert site.server.http.connections == 0, "nothing of HTTP is kept for it"


async def test_a_known_membership_is_not_sent_again_and_large_memberships_are_packed(site: Site) -> None:
    site.state.publish(LLAMA, membership(3, *(f"w-{each}" for each in range(200))))
    behind, abreast = await site.stream("w-0", after=2), await site.stream("w-1", after=3)
    kind, received = await behind.next()
    assert (kind, len(received["members"])) == (FrameKind.PACKED_MEMBERSHIP, 200)
    site.state.publish(LLAMA, membership(4, "w-0", "w-1"))
    assert (await behind.next())[1]["generation"] == (await abreast.next())[1]["generation"] == 4


async def test_an_agent_that_has_the_generation_before_receives_the_change_alone(site: Site) -> None:
    pods = [f"w-{each}" for each in range(200)]
    site.state.publish(LLAMA, membership(3, *pods))
    abreast = await site.stream("w-0", after=3)
    site.state.publish(LLAMA, membership(4, *pods[:-1], "w-900"))
    late, behind = await site.stream("w-2", after=3), await site.stream("w-3", after=2)
    for client, expected in (
        (abreast, FrameKind.MEMBERSHIP_CHANGE),
        (late, FrameKind.MEMBERSHIP_CHANGE),
        (behind, FrameKind.PACKED_MEMBERSHIP),
    ):
        kind, received = await client.next()
        assert (kind, received["generation"]) == (expected, 4)
    site.state.publish(LLAMA, membership(5, *pods[:-1], "w-901"))
    kind, received = await abreast.next()
    assert (kind, received["since"], received["generation"]) == (FrameKind.MEMBERSHIP_CHANGE, 4, 5)
    assert [(each["nodeRank"], each["podName"]) for each in received["members"]] == [(199, "w-901")]


async def test_where_most_members_differ_the_whole_membership_is_sent(site: Site) -> None:
    site.state.publish(LLAMA, membership(1))
    client = await site.stream(after=1)
    site.state.publish(LLAMA, membership(2, "w-5", "w-6"))
    assert (await client.next())[0] == FrameKind.MEMBERSHIP
    site.state.publish(LLAMA, membership(2, "w-5", "w-6"))
    site.state.publish(LLAMA, membership(3, "w-5", "w-7"))
    assert (await client.next())[0] == FrameKind.MEMBERSHIP_CHANGE


async def test_a_sign_of_life_updates_the_last_contact_and_is_not_answered(site: Site) -> None:
    client = await site.stream()
    client.send(FrameKind.HEARTBEAT, heartbeat(generation=0, phase="Standby"))
    assert (await client.next())[0] == FrameKind.HEARTBEAT_ACK
    before = site.state.agents(LLAMA)["uid-w-0"]
    client.send(FrameKind.KEEPALIVE)
    client.send(99, {"of": "a newer agent"})
    client.send(FrameKind.HEARTBEAT, heartbeat(generation=0, phase="Standby", ready=True))
    assert (await client.next())[0] == FrameKind.HEARTBEAT_ACK, "the reply to the heartbeat; nothing else was answered"
    after = site.state.agents(LLAMA)["uid-w-0"]
    assert after.last_seen > before.last_seen
    client.send(FrameKind.KEEPALIVE)
    for _ in range(200):
        if site.state.agents(LLAMA)["uid-w-0"].last_seen > after.last_seen:
            break
        await asyncio.sleep(0.05)
    assert site.state.agents(LLAMA)["uid-w-0"].last_seen > after.last_seen


async def test_heartbeats_may_be_the_rarer_the_more_agents_a_job_has(site: Site) -> None:
    clients = [await site.stream(f"w-{each}") for each in range(24)]
    clients[0].send(FrameKind.HEARTBEAT, heartbeat(generation=0, phase="Standby"))
    assert (await clients[0].next())[1]["fullHeartbeatSeconds"] == 24 / FULL_HEARTBEATS_PER_SECOND


async def test_an_older_generation_is_refused_and_the_stream_continues(site: Site) -> None:
    client = await site.stream()
    site.state.publish(LLAMA, membership(5))
    assert (await client.next())[1]["generation"] == 5
    client.send(FrameKind.HEARTBEAT, heartbeat(generation=4))
    kind, received = await client.next()
    assert (kind, received["status"], received["generation"]) == (FrameKind.ERROR, 409, 5)
    client.send(FrameKind.HEARTBEAT, heartbeat(generation=5))
    assert (await client.next())[0] == FrameKind.HEARTBEAT_ACK


@pytest.mark.parametrize(
    ("kind", "body", "status", "sentence"),
    [
        (FrameKind.HEARTBEAT, heartbeat("w-1", generation=0), 403, "the token was issued to pod w-0"),
        (FrameKind.REGISTER, register("w-1"), 403, "the token was issued to pod w-0"),
        (FrameKind.HEARTBEAT, {"podName": "w-0"}, 400, "the message is not valid"),
        (FrameKind.HEARTBEAT, heartbeat(generation=0) | {"job": "other"}, 403, "works for job llama, not for other"),
    ],
)
async def test_a_message_of_another_pod_or_an_invalid_one_ends_the_stream_with_an_error(
    site: Site, kind: FrameKind, body: Any, status: int, sentence: str
) -> None:
    client = await site.stream()
    client.send(kind, body)
    assert (await client.last_refusal())[0] == status
    again = await site.stream()
    again.send(kind, body)
    assert sentence in (await again.last_refusal())[1]


async def test_nothing_is_accepted_before_the_registration(site: Site) -> None:
    for kind, body in ((FrameKind.KEEPALIVE, None), (FrameKind.HEARTBEAT, heartbeat(generation=0))):
        client = await site.ask()
        client.send(kind, body)
        assert await client.last_refusal() == (400, "the first frame must be a registration")
    assert site.state.agent_count() == 0


async def test_a_frame_that_is_too_long_is_refused_by_its_first_bytes(site: Site) -> None:
    client = await site.stream()
    client.writer.write(bytes([FrameKind.HEARTBEAT]) + (LONGEST_FRAME + 1).to_bytes(4, "big"))
    assert (await client.last_refusal())[0] == 413


async def test_a_client_that_is_no_worker_or_sends_as_another_gets_no_stream(site: Site) -> None:
    for pod, headers, expected in (
        ("x-0", {}, 403),
        ("w-0", {"Authorization": "Bearer bad"}, 401),
        ("w-0", {"Authorization": "Bearer token-of-w-1"}, 403),
        ("w-0", {"Upgrade": "websocket"}, 426),
    ):
        assert (await site.ask(pod, **headers)).status == expected
    site.leading = False
    assert (await site.ask()).status == 503


async def test_a_deleted_pod_and_a_coordinator_that_stops_leading_end_streams(site: Site) -> None:
    deleted, led = await site.stream("w-0"), await site.stream("w-1")
    site.state.forget_pod(LLAMA, "uid-w-0")
    deleted.send(FrameKind.KEEPALIVE)
    assert (await deleted.last_refusal())[0] == 404
    site.leading = False
    led.send(FrameKind.KEEPALIVE)
    assert await led.last_refusal() == (503, "not leader")


async def test_streams_end_with_their_time_and_when_nothing_comes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    old, silent = await site.stream("w-0"), await site.stream("w-1")
    for each in site.server.streams.opened:
        if each.caller.pod_uid == "uid-w-0":
            each.ends = 0.0
        else:
            each.last_seen -= streams.SILENT_SECONDS + 1
    site.server.streams.sweep()
    assert await old.last_refusal() == (401, "this stream is over; open another")
    assert await silent.next() == (0, None)


async def test_a_stream_does_not_outlive_its_token(site: Site) -> None:
    async def review(_spec: dict[str, Any]) -> dict[str, Any]:
        return await World.review(site, {"token": "token-of-w-0"})

    site.server._authenticator._review = review  # type: ignore[attr-defined]
    claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 60}).encode()).decode().rstrip("=")
    assert (await site.ask(Authorization=f"Bearer head.{claims}.sign")).status == SWITCHING
    (opened,) = site.server.streams.opened
    assert opened.ends - asyncio.get_running_loop().time() <= 60


async def test_an_agent_that_reads_nothing_is_closed_before_unsent_bytes_add_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_UNSENT", 10_000)
    client = await site.stream()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    pods = [f"w-{each}" for each in range(2_000)]
    for generation in range(1, 400):
        site.state.publish(LLAMA, membership(generation, *pods[generation:]))
        await asyncio.sleep(0)
        if not site.server.streams.opened:
            break
    else:
        await asyncio.sleep(0.2)
    assert not site.server.streams.opened


async def test_the_last_error_is_sent_once_whatever_comes_after_it(site: Site) -> None:
    client = await site.stream()
    (opened,) = site.server.streams.opened
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(3):
        site.server.streams.close()
    for _ in range(3):
        opened.data_received(frame(FrameKind.HEARTBEAT, b"{}"))
    site.state.publish(LLAMA, membership(1))
    await asyncio.sleep(0)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert await client.last_refusal() == (503, "the coordinator is shutting down; try the next address")


async def test_a_coordinator_that_stops_redirects_streams(site: Site) -> None:
    client = await site.stream()
    stopping = asyncio.create_task(site.server.stop())
    assert (await client.last_refusal())[0] == 503
    await stopping
