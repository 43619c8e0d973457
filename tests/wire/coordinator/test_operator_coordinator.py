"""The coordinator over real connections, with an authenticator whose reviews are answered here."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.testing.operator.coordinator_world import LLAMA, World, heartbeat, membership, register
from trainium_contract.wire.stream import FrameKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await made.stop()


async def test_an_agent_registers_and_is_given_the_current_membership(world: World) -> None:
    world.state.publish(LLAMA, membership(3))
    status, answer = await world.send(FrameKind.REGISTER, register())
    assert status == 200
    assert answer["membership"]["generation"] == 3
    assert answer["heartbeatSeconds"] == 1.0
    assert abs(answer["time"] - time.time()) < 60
    assert world.notes == [("team", "llama", True)]
    await world.send(FrameKind.REGISTER, register())
    assert len(world.notes) == 1  # the same again is no news
    agent = world.state.agents(LLAMA)["uid-w-0"]
    assert agent.registration.rendezvous_port == 29500


async def test_a_heartbeat_is_kept_and_only_important_ones_notify_at_once(world: World) -> None:
    world.state.publish(LLAMA, membership(1))
    await world.send(FrameKind.REGISTER, register())
    world.notes.clear()

    def step(number: int, **changes: Any) -> dict[str, Any]:
        return heartbeat(progress={"step": number, "samples": number}, **changes)

    status, answer = await world.send(FrameKind.HEARTBEAT, step(1))
    assert (status, answer["generation"]) == (200, 1)
    assert world.notes.pop() == ("team", "llama", True)  # the first of all
    await world.send(FrameKind.HEARTBEAT, step(2))
    assert world.notes.pop() == ("team", "llama", False)
    await world.send(FrameKind.HEARTBEAT, step(2))
    assert world.notes == []
    await world.send(FrameKind.HEARTBEAT, step(2, attempt=1, phase="Loading"))
    assert world.notes.pop() == ("team", "llama", True)
    await world.send(FrameKind.HEARTBEAT, step(3, attempt=1, phase="Loading"))
    assert world.notes.pop() == ("team", "llama", True)  # the first new step ends an interruption
    agent = world.state.agents(LLAMA)["uid-w-0"]
    assert agent.heartbeat is not None
    assert agent.heartbeat.attempt == 1
    assert agent.progressed is not None


async def test_a_spare_that_lives_in_no_generation_is_never_too_old(world: World) -> None:
    world.state.publish(LLAMA, membership(7))
    await world.send(FrameKind.REGISTER, register("w-9"), "w-9")
    status, _ = await world.send(
        FrameKind.HEARTBEAT, heartbeat("w-9", generation=3, phase="Standby", ready=True), "w-9"
    )
    assert status == 200
    status, _ = await world.send(FrameKind.HEARTBEAT, heartbeat("w-9", generation=3), "w-9")
    assert status == 409  # a zombie that still trains


async def test_an_unauthenticated_sender_gets_401_and_one_that_sends_as_another_403(world: World) -> None:
    status, answer = await world.send(FrameKind.REGISTER, register(), token="forged")
    assert status == 401
    assert "token" in answer["error"]
    status, answer = await world.send(FrameKind.REGISTER, register("w-0"), pod="w-1")
    assert status == 403
    assert "speaks for another pod" in answer["error"]
    status, answer = await world.send(FrameKind.REGISTER, register(job="other"))
    assert status == 403
    assert "works for job llama, not for other" in answer["error"]
    assert world.state.agent_count() == 0


async def test_a_registration_waits_for_a_follower_that_is_about_to_lead(world: World) -> None:
    world.leading, world.serving_event = False, asyncio.Event()
    waiting = asyncio.create_task(world.send(FrameKind.REGISTER, register()))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    world.leading = True
    world.serving_event.set()
    assert (await waiting)[0] == 200
    assert world.state.agent_count() == 1


async def test_a_registration_does_not_wait_longer_than_its_agent_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainium_operator.coordinator.server.PENDING_LEAD_SECONDS", 0.1)
    world.leading, world.serving_event = False, asyncio.Event()
    assert await world.send(FrameKind.REGISTER, register()) == (503, {"error": "not leader"})


async def test_an_api_server_that_is_away_is_503_for_who_is_not_known_yet(world: World) -> None:
    world.api_up = False
    assert (await world.send(FrameKind.REGISTER, register()))[0] == 503


async def test_unknown_paths_and_methods_get_a_sentence_too(world: World) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{world.port}") as session:
        for method, path, status in (("POST", "/v2/stream", 404), ("POST", "/v1/stream", 405)):
            async with session.request(method, path) as response:
                assert response.status == status
                assert "error" in await response.json()


async def test_another_protocol_is_refused_with_a_sentence(world: World) -> None:
    status, answer = await world.send(FrameKind.REGISTER, register(protocol=3))
    assert status == 400
    assert "protocol 3 is not supported" in answer["error"]
