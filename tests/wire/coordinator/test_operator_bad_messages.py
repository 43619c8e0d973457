"""Invalid messages and broken connections of agents: errors without effect on others."""

import asyncio
import json
import logging
import math
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from tests.testing.fuzz import objects
from tests.testing.operator import coordinator_fixture
from tests.testing.operator.coordinator_fixture import LLAMA, CoordinatorFixture, membership, register
from tests.testing.suite.any_json import ANYTHING, SLOW_ALLOWED, mutated_values
from trainium_contract.status.results import MAX_ARTIFACTS, MAX_FIGURES
from trainium_contract.wire.messages import HeartbeatRequest, RegisterRequest
from trainium_contract.wire.stream import FrameKind
from trainium_operator.coordinator.authentication import Caller
from trainium_operator.coordinator.server import CoordinatorServer
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.coordinator.streams import MAX_FRAME_BYTES
from trainium_operator.plan.model.names import JobId
from trainium_operator.plan.model.observed import AgentView

LONGEST = "\U0001f525" * 1024
"""The longest text on the wire: twelve bytes a character."""


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorFixture]:
    coordinator = CoordinatorFixture()
    await coordinator.start()
    await coordinator.register()
    coordinator.state.publish(LLAMA, membership(7, "w-0"))
    coordinator.notifications.clear()
    yield coordinator
    await coordinator.stop()


def agent(coordinator: CoordinatorFixture) -> AgentView:
    return coordinator.state.list_agents(LLAMA)["uid-w-0"]


def heartbeat(**changes: Any) -> dict[str, Any]:
    return coordinator_fixture.heartbeat(**{"generation": 7, **changes})


def failure(**changes: Any) -> dict[str, Any]:
    return {"sequence": 0, "generation": 7, "attempt": 0, "rank": 0, "exitCode": 1, "at": 1.0, **changes}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe\x00",
        b"null",
        b"[" * 50_000,
        b'{"a":' * 20_000,
        heartbeat(generation="seven"),
        heartbeat(generation=-1),
        heartbeat(generation=10**400),
        heartbeat(attempt=2**31),
        heartbeat(phase="Dancing"),
        heartbeat(protocol=99),
        heartbeat(podUid=""),
        heartbeat(podUid="u" * 10_000),
        heartbeat(failures=[failure()] * 9),
        heartbeat(failures=[failure(message="x" * 1025)]),
        heartbeat(failures=[failure(at=float("nan"))]),
        heartbeat(failures=[failure(at=1e300)]),
        heartbeat(waitingFor=list(range(65))),
        heartbeat(progress={"step": -5}),
        heartbeat(progress={"step": 2**60}),
        heartbeat(verdict=[]),
        heartbeat(restarts={"0": {}}),
    ],
    ids=lambda body: (body if isinstance(body, bytes) else json.dumps(body).encode())[:60].decode(errors="replace"),
)
async def test_an_invalid_heartbeat_is_refused_and_ignored(coordinator: CoordinatorFixture, body: Any) -> None:
    before = agent(coordinator)
    status, answer = await coordinator.send(FrameKind.HEARTBEAT, body)
    assert status == 400
    assert answer["error"].startswith("the message is not valid")
    assert len(answer["error"]) <= 1024
    assert agent(coordinator) == before
    assert coordinator.notifications == []


@pytest.mark.parametrize(
    "changes",
    [
        {"podIp": "not an address"},
        {"podIp": "1" * 60_000},
        {"podIp": None},
        {"rendezvousPort": 0},
        {"agentVersion": "v" * 65},
        {"nodeName": ""},
    ],
)
async def test_an_invalid_registration_is_refused_and_ignored(coordinator: CoordinatorFixture, changes: Any) -> None:
    status, answer = await coordinator.send(FrameKind.REGISTER, register(**changes))
    assert (status, answer["error"][:24]) == (400, "the message is not valid")
    assert agent(coordinator).registration.pod_ip == "127.0.0.2"


async def test_the_largest_heartbeat_fits_into_a_frame(coordinator: CoordinatorFixture) -> None:
    stuck = {"rank": 0, "phase": "Step", "step": 1, "seconds": 1.0, "stack": LONGEST}
    largest = heartbeat(
        failures=[failure(message=LONGEST)] * 8,
        verdict=failure(message=LONGEST),
        kernel=[{"sequence": 0, "line": LONGEST, "at": 1.0}] * 8,
        stuck=[stuck] * 8,
        checks=[{"check": "Clock", "passed": False, "seconds": 1.0, "detail": LONGEST}] * 16,
        progress={
            "step": 1,
            "notice": LONGEST,
            "alerts": [{"kind": LONGEST[:64], "step": 1, "message": LONGEST}] * 8,
            "artifacts": [{"kind": LONGEST[:32], "path": LONGEST, "step": 1, "digest": LONGEST[:128]}] * MAX_ARTIFACTS,
            "evaluation": [{"name": LONGEST[:64], "before": -1e-300, "after": -1e-300}] * MAX_FIGURES,
        },
    )
    HeartbeatRequest.model_validate(largest)
    assert (await coordinator.send(FrameKind.HEARTBEAT, largest))[0] == 200
    assert (await coordinator.send(FrameKind.HEARTBEAT, heartbeat(x="y" * MAX_FRAME_BYTES)))[0] == 413


