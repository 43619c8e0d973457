"""The agent's own client at the real coordinator, over a stream."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.testing.operator.coordinator_world import LLAMA, World, membership
from tests.testing.suite.timeouts import async_until
from trainium_agent.coordinator import client as client_module
from trainium_agent.coordinator.client import CoordinatorClient
from trainium_agent.settings import AgentSettings, Endpoint
from trainium_contract.wire.messages import HeartbeatRequest, Membership, Progress, WorkerPhase
from trainium_contract.wire.stream import FrameKind
from trainium_operator.coordinator import state, streams
from trainium_operator.coordinator.certificates import renew_material
from trainium_operator.http.tls import ServerTls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest


class Site(World):
    """A coordinator over TLS, what came to it, and one agent's client."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[int] = []
        self.answers: list[int] = []
        self.memberships: list[Membership] = []
        self.acknowledged: list[HeartbeatRequest] = []
        self.welcomes = 0
        self.deleted = asyncio.Event()
        self.step = 0
        self.phase = WorkerPhase.TRAINING
        self.client: CoordinatorClient

    def heartbeat(self) -> HeartbeatRequest:
        self.step += 1
        known = self.memberships[-1].generation if self.memberships else 0
        return HeartbeatRequest(
            namespace="team",
            job="llama",
            pod_name="w-0",
            pod_uid="uid-w-0",
            generation=known,
            phase=self.phase if known else WorkerPhase.STANDBY,
            progress=Progress(step=self.step + 10, resume_step=1) if known else None,
        )

    def welcomed(self, _theirs: float, _asked: float, _answered: float) -> None:
        self.welcomes += 1


@asynccontextmanager
async def serving(folder: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    site, tls = Site(), ServerTls()
    material = renew_material(None, ("localhost",), time.time())
    tls.load(material.server_cert, material.server_key)
    (folder / "ca.crt").write_bytes(material.ca_bundle)
    (folder / "token").write_text("token-of-w-0")
    taken, sent = streams.Stream._handle, streams.Stream._send

    def take(stream: streams.Stream, kind: int, payload: bytes) -> None:
        site.frames.append(kind)
        taken(stream, kind, payload)

    def send(stream: streams.Stream, kind: FrameKind, payload: bytes) -> int:
        site.answers.append(kind)
        return sent(stream, kind, payload)

    patch.setattr(streams.Stream, "_handle", take)
    patch.setattr(streams.Stream, "_send", send)
    port = await site.server.start("127.0.0.1", 0, tls.context)
    settings = AgentSettings(
        coordinator=(Endpoint("localhost", port),),
        namespace="team",
        job="llama",
        pod_name="w-0",
        pod_uid="uid-w-0",
        pod_ip="127.0.0.2",
        node_name="n",
        processes_per_node=1,
        max_in_place_restarts=3,
        grace_seconds=5,
        config_path=folder / "trainer.yaml",
        memory_directory=folder,
        token_path=folder / "token",
        ca_path=folder / "ca.crt",
    )
    site.client = CoordinatorClient(
        settings,
        29500,
        "1",
        heartbeat=site.heartbeat,
        on_membership=site.memberships.append,
        on_acknowledged=site.acknowledged.append,
        on_job_deleted=site.deleted.set,
        on_coordinator_time=site.welcomed,
    )
    running = asyncio.create_task(site.client.run())
    try:
        yield site
        assert not running.done() or site.deleted.is_set()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await site.server.stop()


async def test_an_idle_agent_sends_signs_of_life_and_sometimes_full_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FULL_HEARTBEATS_PER_SECOND", 1 / 4.0)  # one agent: each four seconds
    async with serving(tmp_path, monkeypatch) as site:
        site.state.publish(LLAMA, membership(1))
        # How many of the one come before so many of the other is random.
        await async_until(lambda: site.frames.count(FrameKind.HEARTBEAT) >= 4, "heartbeats in full")
        await async_until(lambda: site.frames.count(FrameKind.KEEPALIVE) >= 4, "signs of life that say nothing else")
        assert site.memberships[0].generation == 1
        assert site.frames.count(FrameKind.REGISTER) == 1
        view = site.state.agents(LLAMA)["uid-w-0"]
        assert view.heartbeat is not None
        assert view.heartbeat.progress is not None
        assert site.server.http.connections == 0, "one connection, and it is the stream's"
        assert site.acknowledged


async def test_a_change_is_sent_at_once_and_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FULL_HEARTBEATS_PER_SECOND", 1 / 1000.0)
    async with serving(tmp_path, monkeypatch) as site:
        site.state.publish(LLAMA, membership(1))
        await async_until(lambda: FrameKind.KEEPALIVE in site.frames, "it is at rest")
        site.phase = WorkerPhase.FINISHED
        site.client.heartbeat_now()
        await async_until(
            lambda: any(each.phase is WorkerPhase.FINISHED for each in site.acknowledged), "the end is heard"
        )
        site.state.publish(LLAMA, membership(2))
        await async_until(lambda: site.memberships[-1].generation == 2, "a membership comes by itself")


async def test_an_agent_whose_stream_ends_comes_again_and_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch) as site:
        site.state.publish(LLAMA, membership(1))
        await async_until(lambda: len(site.acknowledged) >= 2, "it talks")
        for stream in list(site.server.streams.opened):
            stream.abort()
        site.state.publish(LLAMA, membership(2))
        await async_until(lambda: site.memberships[-1].generation == 2, "what came meanwhile")
        assert site.frames.count(FrameKind.REGISTER) == 2
        site.state.forget_pod(LLAMA, "uid-w-0")
        site.state.publish(LLAMA, membership(3, "w-1"))  # this coordinator knows it no more
        await async_until(lambda: site.frames.count(FrameKind.REGISTER) == 3, "it registers again")


