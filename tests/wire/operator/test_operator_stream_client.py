"""The agent's own client at the real coordinator, over a stream."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.testing.api.token_issuer import ISSUER
from tests.testing.operator import wire_messages
from tests.testing.operator.agent_settings import agent_settings
from tests.testing.operator.coordinator_fixture import LLAMA, CoordinatorFixture, membership
from tests.testing.suite.timeouts import async_until
from trainium_agent.coordinator import client as client_module
from trainium_agent.coordinator.client import Callbacks, CoordinatorClient
from trainium_agent.settings import Endpoint
from trainium_contract.wire.messages import HeartbeatRequest, Membership, Progress, WorkerPhase
from trainium_contract.wire.stream import FrameKind
from trainium_operator.coordinator import state, streams
from trainium_operator.coordinator.certificates import renew_material
from trainium_operator.http.tls import ServerTls


class RecordingCoordinator(CoordinatorFixture):
    """A coordinator over TLS with records of its frames, and the client of one agent."""

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
        known_generation = self.memberships[-1].generation if self.memberships else 0
        return wire_messages.heartbeat(
            namespace="team",
            job="llama",
            generation=known_generation,
            phase=self.phase if known_generation else WorkerPhase.STANDBY,
            progress=Progress(step=self.step + 10, resume_step=1) if known_generation else None,
        )

    def count_welcome(self, _theirs: float, _asked: float, _answered: float) -> None:
        self.welcomes += 1


@asynccontextmanager
async def run_coordinator_and_agent(folder: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[RecordingCoordinator]:
    coordinator, tls = RecordingCoordinator(), ServerTls()
    material = renew_material(None, ("localhost",), time.time())
    tls.load(material.server_cert, material.server_key)
    (folder / "ca.crt").write_bytes(material.ca_bundle)
    (folder / "token").write_text(ISSUER.token("w-0"))
    original_handle, original_send = streams.Stream._handle, streams.Stream._send

    def record_frame(stream: streams.Stream, kind: int, payload: bytes) -> None:
        coordinator.frames.append(kind)
        original_handle(stream, kind, payload)

    def record_answer(stream: streams.Stream, kind: FrameKind, payload: bytes) -> int:
        coordinator.answers.append(kind)
        return original_send(stream, kind, payload)

    patch.setattr(streams.Stream, "_handle", record_frame)
    patch.setattr(streams.Stream, "_send", record_answer)
    port = await coordinator.server.start("127.0.0.1", 0, tls.context)
    settings = agent_settings(folder, coordinator=(Endpoint("localhost", port),))
    coordinator.client = CoordinatorClient(
        settings,
        29500,
        "1",
        Callbacks(
            heartbeat=coordinator.heartbeat,
            on_membership=coordinator.memberships.append,
            on_acknowledged=coordinator.acknowledged.append,
            on_job_deleted=coordinator.deleted.set,
            on_coordinator_time=coordinator.count_welcome,
        ),
    )
    running = asyncio.create_task(coordinator.client.run())
    try:
        yield coordinator
        assert not running.done() or coordinator.deleted.is_set()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await coordinator.server.stop()


async def test_an_idle_agent_sends_keepalives_and_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FULL_HEARTBEATS_PER_SECOND", 1 / 4.0)  # one agent: each four seconds
    async with run_coordinator_and_agent(tmp_path, monkeypatch) as coordinator:
        coordinator.state.publish(LLAMA, membership(1))
        # The order of the two kinds is random.
        await async_until(lambda: coordinator.frames.count(FrameKind.HEARTBEAT) >= 4, "heartbeats in full")
        await async_until(lambda: coordinator.frames.count(FrameKind.KEEPALIVE) >= 4, "keepalives")
        assert coordinator.memberships[0].generation == 1
        assert coordinator.frames.count(FrameKind.REGISTER) == 1
        view = coordinator.state.list_agents(LLAMA)["uid-w-0"]
        assert view.heartbeat is not None
        assert view.heartbeat.progress is not None
        assert coordinator.server.http.connections == 0, "one connection, and it is the stream's"
        assert coordinator.acknowledged


async def test_a_changed_phase_is_sent_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "FULL_HEARTBEATS_PER_SECOND", 1 / 1000.0)
    async with run_coordinator_and_agent(tmp_path, monkeypatch) as coordinator:
        coordinator.state.publish(LLAMA, membership(1))
        await async_until(lambda: FrameKind.KEEPALIVE in coordinator.frames, "the client sends only keepalives")
        coordinator.phase = WorkerPhase.FINISHED
        coordinator.client.send_heartbeat_now()
        await async_until(
            lambda: any(heartbeat.phase is WorkerPhase.FINISHED for heartbeat in coordinator.acknowledged),
            "the end is acknowledged",
        )
        coordinator.state.publish(LLAMA, membership(2))
        await async_until(lambda: coordinator.memberships[-1].generation == 2, "a membership comes by itself")


async def test_an_agent_reconnects_and_receives_missed_memberships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_coordinator_and_agent(tmp_path, monkeypatch) as coordinator:
        coordinator.state.publish(LLAMA, membership(1))
        await async_until(lambda: len(coordinator.acknowledged) >= 2, "it talks")
        for stream in list(coordinator.server.streams.opened):
            stream.abort()
        coordinator.state.publish(LLAMA, membership(2))
        await async_until(lambda: coordinator.memberships[-1].generation == 2, "what came meanwhile")
        assert coordinator.frames.count(FrameKind.REGISTER) == 2
        coordinator.state.forget_pod(LLAMA, "uid-w-0")
        coordinator.state.publish(LLAMA, membership(3, "w-1"))  # this coordinator knows it no more
        await async_until(lambda: coordinator.frames.count(FrameKind.REGISTER) == 3, "it registers again")


async def test_a_membership_change_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = [
        membership(1, "w-0", "w-1", "w-2"),
        membership(2, "w-0", "w-3", "w-2"),
        membership(4, "w-0", "w-3"),
        membership(5, "w-0", "w-3", "w-2"),
    ]
    async with run_coordinator_and_agent(tmp_path, monkeypatch) as coordinator:
        for expected in published:
            coordinator.state.publish(LLAMA, expected)
            await async_until(
                lambda expected=expected: expected in coordinator.memberships, f"generation {expected.generation}"
            )  # type: ignore[misc]
        assert coordinator.memberships == published
        assert coordinator.answers.count(FrameKind.MEMBERSHIP_CHANGE) == 3
        assert coordinator.frames.count(FrameKind.REGISTER) == 1


async def test_a_change_of_another_base_is_replaced_by_the_whole_membership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_coordinator_and_agent(tmp_path, monkeypatch) as coordinator:
        coordinator.state.publish(LLAMA, membership(1, "w-0", "w-1", "w-2"))
        await async_until(lambda: bool(coordinator.memberships), "it knows the first generation")
        coordinator.client._newest = membership(1, "w-0", "w-8", "w-9")
        for generation in (2, 3):
            coordinator.state.publish(LLAMA, membership(generation, "w-0", "w-1", f"w-{generation + 1}"))
            await async_until(lambda g=generation: coordinator.memberships[-1].generation == g, "the whole")  # type: ignore[misc]
        assert coordinator.memberships[1:] == [membership(2, "w-0", "w-1", "w-3"), membership(3, "w-0", "w-1", "w-4")]
        assert coordinator.answers.count(FrameKind.MEMBERSHIP_CHANGE) == 2, "one that does not fit, one that does"


async def test_a_stream_is_reopened_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_STREAM_SECONDS", (0.3, 0.5))
    async with run_coordinator_and_agent(tmp_path, monkeypatch) as coordinator:
        coordinator.state.publish(LLAMA, membership(1))
        await async_until(lambda: coordinator.frames.count(FrameKind.REGISTER) >= 4, "streams follow each other")
        assert coordinator.welcomes >= 4
        assert [received.generation for received in coordinator.memberships] == [1]


async def test_an_agent_is_notified_of_the_deletion_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_coordinator_and_agent(tmp_path, monkeypatch) as coordinator:
        coordinator.state.publish(LLAMA, membership(1))
        await async_until(lambda: bool(coordinator.acknowledged), "it talks")
        coordinator.orphaned.add("w-0")
        coordinator.state.forget_job(LLAMA)
        await async_until(coordinator.deleted.is_set, "it learns that its job was deleted")