@pytest.mark.parametrize("loss", ['"inf"', '"nan"', '"9e999"', f'"{"9" * 400}"', "1e999", "Infinity", "NaN"])
async def test_an_infinite_loss_is_none_in_any_notation(coordinator: CoordinatorFixture, loss: str) -> None:
    body = json.dumps(heartbeat(progress={"step": 3, "loss": 0, "tokensPerSecond": math.inf}))
    assert (await coordinator.send(FrameKind.HEARTBEAT, body.replace('"loss": 0', f'"loss": {loss}').encode()))[
        0
    ] == 200
    progress = agent(coordinator).heartbeat.progress
    assert (progress.step, progress.loss, progress.tokens_per_second) == (3, None, None)


async def test_a_future_generation_is_refused(coordinator: CoordinatorFixture) -> None:
    status, answer = await coordinator.send(FrameKind.HEARTBEAT, heartbeat(generation=2**31 - 1))
    assert status == 400
    assert answer["error"] == "generation 2147483647 cannot be: generation 7 is current"
    assert agent(coordinator).heartbeat is None


async def test_a_late_heartbeat_updates_only_the_last_contact(coordinator: CoordinatorFixture) -> None:
    await coordinator.send(FrameKind.HEARTBEAT, heartbeat(attempt=2, progress={"step": 9}))
    last_seen = agent(coordinator).last_seen
    coordinator.notifications.clear()
    assert (await coordinator.send(FrameKind.HEARTBEAT, heartbeat(attempt=1, phase="Failed", verdict=failure())))[
        0
    ] == 200
    assert agent(coordinator).heartbeat.attempt == 2
    assert agent(coordinator).heartbeat.verdict is None
    assert agent(coordinator).last_seen >= last_seen
    assert coordinator.notifications == []


async def test_repeated_messages_keep_one_agent(coordinator: CoordinatorFixture) -> None:
    for step in range(300):
        assert (await coordinator.send(FrameKind.HEARTBEAT, heartbeat(progress={"step": step})))[0] == 200
        assert (await coordinator.send(FrameKind.REGISTER, register()))[0] == 200
    assert coordinator.state.count_agents() == 1


@SLOW_ALLOWED
@given(mutated_values(objects.REGISTER) | ANYTHING, mutated_values(objects.HEARTBEAT, most=8) | ANYTHING)
def test_any_message_is_parsed_or_a_validation_error(register: Any, heartbeat: Any) -> None:
    for model, message in ((RegisterRequest, register), (HeartbeatRequest, heartbeat)):
        sent = json.dumps(message)
        try:
            parsed = model.model_validate_json(sent)
        except ValidationError:
            continue
        assert len(json.dumps(parsed.to_wire(), allow_nan=False)) <= 4 * len(sent) + 4096


HEAD = b"GET /v1/stream?podUid=uid-w-0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"


STREAM = HEAD + b"Connection: Upgrade\r\nUpgrade: trainium-agent\r\n\r\n"


BROKEN = {
    "before the request": b"",
    "in the head": HEAD[:40],
    "in the body": HEAD + b'Content-Length: 400\r\n\r\n{"protocol": 2',
    "in a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n40\r\n{",
    "with a chunk that has no length": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}",
    "with bytes of another protocol": b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
    "after the request for a stream": STREAM,
    "in the head of a frame": STREAM + b"\x01\x00",
    "in a frame": STREAM + b"\x01\x00\x00\x01\x00{",
}


class OpenAuthenticator:
    """An authenticator that accepts every caller."""

    async def identify(self, *_: str) -> Caller:
        return Caller("team", "w-0", "uid-w-0", time.time() + 3600)

    def check(self, caller: Caller, **_: str | None) -> JobId:
        return JobId("team", "llama", "job-uid")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = CoordinatorServer(
        CoordinatorState(time.time),
        OpenAuthenticator(),  # type: ignore[arg-type]
        is_serving=lambda: True,
        notify=lambda *_: None,
    )
    yield await server.start("127.0.0.1", 0, None)
    await server.stop()


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
@pytest.mark.parametrize("where", BROKEN)
async def test_a_broken_connection_logs_no_error(
    port: int, where: str, reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(BROKEN[where])
            await writer.drain()
            await asyncio.sleep(0.05)  # let it be read
            if reset:
                stream: socket.socket = writer.get_extra_info("socket")
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()
            del reader
        await asyncio.sleep(0.2)
    loud = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert not loud, [record.getMessage() for record in loud]
