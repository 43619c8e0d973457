"""The coordinator over real HTTP(S), with an authenticator whose reviews are answered here."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ssl
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.testing.operator.coordinator_world import LLAMA, World, heartbeat, membership, register
from tests.testing.suite.patience import async_until, patient
from trainium_contract.wire.messages import Membership
from trainium_operator.coordinator.certificates import renewed, server_names
from trainium_operator.coordinator.server import LARGEST_BODY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    port = await made.server.start("127.0.0.1", 0, None)
    made.base = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as made.session:
        yield made
        await made.server.stop()


async def test_an_agent_registers_and_is_given_the_current_membership(world: World) -> None:
    world.state.publish(LLAMA, membership(3))
    status, answer = await world.post("/v1/register", register())
    assert status == 200
    assert answer["membership"]["generation"] == 3
    assert answer["heartbeatSeconds"] == 1.0
    assert world.notes == [("team", "llama", True)]
    await world.post("/v1/register", register())
    assert len(world.notes) == 1  # the same again is no news
    agent = world.state.agents(LLAMA)["uid-w-0"]
    assert agent.registration.rendezvous_port == 29500


async def test_a_long_poll_is_answered_the_moment_a_newer_generation_is_published(world: World) -> None:
    await world.post("/v1/register", register())
    world.state.publish(LLAMA, membership(1))
    assert (await world.poll(0))[0] == 200
    waiting = asyncio.create_task(world.poll(1, seconds=50))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    published = time.monotonic()
    world.state.publish(LLAMA, membership(2))
    status, answer = await waiting
    assert (status, answer["generation"]) == (200, 2)
    assert time.monotonic() - published < patient(5)


async def test_a_large_membership_comes_packed_by_the_long_poll_and_not_with_the_registration(world: World) -> None:
    large = membership(3, *(f"w-{rank}" for rank in range(1000)))
    world.state.publish(LLAMA, large)
    assert "membership" not in (await world.post("/v1/register", register()))[1]
    status, answer = await world.poll(0)
    assert status == 200
    assert Membership.model_validate(answer) == large
    query = {"after": "0", "podUid": "uid-w-0", "timeoutSeconds": "5"}
    headers = {"Authorization": "Bearer token-of-w-0"}
    url = f"{world.base}/v1/jobs/team/llama/membership"
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        async with session.get(url, params=query, headers={**headers, "Accept-Encoding": "identity"}) as response:
            plain = await response.read()
        async with session.get(url, params=query, headers={**headers, "Accept-Encoding": "gzip"}) as response:
            packed = await response.read()
    assert gzip.decompress(packed) == plain
    assert len(packed) < len(plain) / 4


async def test_a_long_poll_without_news_ends_empty(world: World) -> None:
    await world.post("/v1/register", register())
    world.state.publish(LLAMA, membership(1))
    assert await world.poll(1, seconds=0) == (204, None)


async def test_polls_that_began_together_do_not_end_together(world: World) -> None:
    await world.post("/v1/register", register())
    world.state.publish(LLAMA, membership(1))
    began = time.monotonic()

    async def held() -> float:
        assert await world.poll(1, seconds=2) == (204, None)
        return time.monotonic() - began

    ended = sorted(await asyncio.gather(*(held() for _ in range(10))))
    assert ended[0] >= 1.0
    assert ended[-1] - ended[0] > 0.02


async def test_a_heartbeat_is_kept_and_only_what_matters_is_told_at_once(world: World) -> None:
    world.state.publish(LLAMA, membership(1))
    await world.post("/v1/register", register())
    world.notes.clear()

    def step(number: int, **changes: Any) -> dict[str, Any]:
        return heartbeat(progress={"step": number, "samples": number}, **changes)

    assert await world.post("/v1/heartbeat", step(1)) == (200, {"protocol": 2, "generation": 1})
    assert world.notes.pop() == ("team", "llama", True)  # the first of all
    await world.post("/v1/heartbeat", step(2))
    assert world.notes.pop() == ("team", "llama", False)
    await world.post("/v1/heartbeat", step(2))
    assert world.notes == []
    await world.post("/v1/heartbeat", step(2, attempt=1, phase="Loading"))
    assert world.notes.pop() == ("team", "llama", True)
    await world.post("/v1/heartbeat", step(3, attempt=1, phase="Loading"))
    assert world.notes.pop() == ("team", "llama", True)  # the first new step ends an interruption
    agent = world.state.agents(LLAMA)["uid-w-0"]
    assert agent.heartbeat is not None
    assert agent.heartbeat.attempt == 1
    assert agent.progressed is not None


async def test_a_heartbeat_of_an_old_generation_is_refused_and_told_the_current_one(world: World) -> None:
    world.state.publish(LLAMA, membership(7))
    await world.post("/v1/register", register())
    before = world.state.agents(LLAMA)["uid-w-0"]
    status, answer = await world.post("/v1/heartbeat", heartbeat(generation=6))
    assert (status, answer["generation"]) == (409, 7)
    after = world.state.agents(LLAMA)["uid-w-0"]
    assert after.heartbeat is None
    assert after.heard >= before.heard


async def test_a_spare_that_lives_in_no_generation_is_never_too_old(world: World) -> None:
    world.state.publish(LLAMA, membership(7))
    await world.post("/v1/register", register("w-9"), "w-9")
    status, _ = await world.post("/v1/heartbeat", heartbeat("w-9", generation=3, phase="Standby", ready=True), "w-9")
    assert status == 200
    status, _ = await world.post("/v1/heartbeat", heartbeat("w-9", generation=3), "w-9")
    assert status == 409  # a zombie that still trains


async def test_after_a_restart_of_the_coordinator_agents_are_asked_to_register_again(world: World) -> None:
    status, answer = await world.post("/v1/heartbeat", heartbeat())
    assert status == 404
    assert "register" in answer["error"]
    assert (await world.poll(0))[0] == 404


async def test_the_previous_protocol_is_spoken_and_the_next_is_refused_with_a_sentence(world: World) -> None:
    world.state.publish(LLAMA, membership(1))
    status, answer = await world.post("/v1/register", register(protocol=1))
    assert status == 200
    assert answer["protocol"] == answer["membership"]["protocol"] == 1
    status, polled = await world.poll(0)
    assert (status, polled["protocol"]) == (200, 1)
    old = {key: value for key, value in heartbeat(protocol=1).items() if key not in ("restarts", "waitingFor")}
    assert await world.post("/v1/heartbeat", old) == (200, {"protocol": 1, "generation": 1})
    status, answer = await world.post("/v1/register", register(protocol=3))
    assert status == 400
    assert "protocol 3 is not supported" in answer["error"]


async def test_a_field_from_the_future_is_ignored(world: World) -> None:
    assert (await world.post("/v1/register", register(newField={"a": 1})))[0] == 200


@pytest.mark.parametrize("body", [{}, [], "text", register(podIp=None), register(rendezvousPort=0)])
async def test_a_message_that_cannot_be_read_gets_a_sentence(world: World, body: Any) -> None:
    status, answer = await world.post("/v1/register", body)
    assert status == 400
    assert answer["error"].startswith("the message is not valid")


async def test_a_message_that_is_too_large_is_refused(world: World) -> None:
    status, _ = await world.post("/v1/register", register(agentVersion="x" * LARGEST_BODY))
    assert status == 413


async def test_who_is_not_authenticated_gets_401_and_who_speaks_for_another_403(world: World) -> None:
    status, answer = await world.post("/v1/register", register(), token="forged")
    assert status == 401
    assert "token" in answer["error"]
    status, answer = await world.post("/v1/register", register("w-0"), pod="w-1")
    assert status == 403
    assert "speaks for another pod" in answer["error"]
    status, answer = await world.post("/v1/register", register(job="other"))
    assert status == 403
    assert "works for job llama, not for other" in answer["error"]
    assert world.state.agent_count() == 0


async def test_a_follower_answers_503_to_everything(world: World) -> None:
    world.leading = False
    assert await world.post("/v1/register", register()) == (503, {"error": "not leader"})
    assert (await world.poll(0))[0] == 503


async def test_a_registration_waits_for_a_follower_that_is_about_to_lead(world: World) -> None:
    world.leading, world.due = False, asyncio.Event()
    waiting = asyncio.create_task(world.post("/v1/register", register()))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert (await world.post("/v1/heartbeat", heartbeat()))[0] == 503
    world.leading = True
    world.due.set()
    assert (await waiting)[0] == 200
    assert world.state.agent_count() == 1


async def test_a_registration_does_not_wait_longer_than_its_agent_does(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainium_operator.coordinator.server.DUE_SECONDS", 0.1)
    world.leading, world.due = False, asyncio.Event()
    assert await world.post("/v1/register", register()) == (503, {"error": "not leader"})


async def test_an_api_server_that_is_away_is_503_for_who_is_not_known_yet(world: World) -> None:
    world.api_up = False
    assert (await world.post("/v1/register", register()))[0] == 503


async def test_unknown_paths_and_methods_get_a_sentence_too(world: World) -> None:
    assert (await world.post("/v2/register", {}))[0] == 404
    async with world.session.get(world.base + "/v1/register") as response:
        assert response.status == 405
        assert "error" in await response.json()


async def test_a_stopping_coordinator_ends_long_polls_with_503(world: World) -> None:
    await world.post("/v1/register", register())
    waiting = asyncio.create_task(world.poll(0, seconds=50))
    await asyncio.sleep(0.2)
    started = time.monotonic()
    await world.server.stop()
    status, answer = await waiting
    assert status == 503
    assert "shutting down" in answer["error"]
    assert time.monotonic() - started < patient(10)


async def test_workers_reach_it_over_tls_and_trust_only_the_bundle() -> None:
    world = World()
    names = server_names("coordinator", "system")
    material, other = renewed(None, names, time.time()), renewed(None, names, time.time())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with contextlib.ExitStack() as stack:
        import tempfile
        from pathlib import Path

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "c").write_bytes(material.server_cert)
        (folder / "k").write_bytes(material.server_key)
        context.load_cert_chain(folder / "c", folder / "k")
    port = await world.server.start("127.0.0.1", 0, context)
    world.base = f"https://127.0.0.1:{port}"
    trust = ssl.create_default_context(cadata=material.ca_bundle.decode())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as world.session:
        assert (await world.post("/v1/register", register()))[0] == 200
    distrust = ssl.create_default_context(cadata=other.ca_bundle.decode())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=distrust)) as world.session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await world.post("/v1/register", register())
    await world.server.stop()


async def test_a_poll_of_somebody_who_has_gone_is_given_up_at_once(world: World) -> None:
    await world.post("/v1/register", register())
    place = urlsplit(world.base)
    poll = (
        "GET /v1/jobs/team/llama/membership?after=0&podUid=uid-w-0&timeoutSeconds=60 HTTP/1.1\r\n"
        f"Host: {place.netloc}\r\nAuthorization: Bearer token-of-w-0\r\n\r\n"
    )
    for _ in range(20):
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(poll.encode())
        await asyncio.sleep(0.02)  # the server is in this loop: it waits for news by then
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    await world.session.close()
    await async_until(lambda: world.server.reception.connections == 0, "connections of those who have gone stay", 5)
