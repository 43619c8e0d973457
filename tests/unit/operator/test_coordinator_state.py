from __future__ import annotations

import asyncio

import pytest
from virtual_time import run_virtual, settle

from trainium_contract.exit_codes import Cause
from trainium_contract.messages import (
    HeartbeatRequest,
    Member,
    Membership,
    Progress,
    RegisterRequest,
    Transition,
    WorkerPhase,
)
from trainium_operator.coordinator.state import CoordinatorState


def membership(generation: int, *pods: str) -> Membership:
    members = tuple(
        Member(pod_uid=pod, pod_name=pod, pod_ip="10.0.0.1", node_name="n", node_rank=rank, rendezvous_port=1)
        for rank, pod in enumerate(pods or ("a",))
    )
    return Membership(
        generation=generation,
        transition=Transition.IMMEDIATE,
        cause=Cause.RESIZE,
        members=members,
        processes_per_node=1,
    )


def registration(pod: str) -> RegisterRequest:
    return RegisterRequest(
        namespace="ns",
        job="j",
        pod_name=pod,
        pod_uid=pod,
        pod_ip="10.0.0.1",
        node_name="n",
        rendezvous_port=1,
        agent_version="1",
    )


def step(pod: str, number: int) -> HeartbeatRequest:
    return HeartbeatRequest(
        namespace="ns",
        job="j",
        pod_name=pod,
        pod_uid=pod,
        generation=1,
        phase=WorkerPhase.TRAINING,
        progress=Progress(step=number),
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> CoordinatorState:
    return CoordinatorState(clock)


def test_a_served_generation_never_goes_back(state: CoordinatorState) -> None:
    state.publish("job", membership(3))
    state.publish("job", membership(2))
    assert state.published("job") == 3


def test_a_new_job_of_the_same_name_inherits_nothing(state: CoordinatorState) -> None:
    state.publish("old-uid", membership(7))
    assert state.published("new-uid") == 0
    state.forget_job("old-uid")
    assert state.published("old-uid") == 0


def test_seconds_per_step_come_from_the_operators_own_clock(state: CoordinatorState, clock: Clock) -> None:
    state.register("job", registration("a"))
    state.heartbeat("job", step("a", 10))
    clock.now += 4
    state.heartbeat("job", step("a", 12))
    view = state.agents("job")["a"]
    assert view.step_seconds == 2
    assert view.progressed == clock.now
    clock.now += 1
    state.heartbeat("job", step("a", 12))
    assert state.agents("job")["a"].progressed == clock.now - 1


def test_the_wait_of_an_agent_counts_from_its_first_word_of_it_in_an_attempt(
    state: CoordinatorState, clock: Clock
) -> None:
    def since(attempt: int, phase: WorkerPhase = WorkerPhase.JOINING) -> float | None:
        clock.now += 1
        state.heartbeat("job", step("a", 1).model_copy(update={"phase": phase, "attempt": attempt}))
        return state.agents("job")["a"].joining_since

    state.register("job", registration("a"))
    first = since(0)
    assert first == clock.now
    assert since(0) == first
    assert since(0, WorkerPhase.LOADING) is None
    assert since(0) == clock.now
    assert since(1) == clock.now


def test_what_a_lost_member_said_last_stays_until_the_next_generation(state: CoordinatorState) -> None:
    state.publish("job", membership(1, "a", "b"))
    for pod in ("a", "b", "spare"):
        state.register("job", registration(pod))
    state.forget_pod("job", "b")
    state.forget_pod("job", "spare")
    assert set(state.agents("job")) == {"a", "b"}
    state.publish("job", membership(2, "a"))
    assert set(state.agents("job")) == {"a"}


def test_a_job_that_is_deleted_ends_the_long_polls_of_its_agents(state: CoordinatorState) -> None:
    async def scenario() -> None:
        waiting = asyncio.create_task(state.newer_membership("job", 0, 60))
        await settle()
        state.forget_job("job")
        await settle()
        assert waiting.done()
        assert waiting.result() is None

    run_virtual(scenario())


def test_many_waiters_get_one_publication(state: CoordinatorState) -> None:
    async def scenario() -> None:
        waiting = [asyncio.create_task(state.newer_membership("job", 1, 60)) for _ in range(100)]
        await settle()
        state.publish("job", membership(1))
        await settle()
        assert not any(task.done() for task in waiting)
        state.publish("job", membership(2))
        assert {(await task).generation for task in waiting} == {2}

    run_virtual(scenario())
