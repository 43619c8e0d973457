"""Agents that send invalid messages: each gets an error message; neither the coordinator nor a plan suffers from it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from pydantic import ValidationError

from tests.testing.fuzz import objects
from tests.testing.operator import coordinator_world
from tests.testing.operator.coordinator_world import LLAMA, World, membership, register
from tests.testing.suite.any_json import ANYTHING, SLOW_ALLOWED, changed
from trainium_contract.status.results import MAX_ARTIFACTS, MAX_FIGURES
from trainium_contract.wire.messages import HeartbeatRequest, RegisterRequest
from trainium_contract.wire.stream import FrameKind
from trainium_operator.coordinator.streams import LONGEST_FRAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trainium_operator.plan.model.observed import AgentView

LONGEST = "\U0001f525" * 1024
"""The worst that a text can be on the wire: twelve bytes a character."""


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    await made.register()
    made.state.publish(LLAMA, membership(7, "w-0"))
    made.notes.clear()
    yield made
    await made.stop()


def agent(world: World) -> AgentView:
    return world.state.agents(LLAMA)["uid-w-0"]


def heartbeat(**changes: Any) -> dict[str, Any]:
    return coordinator_world.heartbeat(**{"generation": 7, **changes})


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
async def test_what_cannot_be_read_gets_a_sentence_and_changes_nothing(world: World, body: Any) -> None:
    before = agent(world)
    status, answer = await world.send(FrameKind.HEARTBEAT, body)
    assert status == 400
    assert answer["error"].startswith("the message is not valid")
    assert len(answer["error"]) <= 1024
    assert agent(world) == before
    assert world.notes == []


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
async def test_a_registration_that_would_spoil_the_membership_is_refused(world: World, changes: Any) -> None:
    status, answer = await world.send(FrameKind.REGISTER, register(**changes))
    assert (status, answer["error"][:24]) == (400, "the message is not valid")
    assert agent(world).registration.pod_ip == "127.0.0.2"


async def test_the_largest_heartbeat_of_the_contract_fits_and_a_larger_body_does_not(world: World) -> None:
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
    assert (await world.send(FrameKind.HEARTBEAT, largest))[0] == 200
    assert (await world.send(FrameKind.HEARTBEAT, heartbeat(x="y" * LONGEST_FRAME)))[0] == 413


@pytest.mark.parametrize("loss", ['"inf"', '"nan"', '"9e999"', f'"{"9" * 400}"', "1e999", "Infinity", "NaN"])
async def test_a_loss_that_is_no_number_is_none_however_it_is_written(world: World, loss: str) -> None:
    body = json.dumps(heartbeat(progress={"step": 3, "loss": 0, "tokensPerSecond": math.inf}))
    assert (await world.send(FrameKind.HEARTBEAT, body.replace('"loss": 0', f'"loss": {loss}').encode()))[0] == 200
    progress = agent(world).heartbeat.progress
    assert (progress.step, progress.loss, progress.tokens_per_second) == (3, None, None)


async def test_a_generation_from_nowhere_is_refused_with_a_sentence(world: World) -> None:
    status, answer = await world.send(FrameKind.HEARTBEAT, heartbeat(generation=2**31 - 1))
    assert status == 400
    assert answer["error"] == "generation 2147483647 cannot be: generation 7 is current"
    assert agent(world).heartbeat is None


async def test_a_heartbeat_that_was_overtaken_is_a_sign_of_life_and_nothing_more(world: World) -> None:
    await world.send(FrameKind.HEARTBEAT, heartbeat(attempt=2, progress={"step": 9}))
    last_seen = agent(world).last_seen
    world.notes.clear()
    assert (await world.send(FrameKind.HEARTBEAT, heartbeat(attempt=1, phase="Failed", verdict=failure())))[0] == 200
    assert agent(world).heartbeat.attempt == 2
    assert agent(world).heartbeat.verdict is None
    assert agent(world).last_seen >= last_seen
    assert world.notes == []


async def test_a_flood_of_replayed_messages_takes_no_more_memory(world: World) -> None:
    for step in range(300):
        assert (await world.send(FrameKind.HEARTBEAT, heartbeat(progress={"step": step})))[0] == 200
        assert (await world.send(FrameKind.REGISTER, register()))[0] == 200
    assert world.state.agent_count() == 1


@SLOW_ALLOWED
@given(changed(objects.REGISTER) | ANYTHING, changed(objects.HEARTBEAT, most=8) | ANYTHING)
def test_any_message_is_taken_or_a_validation_error(register: Any, heartbeat: Any) -> None:
    for model, message in ((RegisterRequest, register), (HeartbeatRequest, heartbeat)):
        sent = json.dumps(message)
        try:
            taken = model.model_validate_json(sent)
        except ValidationError:
            continue
        assert len(json.dumps(taken.to_wire(), allow_nan=False)) <= 4 * len(sent) + 4096
