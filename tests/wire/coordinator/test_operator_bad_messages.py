"""Agents that say what they should not: each gets a sentence; neither the coordinator nor a plan suffers from it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.testing.suite.trials import trials
from trainium_contract.faults.causes import Cause
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.results import MAX_ARTIFACTS, MAX_FIGURES
from trainium_contract.wire.messages import HeartbeatRequest, Member, Membership, Transition
from trainium_operator.coordinator.authentication import Caller
from trainium_operator.coordinator.server import LARGEST_BODY, CoordinatorServer
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.entrance.errors import RefusedError, UnauthenticatedError
from trainium_operator.plan.model.names import JobId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

JOB = {"namespace": "team", "job": "llama"}
LLAMA = JobId("team", "llama", "job-uid")
LONGEST = "\U0001f525" * 1024
"""The worst that a text can be on the wire: twelve bytes a character."""


class Door:
    """Lets in whoever presents the token `key-of-<pod>` for a pod of job `llama`."""

    async def identify(self, authorization: str, _source: str = "") -> Caller:
        pod = authorization.removeprefix("Bearer key-of-")
        if pod == authorization:
            raise UnauthenticatedError("no valid token")
        return Caller("team", pod, f"uid-{pod}")

    def check(self, caller: Caller, *, namespace: str, job: str, pod_name: str | None, pod_uid: str) -> JobId:
        if (namespace, job, pod_uid) != ("team", "llama", caller.pod_uid) or pod_name not in (None, caller.pod_name):
            raise RefusedError("the token was issued to another pod")
        return LLAMA


class World:
    def __init__(self) -> None:
        self.state = CoordinatorState(time.time)
        self.notes: list[tuple[str, str, bool]] = []
        self.server = CoordinatorServer(
            self.state,
            Door(),
            is_serving=lambda: True,
            notify=lambda *note: self.notes.append(note),  # type: ignore[arg-type]
        )
        self.base = ""
        self.session: aiohttp.ClientSession

    async def post(self, path: str, body: Any, pod: str = "w-0") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer key-of-{pod}", "Content-Type": "application/json"}
        async with self.session.post(self.base + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    def agent(self) -> Any:
        return self.state.agents(LLAMA)["uid-w-0"]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    made.base = f"http://127.0.0.1:{await made.server.start('127.0.0.1', 0, None)}"
    async with aiohttp.ClientSession() as made.session:
        await made.post("/v1/register", register())
        made.state.publish(LLAMA, membership(7))
        made.notes.clear()
        yield made
        await made.server.stop()


def membership(generation: int) -> Membership:
    member = Member(
        pod_uid="uid-w-0", pod_name="w-0", pod_ip="127.0.0.2", node_name="n", node_rank=0, rendezvous_port=29500
    )
    return Membership(
        generation=generation,
        transition=Transition.IMMEDIATE,
        cause=Cause.RESIZE,
        members=(member,),
        processes_per_node=1,
    )


def register(**changes: Any) -> dict[str, Any]:
    ours = {"podName": "w-0", "podUid": "uid-w-0", "podIp": "127.0.0.2", "nodeName": "n", "rendezvousPort": 29500}
    return {**JOB, "protocol": 2, **ours, "agentVersion": "1", **changes}


def heartbeat(**changes: Any) -> dict[str, Any]:
    return {**JOB, "podName": "w-0", "podUid": "uid-w-0", "generation": 7, "phase": "Training", **changes}


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
    before = world.agent()
    status, answer = await world.post("/v1/heartbeat", body)
    assert status == 400
    assert answer["error"].startswith("the message is not valid")
    assert len(answer["error"]) <= 1024
    assert world.agent() == before
    assert world.notes == []


@pytest.mark.parametrize(
    "changes", [{"podIp": "not an address"}, {"podIp": "1" * 60_000}, {"agentVersion": "v" * 65}, {"nodeName": ""}]
)
async def test_a_registration_that_would_spoil_the_membership_is_refused(world: World, changes: Any) -> None:
    status, answer = await world.post("/v1/register", register(**changes))
    assert (status, answer["error"][:24]) == (400, "the message is not valid")
    assert world.agent().registration.pod_ip == "127.0.0.2"


async def test_another_job_another_pod_and_no_token_are_turned_away(world: World) -> None:
    assert (await world.post("/v1/heartbeat", heartbeat(job="other")))[0] == 403
    assert (await world.post("/v1/heartbeat", heartbeat(), pod="w-1"))[0] == 403
    headers = {"Authorization": "Basic nobody"}
    async with world.session.post(world.base + "/v1/heartbeat", json=heartbeat(), headers=headers) as response:
        assert response.status == 401


async def test_the_body_of_a_caller_without_a_token_is_not_even_read(world: World) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield b"x" * 65_536
            await asyncio.sleep(0)

    url, sent = world.base + "/v1/heartbeat", endless()
    async with aiohttp.ClientSession() as stranger:
        try:
            async with stranger.post(url, data=sent, headers={"Authorization": "Bearer no"}) as response:
                assert response.status == 401
        except aiohttp.ClientConnectionError:
            pass  # the connection was closed while we were still sending


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
    assert (await world.post("/v1/heartbeat", largest))[0] == 200
    assert (await world.post("/v1/heartbeat", heartbeat(x="y" * LARGEST_BODY)))[0] == 413


async def test_a_loss_that_is_not_a_number_is_told_as_none_and_the_status_stays_json(world: World) -> None:
    body = heartbeat(progress={"step": 3, "loss": float("nan"), "tokensPerSecond": float("inf")})
    assert (await world.post("/v1/heartbeat", body))[0] == 200
    progress = world.agent().heartbeat.progress
    assert (progress.step, progress.loss, progress.tokens_per_second) == (3, None, None)


async def test_a_generation_from_nowhere_is_refused_with_a_sentence(world: World) -> None:
    status, answer = await world.post("/v1/heartbeat", heartbeat(generation=2**31 - 1))
    assert status == 400
    assert answer["error"] == "generation 2147483647 cannot be: generation 7 is current"
    assert world.agent().heartbeat is None


async def test_a_heartbeat_that_was_overtaken_is_a_sign_of_life_and_nothing_more(world: World) -> None:
    await world.post("/v1/heartbeat", heartbeat(attempt=2, progress={"step": 9}))
    heard = world.agent().heard
    world.notes.clear()
    assert (await world.post("/v1/heartbeat", heartbeat(attempt=1, phase="Failed", verdict=failure())))[0] == 200
    assert world.agent().heartbeat.attempt == 2
    assert world.agent().heartbeat.verdict is None
    assert world.agent().heard >= heard
    assert world.notes == []


async def test_a_flood_of_replayed_messages_takes_no_more_memory(world: World) -> None:
    for step in range(300):
        assert (await world.post("/v1/heartbeat", heartbeat(progress={"step": step})))[0] == 200
        assert (await world.post("/v1/register", register()))[0] == 200
    assert world.state.agent_count() == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=trials(300), suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(HeartbeatRequest.model_json_schema()["properties"])), JSON, max_size=6))
def test_any_json_is_a_heartbeat_or_a_validation_error(changes: dict[str, Any]) -> None:
    try:
        message = HeartbeatRequest.model_validate_json(json.dumps(heartbeat(**changes)))
    except ValidationError:
        return
    json.dumps(message.to_wire(), allow_nan=False)


def test_what_the_contract_lets_through_can_be_written_to_a_status() -> None:
    text = json.dumps(TrainingJobStatus().to_wire(), allow_nan=False)
    assert json.loads(text)
