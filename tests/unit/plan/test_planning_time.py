"""The work of a plan grows with the number of workers, not with its square: a plan at 1,000 blocks all heartbeats."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_results import make_plan
from trainium_contract.wire.messages import WorkerPhase
from trainium_operator.plan.model.observed import AgentView, NodeReadiness, Observed, PodPhase

FEW, MANY = 64, 256
SLACK = 1.15
"""Above a straight line through zero; a square would be at 4."""


def training_job(count: int) -> Observed:
    return build.running_job(count, spares=1)


def joining_job(count: int) -> Observed:
    def joining_agent(ordinal: int) -> AgentView:
        since = build.NOW - 1
        return build.agent(ordinal, WorkerPhase.JOINING, generation=1, waiting_for=tuple(range(8)), joining_since=since)

    return build.running_job(count, spares=1, agents={ordinal: joining_agent(ordinal) for ordinal in range(count)})


def half_silent_job(count: int) -> Observed:
    return build.running_job(count, spares=1, agents=build.training_agents(range(count // 2), silent=30.0))


def half_failed_job(count: int) -> Observed:
    phases = [PodPhase.FAILED if ordinal % 2 else PodPhase.RUNNING for ordinal in range(count)]
    return build.running_job(count, pods=tuple(build.pod(ordinal, phase=phase) for ordinal, phase in enumerate(phases)))


def half_of_the_nodes_not_ready(count: int) -> Observed:
    nodes = [
        build.node(f"node-{number}", NodeReadiness.UNKNOWN if number % 2 else NodeReadiness.TRUE)
        for number in range(count)
    ]
    return build.running_job(count, nodes={node.name: node for node in nodes})


def job_without_pods(count: int) -> Observed:
    return build.observation(build.job(build.spec(workers={"replicas": count, "spares": 1})))


def standby_job(count: int) -> Observed:
    job = build.job(build.spec(workers={"replicas": count, "spares": 1}))
    pods = tuple(build.pod(ordinal) for ordinal in range(count + 1))
    return build.observation(job, pods, build.agents(range(count + 1)))


def lines(do: Callable[[], object]) -> int:
    """Count the executed lines of Python, a measure of time without a clock."""
    count = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "state",
    [
        training_job,
        joining_job,
        half_silent_job,
        half_failed_job,
        half_of_the_nodes_not_ready,
        job_without_pods,
        standby_job,
    ],
)
def test_planning_time_is_linear_in_the_workers(state: Callable[[int], Observed]) -> None:
    few, many = (lines(partial(make_plan, state(count))) for count in (FEW, MANY))
    assert many <= few * MANY / FEW * SLACK
