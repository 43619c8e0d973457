"""Streams of agents over real TLS: frames, memberships, errors and limits."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.testing.api.token_issuer import ISSUER
from tests.testing.operator.coordinator_fixture import (
    LLAMA,
    CoordinatorFixture,
    heartbeat,
    membership,
    register,
    tls_of_server,
)
from tests.testing.operator.stream_client import SWITCHING, StreamClient
from tests.testing.suite.timeouts import scaled
from trainium_contract.wire.stream import FrameKind, encode_frame
from trainium_operator.coordinator import streams
from trainium_operator.coordinator.state import FULL_HEARTBEATS_PER_SECOND
from trainium_operator.coordinator.streams import MAX_FRAME_BYTES

GENEROUS = 20.0


class StreamCoordinator(CoordinatorFixture):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[StreamClient] = []

    async def open_stream(self, pod: str = "w-0", *, after: int = 0, **headers: str) -> StreamClient:
        """Open a connection and request a stream."""
        client = await StreamClient.open(self.port, pod, trust=self.trust, after=after, **headers)
        self.opened.append(client)
        return client

    async def open_registered_stream(self, pod: str = "w-0", *, after: int = 0) -> StreamClient:
        """Open a stream and register the pod."""
        client = await self.open_stream(pod, after=after)
        assert client.status == SWITCHING
        client.send(FrameKind.REGISTER, register(pod))
        kind, welcome = await client.next()
        assert kind == FrameKind.REGISTERED
        assert welcome["heartbeatSeconds"] == 1.0
        return client


@pytest.fixture
async def coordinator() -> AsyncIterator[StreamCoordinator]:
    coordinator = StreamCoordinator()
    context, coordinator.trust = tls_of_server()
    await coordinator.start(context)
    try:
        yield coordinator
    finally:
        await coordinator.stop()
        for client in coordinator.opened:
            client.close()
        await asyncio.sleep(0)


async def test_one_connection_carries_registration_heartbeats_and_memberships(coordinator: StreamCoordinator) -> None:
    client = await coordinator.open_registered_stream()
    client.send(FrameKind.HEARTBEAT, heartbeat(generation=0, phase="Standby"))
    kind, reply = await client.next()
    assert (kind, reply["generation"]) == (FrameKind.HEARTBEAT_ACK, 0)
    assert abs(reply["time"] - time.time()) < scaled(GENEROUS)
    coordinator.state.publish(LLAMA, membership(1))
    kind, received = await client.next()
    assert (kind, received["generation"], len(received["members"])) == (FrameKind.MEMBERSHIP, 1, 2)
    assert coordinator.server.http.connections == 0, "no HTTP connection is kept for it"


async def test_a_pod_that_is_no_member_receives_what_ranks_of_a_member_import(coordinator: StreamCoordinator) -> None:
    coordinator.state.publish(LLAMA, membership(1, "w-0"))
    first = await coordinator.open_registered_stream("w-0", after=1)
    spare = await coordinator.open_registered_stream("w-1", after=1)
    first.send(FrameKind.IMPORTED_MODULES, {"protocol": 2, "modules": ["wave", "torch.optim"]})
    later = await coordinator.open_registered_stream("w-2", after=1)
    for client in (spare, later):
        kind, received = await client.next()
        assert (kind, received["modules"]) == (FrameKind.IMPORTED_MODULES, ["wave", "torch.optim"])
    coordinator.state.publish(LLAMA, membership(2, "w-0", "w-1"))
    assert [(await client.next())[0] for client in (first, spare)] == [FrameKind.MEMBERSHIP_CHANGE] * 2, "sent once"


async def test_a_known_membership_is_not_sent_and_a_large_one_is_packed(coordinator: StreamCoordinator) -> None:
    coordinator.state.publish(LLAMA, membership(3, *(f"w-{number}" for number in range(200))))
    stale, current = (
        await coordinator.open_registered_stream("w-0", after=2),
        await coordinator.open_registered_stream("w-1", after=3),
    )
    kind, received = await stale.next()
    assert (kind, len(received["members"])) == (FrameKind.PACKED_MEMBERSHIP, 200)
    coordinator.state.publish(LLAMA, membership(4, "w-0", "w-1"))
    assert (await stale.next())[1]["generation"] == (await current.next())[1]["generation"] == 4


async def test_an_agent_with_the_previous_generation_receives_the_change(coordinator: StreamCoordinator) -> None:
    pods = [f"w-{number}" for number in range(200)]
    coordinator.state.publish(LLAMA, membership(3, *pods))
    current = await coordinator.open_registered_stream("w-0", after=3)
    coordinator.state.publish(LLAMA, membership(4, *pods[:-1], "w-900"))
    late, stale = (
        await coordinator.open_registered_stream("w-2", after=3),
        await coordinator.open_registered_stream("w-3", after=2),
    )
    for client, expected in (
        (current, FrameKind.MEMBERSHIP_CHANGE),
        (late, FrameKind.MEMBERSHIP_CHANGE),
        (stale, FrameKind.PACKED_MEMBERSHIP),
    ):
        kind, received = await client.next()
        assert (kind, received["generation"]) == (expected, 4)
    coordinator.state.publish(LLAMA, membership(5, *pods[:-1], "w-901"))
    kind, received = await current.next()
    assert (kind, received["since"], received["generation"]) == (FrameKind.MEMBERSHIP_CHANGE, 4, 5)
    assert [(member["nodeRank"], member["podName"]) for member in received["members"]] == [(199, "w-901")]


async def test_a_membership_with_mostly_new_members_is_sent_completely(coordinator: StreamCoordinator) -> None:
    coordinator.state.publish(LLAMA, membership(1))
    client = await coordinator.open_registered_stream(after=1)
    coordinator.state.publish(LLAMA, membership(2, "w-5", "w-6"))
    assert (await client.next())[0] == FrameKind.MEMBERSHIP
    coordinator.state.publish(LLAMA, membership(2, "w-5", "w-6"))
    coordinator.state.publish(LLAMA, membership(3, "w-5", "w-7"))
    assert (await client.next())[0] == FrameKind.MEMBERSHIP_CHANGE


async def test_a_keepalive_updates_the_last_contact_without_a_reply(coordinator: StreamCoordinator) -> None:
    client = await coordinator.open_registered_stream()
    client.send(FrameKind.HEARTBEAT, heartbeat(generation=0, phase="Standby"))
    assert (await client.next())[0] == FrameKind.HEARTBEAT_ACK
    before = coordinator.state.list_agents(LLAMA)["uid-w-0"]
    client.send(FrameKind.KEEPALIVE)
    client.send(99, {"of": "a newer agent"})
    client.send(FrameKind.HEARTBEAT, heartbeat(generation=0, phase="Standby", ready=True))
    assert (await client.next())[0] == FrameKind.HEARTBEAT_ACK, "the reply to the heartbeat; nothing else was answered"
    after = coordinator.state.list_agents(LLAMA)["uid-w-0"]
    assert after.last_seen > before.last_seen
    client.send(FrameKind.KEEPALIVE)
    for _ in range(200):
        if coordinator.state.list_agents(LLAMA)["uid-w-0"].last_seen > after.last_seen:
            break
        await asyncio.sleep(0.05)
    assert coordinator.state.list_agents(LLAMA)["uid-w-0"].last_seen > after.last_seen


async def test_the_heartbeat_interval_grows_with_the_number_of_agents(coordinator: StreamCoordinator) -> None:
    clients = [await coordinator.open_registered_stream(f"w-{number}") for number in range(24)]
    clients[0].send(FrameKind.HEARTBEAT, heartbeat(generation=0, phase="Standby"))
    assert (await clients[0].next())[1]["fullHeartbeatSeconds"] == 24 / FULL_HEARTBEATS_PER_SECOND


async def test_an_older_generation_is_refused_and_the_stream_continues(coordinator: StreamCoordinator) -> None:
    client = await coordinator.open_registered_stream()
    coordinator.state.publish(LLAMA, membership(5))
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
async def test_a_forged_or_invalid_message_ends_the_stream(
    coordinator: StreamCoordinator, kind: FrameKind, body: Any, status: int, sentence: str
) -> None:
    client = await coordinator.open_registered_stream()
    client.send(kind, body)
    assert (await client.last_refusal())[0] == status
    again = await coordinator.open_registered_stream()
    again.send(kind, body)
    assert sentence in (await again.last_refusal())[1]


async def test_nothing_is_accepted_before_the_registration(coordinator: StreamCoordinator) -> None:
    for kind, body in ((FrameKind.KEEPALIVE, None), (FrameKind.HEARTBEAT, heartbeat(generation=0))):
        client = await coordinator.open_stream()
        client.send(kind, body)
        assert await client.last_refusal() == (400, "the first frame must be a registration")
    assert coordinator.state.count_agents() == 0


async def test_an_oversized_frame_is_refused_by_its_head(coordinator: StreamCoordinator) -> None:
    client = await coordinator.open_registered_stream()
    client.writer.write(bytes([FrameKind.HEARTBEAT]) + (MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    assert (await client.last_refusal())[0] == 413


async def test_a_client_without_a_valid_token_gets_no_stream(coordinator: StreamCoordinator) -> None:
    for pod, headers, expected in (
        ("x-0", {}, 403),
        ("w-0", {"Authorization": "Bearer bad"}, 401),
        ("w-0", {"Authorization": f"Bearer {ISSUER.token('w-1')}"}, 403),
        ("w-0", {"Upgrade": "websocket"}, 426),
    ):
        assert (await coordinator.open_stream(pod, **headers)).status == expected
    coordinator.leading = False
    assert (await coordinator.open_stream()).status == 503


async def test_streams_end_with_their_pod_and_with_the_leadership(coordinator: StreamCoordinator) -> None:
    deleted, led = await coordinator.open_registered_stream("w-0"), await coordinator.open_registered_stream("w-1")
    coordinator.state.forget_pod(LLAMA, "uid-w-0")
    deleted.send(FrameKind.KEEPALIVE)
    assert (await deleted.last_refusal())[0] == 404
    coordinator.leading = False
    led.send(FrameKind.KEEPALIVE)
    assert await led.last_refusal() == (503, "not leader")


async def test_old_and_silent_streams_are_closed(
    coordinator: StreamCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, silent = await coordinator.open_registered_stream("w-0"), await coordinator.open_registered_stream("w-1")
    for stream in coordinator.server.streams.opened:
        if stream.caller.pod_uid == "uid-w-0":
            stream.expires_at = 0.0
        else:
            stream.last_seen -= streams.SILENT_SECONDS + 1
    coordinator.server.streams.sweep()
    assert await old.last_refusal() == (401, "this stream is over; open another")
    assert await silent.next() == (0, None)


async def test_a_stream_ends_with_its_token(coordinator: StreamCoordinator) -> None:
    token = ISSUER.token("w-0", exp=time.time() + 60)
    assert (await coordinator.open_stream(Authorization=f"Bearer {token}")).status == SWITCHING
    (opened,) = coordinator.server.streams.opened
    assert opened.expires_at - asyncio.get_running_loop().time() <= 60


async def test_the_stream_of_an_agent_that_does_not_read_is_closed(
    coordinator: StreamCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_UNSENT", 10_000)
    client = await coordinator.open_registered_stream()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    (opened,) = coordinator.server.streams.opened
    assert opened._transport is not None
    for transport in (client.writer, opened._transport):  # else the kernel takes megabytes before the stream keeps any
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, buffer, 4096)
    pods = [f"w-{number}" for number in range(2_000)]
    for generation in range(1, 400):
        coordinator.state.publish(LLAMA, membership(generation, *pods[generation:]))
        await asyncio.sleep(0)
        if not coordinator.server.streams.opened:
            break
    else:
        await asyncio.sleep(0.2)
    assert not coordinator.server.streams.opened


async def test_the_last_error_is_sent_once(coordinator: StreamCoordinator) -> None:
    client = await coordinator.open_registered_stream()
    (opened,) = coordinator.server.streams.opened
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(3):
        coordinator.server.streams.close()
    for _ in range(3):
        opened.data_received(encode_frame(FrameKind.HEARTBEAT, b"{}"))
    coordinator.state.publish(LLAMA, membership(1))
    await asyncio.sleep(0)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert await client.last_refusal() == (503, "the coordinator is shutting down; try the next address")


async def test_a_stopping_coordinator_sends_503(coordinator: StreamCoordinator) -> None:
    client = await coordinator.open_registered_stream()
    stopping = asyncio.create_task(coordinator.server.stop())
    assert (await client.last_refusal())[0] == 503
    await stopping
