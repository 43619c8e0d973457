"""The coordinator over real connections: registration, heartbeats, leadership, errors."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.testing.operator.coordinator_fixture import LLAMA, CoordinatorFixture, heartbeat, membership, register
from trainium_contract.wire.stream import FrameKind


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorFixture]:
    coordinator = CoordinatorFixture()
    await coordinator.start()
    yield coordinator
    await coordinator.stop()


async def test_a_registration_returns_the_current_membership(coordinator: CoordinatorFixture) -> None:
    coordinator.state.publish(LLAMA, membership(3))
    status, answer = await coordinator.send(FrameKind.REGISTER, register())
    assert status == 200
    assert answer["membership"]["generation"] == 3
    assert answer["heartbeatSeconds"] == 1.0
    assert abs(answer["time"] - time.time()) < 60
    assert coordinator.notifications == [("team", "llama", True)]
    await coordinator.send(FrameKind.REGISTER, register())
    assert len(coordinator.notifications) == 1  # an equal registration notifies nobody
    agent = coordinator.state.list_agents(LLAMA)["uid-w-0"]
    assert agent.registration.rendezvous_port == 29500


async def test_only_important_heartbeats_notify_at_once(coordinator: CoordinatorFixture) -> None:
    coordinator.state.publish(LLAMA, membership(1))
    await coordinator.send(FrameKind.REGISTER, register())
    coordinator.notifications.clear()

    def step(number: int, **changes: Any) -> dict[str, Any]:
        return heartbeat(progress={"step": number, "samples": number}, **changes)

    status, answer = await coordinator.send(FrameKind.HEARTBEAT, step(1))
    assert (status, answer["generation"]) == (200, 1)
    assert coordinator.notifications.pop() == ("team", "llama", True)  # the first of all
    await coordinator.send(FrameKind.HEARTBEAT, step(2))
    assert coordinator.notifications.pop() == ("team", "llama", False)
    await coordinator.send(FrameKind.HEARTBEAT, step(2))
    assert coordinator.notifications == []
    await coordinator.send(FrameKind.HEARTBEAT, step(2, attempt=1, phase="Loading"))
    assert coordinator.notifications.pop() == ("team", "llama", True)
    await coordinator.send(FrameKind.HEARTBEAT, step(3, attempt=1, phase="Loading"))
    assert coordinator.notifications.pop() == ("team", "llama", True)  # the first new step ends an interruption
    agent = coordinator.state.list_agents(LLAMA)["uid-w-0"]
    assert agent.heartbeat is not None
    assert agent.heartbeat.attempt == 1
    assert agent.progressed_at is not None


async def test_a_heartbeat_of_a_spare_is_never_too_old(coordinator: CoordinatorFixture) -> None:
    coordinator.state.publish(LLAMA, membership(7))
    await coordinator.send(FrameKind.REGISTER, register("w-9"), "w-9")
    status, _ = await coordinator.send(
        FrameKind.HEARTBEAT, heartbeat("w-9", generation=3, phase="Standby", ready=True), "w-9"
    )
    assert status == 200
    status, _ = await coordinator.send(FrameKind.HEARTBEAT, heartbeat("w-9", generation=3), "w-9")
    assert status == 409  # a zombie that still trains


async def test_a_registration_waits_for_a_pending_leader(coordinator: CoordinatorFixture) -> None:
    coordinator.leading, coordinator.serving_event = False, asyncio.Event()
    waiting = asyncio.create_task(coordinator.send(FrameKind.REGISTER, register()))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    coordinator.leading = True
    coordinator.serving_event.set()
    assert (await waiting)[0] == 200
    assert coordinator.state.count_agents() == 1


async def test_a_registration_waits_no_longer_than_its_limit(
    coordinator: CoordinatorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainium_operator.coordinator.server.PENDING_LEAD_SECONDS", 0.1)
    coordinator.leading, coordinator.serving_event = False, asyncio.Event()
    assert await coordinator.send(FrameKind.REGISTER, register()) == (503, {"error": "not leader"})


async def test_agents_register_during_an_outage_once_the_keys_are_known(
    coordinator: CoordinatorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainium_operator.coordinator.token_verifier.PAUSE_SECONDS", 0.0)
    coordinator.api_up = False
    assert (await coordinator.send(FrameKind.REGISTER, register()))[0] == 503
    coordinator.api_up = True
    await coordinator.register("w-0")
    coordinator.api_up = False
    await coordinator.register("w-1")


async def test_unknown_paths_and_methods_have_an_error_message(coordinator: CoordinatorFixture) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{coordinator.port}") as session:
        for method, path, status in (("POST", "/v2/stream", 404), ("POST", "/v1/stream", 405)):
            async with session.request(method, path) as response:
                assert response.status == status
                assert "error" in await response.json()


async def test_another_protocol_version_is_refused(coordinator: CoordinatorFixture) -> None:
    status, answer = await coordinator.send(FrameKind.REGISTER, register(protocol=3))
    assert status == 400
    assert "protocol 3 is not supported" in answer["error"]