async def test_a_generation_is_followed_from_what_is_another_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = [
        membership(1, "w-0", "w-1", "w-2"),
        membership(2, "w-0", "w-3", "w-2"),
        membership(4, "w-0", "w-3"),
        membership(5, "w-0", "w-3", "w-2"),
    ]
    async with serving(tmp_path, monkeypatch) as site:
        for each in published:
            site.state.publish(LLAMA, each)
            await async_until(lambda each=each: each in site.memberships, f"generation {each.generation}")  # type: ignore[misc]
        assert site.memberships == published
        assert site.answers.count(FrameKind.MEMBERSHIP_CHANGE) == 3
        assert site.frames.count(FrameKind.REGISTER) == 1


async def test_a_change_that_does_not_fit_is_not_followed_and_the_whole_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch) as site:
        site.state.publish(LLAMA, membership(1, "w-0", "w-1", "w-2"))
        await async_until(lambda: bool(site.memberships), "it knows the first generation")
        site.client._newest = membership(1, "w-0", "w-8", "w-9")
        for generation in (2, 3):
            site.state.publish(LLAMA, membership(generation, "w-0", "w-1", f"w-{generation + 1}"))
            await async_until(lambda g=generation: site.memberships[-1].generation == g, "the whole")  # type: ignore[misc]
        assert site.memberships[1:] == [membership(2, "w-0", "w-1", "w-3"), membership(3, "w-0", "w-1", "w-4")]
        assert site.answers.count(FrameKind.MEMBERSHIP_CHANGE) == 2, "one that does not fit, one that does"


async def test_a_stream_is_reopened_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_STREAM_SECONDS", (0.3, 0.5))
    async with serving(tmp_path, monkeypatch) as site:
        site.state.publish(LLAMA, membership(1))
        await async_until(lambda: site.frames.count(FrameKind.REGISTER) >= 4, "streams follow each other")
        assert site.welcomes >= 4
        assert [each.generation for each in site.memberships] == [1]


async def test_an_agent_learns_within_a_second_that_its_job_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, monkeypatch) as site:
        site.state.publish(LLAMA, membership(1))
        await async_until(lambda: bool(site.acknowledged), "it talks")
        site.orphaned.add("w-0")
        site.state.forget_job(LLAMA)
        await async_until(site.deleted.is_set, "it learns that its job was deleted")
