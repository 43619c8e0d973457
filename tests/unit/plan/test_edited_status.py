"""A status that was edited, or written by an operator with a wrong clock, converges without a loss."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.explorer.models import trains
from tests.unit.plan.explorer.oracles import describe, has_converged
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_cluster import FakeCluster
from tests.unit.plan.plan_results import make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import Phase
from trainium_contract.status.internal import FailureRecord
from trainium_contract.status.interruptions import MAX_COUNTED_CAUSES, Interruption, RecoveryResponse, RestartsStatus
from trainium_contract.status.public import MembershipStatus, ProgressStatus

HOUR = 3600.0


def cluster_with_edited_status(name: str = "demo", **changes: Any) -> FakeCluster:
    cluster = trains(spares=1, minReplicas=1, name=name)
    cluster.status = TrainingJobStatus.model_validate({**cluster.status.model_dump(), **changes})
    cluster.dirty = True
    return cluster


def entry(**changes: Any) -> Interruption:
    fields = {"generation": 1, "attempt": 0, "time": "2027-01-15T08:00:00Z", "message": "by hand", **changes}
    return Interruption(cause=Cause.NODE_LOST, response=RecoveryResponse.REPLACE, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"membership": MembershipStatus(generation=999, attempt=7, size=2, data_parallel=2)},
        {"membership": MembershipStatus(generation=0, attempt=0, size=0)},
        {"membership": MembershipStatus(generation=1, attempt=2**31 - 1, size=2)},
        {"membership": MembershipStatus(generation=1, attempt=0, size=77, data_parallel=77)},
        {"membership": MembershipStatus(generation=90, size=4)},
        {"desired": 77, "replicas": 0, "ready_replicas": 9},
        {"desired": 4000},
        {"desired": -1, "replicas": -1, "spares": -1},
        {"next_pod_ordinal": 0},
        {"next_pod_ordinal": 10**15},
        {"next_pod_ordinal": -5},
        {"phase": Phase.SUSPENDED},
        {"conditions": ()},
        {"history": (entry(failed_at=NOW + HOUR),)},
        {"history": (entry(generation=55),)},
        {"failures": (FailureRecord(at=NOW + HOUR, cause=Cause.NODE_LOST, node="node-0", pod="x"),) * 8},
        {"avoided_nodes": ("node-0", "node-1", "no-such-node")},
        {"waiting_since": NOW + HOUR},
        {"waiting_since": 0.0},
        {"waiting_since": NOW + 10**9, "leaving_since": NOW + 10**9},
        {"progress": ProgressStatus(step=10**9)},
        TrainingJobStatus().model_dump(),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_an_edited_status_converges_and_survives_the_next_fault(changes: dict[str, Any]) -> None:
    cluster = cluster_with_edited_status("j" * 50, **changes)
    pods, generation = set(cluster.pods), cluster.membership.generation
    cluster.run(60)
    assert has_converged(cluster), describe(cluster)
    assert set(cluster.pods) == pods, "existing pods are kept"
    assert cluster.membership.generation >= generation
    cluster.kill_pod(cluster.members()[0].view.name)
    cluster.run(90)
    assert has_converged(cluster), describe(cluster)
    assert all(len(name) <= 63 for name in cluster.pods), "a pod's name is its host's"


@pytest.mark.parametrize(
    "restarts",
    [
        RestartsStatus(total=0, by_cause={"Crash": 3}),
        RestartsStatus(total=999, by_cause={"Crash": 3}),
        RestartsStatus(total=5),
        RestartsStatus(total=-7, by_cause={"Crash": -4, "NodeLost": 2}),
        RestartsStatus(total=3, by_cause={f"Word{number}": 1 for number in range(MAX_COUNTED_CAUSES)}),
    ],
)
def test_edited_restart_counts_are_made_consistent(restarts: RestartsStatus) -> None:
    cluster = cluster_with_edited_status(restarts=restarts)
    cluster.run(60)
    before = cluster.status.restarts
    assert before.total == sum(before.by_cause.values())
    crashes = max(0, restarts.by_cause.get("Crash", 0))
    assert before.by_cause.get("Crash", 0) == crashes, "what was counted by cause is kept"
    cluster.kill_pod(cluster.members()[0].view.name)
    cluster.run(90)
    after = cluster.status.restarts
    assert after.total == sum(after.by_cause.values())
    assert len(after.by_cause) <= MAX_COUNTED_CAUSES, "the API server would refuse each further status"
    causes = {cause.value for cause in Cause}
    assert sum(after.by_cause.get(name, 0) - before.by_cause.get(name, 0) for name in causes) == 1


def test_a_backoff_written_by_a_fast_clock_is_bounded() -> None:
    records = tuple(
        FailureRecord(at=NOW + HOUR, cause=Cause.NODE_LOST, node=f"n{number}", pod=f"p{number}") for number in range(6)
    )
    result = make_plan(build.running_job(2, spares=1, status={"failures": records}, pods=build.running_job(2).pods))
    assert result.requeue_after is not None
    assert result.requeue_after < 60
    assert all(record.at <= NOW for record in result.status.failures)


def test_an_impossible_generation_of_an_agent_is_ignored() -> None:
    observed = build.running_job(4)
    views = dict(observed.agents)
    view = views["uid-2"]
    liar = view.heartbeat.model_copy(update={"generation": 2**31 - 1})
    views["uid-2"] = replace(view, heartbeat=liar)
    lost = tuple(pod for pod in observed.pods if pod.ordinal != 3)
    spare = build.running_job(4, spares=1)
    views["uid-4"] = spare.agents["uid-4"]
    result = make_plan(replace(observed, pods=(*lost, spare.pods[4]), nodes=spare.nodes, agents=views))
    new = result.published_membership
    assert new is not None
    assert new.generation == 2
