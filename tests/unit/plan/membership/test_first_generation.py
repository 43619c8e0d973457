"""The first generation of a job, and the numbers of generations."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import make_plan, member_names
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import RecoveryResponse
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire.messages import Transition
from trainium_operator.plan.membership.generation import compute_next_generation, republish_membership
from trainium_operator.plan.model.observed import Observed, PodPhase


def job_with_warm_workers(count: Any, job_spec: Any = None, since: Any = NOW, **changes: Any) -> Any:
    status = TrainingJobStatus(desired=4, next_pod_ordinal=count, waiting_since=since)
    view = build.job(job_spec or build.spec(), status)
    pods = tuple(build.pod(ordinal) for ordinal in range(count))
    return build.observation(view, pods, build.agents(range(count)), **changes)


def test_a_new_job_gets_its_configuration_before_its_pods() -> None:
    result = make_plan(replace(build.observation(build.job(build.spec(workers={"spares": 1}))), children={}))
    assert result.action_kinds == ["ApplyObject", *["CreatePod"] * 5]
    assert result.created_pods == [f"demo-w-{ordinal}" for ordinal in range(5)]
    assert result.status.next_pod_ordinal == 5
    assert result.status.phase is Phase.PENDING


def test_ordinals_are_never_reused() -> None:
    observed = build.observation(build.job(status=TrainingJobStatus(desired=4, next_pod_ordinal=4)))
    assert make_plan(observed).created_pods == ["demo-w-4", "demo-w-5", "demo-w-6", "demo-w-7"]


def test_an_agent_of_a_pod_without_a_node_is_no_member() -> None:
    """A user who may create tokens can get one of a pending pod and report it as warm."""
    observed = job_with_warm_workers(4)
    pods = tuple(replace(pod, node="", scheduled=False) if pod.ordinal == 2 else pod for pod in observed.pods)
    result = make_plan(replace(observed, pods=pods))
    assert result.published_membership is None
    assert result.status.membership.generation == 0


@pytest.mark.parametrize(("stored", "grace"), [(2, 1.0), (0, 0.0), (30, 20.0), (70, None), (600, None), (None, None)])
def test_a_member_has_the_grace_period_that_its_stored_pod_leaves_it(stored: int | None, grace: float | None) -> None:
    observed = job_with_warm_workers(4)
    pods = tuple(replace(pod, grace_seconds=stored) if pod.ordinal == 2 else pod for pod in observed.pods)
    result = make_plan(replace(observed, pods=pods))
    membership = result.published_membership
    assert membership is not None
    assert [member.grace_seconds for member in membership.members] == [None, None, grace, None]
    notes = result.event_notes("PodsChanged")
    assert [f"1 worker have {grace:g} s to save" in note for note in notes] == ([] if grace is None else [True])


def test_limits_that_nobody_requested_are_reported_with_the_first_generation() -> None:
    limits = {"containers": [{"name": "worker", "resources": {"limits": {"memory": "8Gi"}}}]}
    observed = job_with_warm_workers(4, build.spec(workers={"template": {"spec": limits}}))

    def notes(*stored: tuple[str, str]) -> list[str]:
        result = make_plan(replace(observed, pods=tuple(replace(pod, limits=stored) for pod in observed.pods)))
        return result.event_notes("PodsChanged")

    assert notes(("memory", "8Gi")) == []
    (note,) = notes(("cpu", "200m"), ("memory", "8Gi"))
    assert "limits that the job does not set: cpu 200m. A LimitRange of namespace default" in note


def test_the_first_generation_begins_when_the_desired_workers_are_warm() -> None:
    result = make_plan(job_with_warm_workers(4))
    membership = result.published_membership
    assert membership is not None
    assert membership.generation == 1
    assert membership.transition is Transition.IMMEDIATE
    assert member_names(membership) == ["demo-w-0", "demo-w-1", "demo-w-2", "demo-w-3"]
    assert result.status.membership == MembershipStatus(
        generation=1, size=4, data_parallel=4, passes=6, batch=24, speed=1.0
    )
    assert result.status.waiting_since is None


def test_starting_workers_are_not_lost_contact() -> None:
    observed = replace(job_with_warm_workers(4), agents={}, coordinator_since=NOW - 600)
    reasons = {condition.reason for condition in make_plan(observed).status.conditions}
    assert "ContactLost" not in reasons
    older = replace(observed, pods=tuple(replace(pod, created=NOW - 700) for pod in observed.pods))
    result = make_plan(older)
    assert any(condition.reason == "ContactLost" for condition in result.status.conditions), (
        "they called the operator before"
    )


def test_only_later_generations_name_a_reason_in_their_event() -> None:
    def messages(observed: Any) -> list[str]:
        return make_plan(observed).event_notes("GenerationStarted")

    assert messages(job_with_warm_workers(4)) == ["Generation 1 begins on 4 nodes."]
    lost = build.with_pod(build.running_job(4, spares=1), build.pod(1, phase=PodPhase.FAILED, reason="Evicted"))
    assert messages(lost) == ["Generation 2 begins on 4 nodes (Preempted, Immediate)."]


def test_ranks_follow_the_nodes_so_that_neighbours_are_next_to_each_other() -> None:
    observed = job_with_warm_workers(4)
    pods = tuple(replace(pod, node=f"node-{9 - pod.ordinal}") for pod in observed.pods)
    observed = replace(observed, pods=pods, nodes={pod.node: build.node(pod.node) for pod in pods})
    assert make_plan(observed).published_members == ["demo-w-3", "demo-w-2", "demo-w-1", "demo-w-0"]


def test_the_first_generation_waits_for_cold_workers() -> None:
    observed = job_with_warm_workers(4)
    cold = replace(observed.agents["uid-2"], heartbeat=build.heartbeat(2, ready=False))
    assert make_plan(build.with_agents(observed, {2: cold})).published_membership is None


def test_an_elastic_job_starts_smaller_after_the_wait() -> None:
    elastic = build.spec(workers={"minReplicas": 2})
    observed = job_with_warm_workers(3, elastic, since=NOW - 119)
    pending = build.pod(3, node="", scheduled=False, phase=PodPhase.PENDING)
    early = make_plan(replace(observed, pods=(*observed.pods, pending)))
    assert early.published_membership is None
    assert early.requeue_after == 1.0
    late = make_plan(job_with_warm_workers(3, elastic, since=NOW - 120))
    assert len(late.published_members) == 3
    assert late.status.waiting_since == NOW


def test_a_rigid_job_waits_for_all_its_workers() -> None:
    assert make_plan(job_with_warm_workers(3, since=NOW - 10_000)).published_membership is None


def test_an_unrecorded_first_generation_keeps_its_number() -> None:
    observed = job_with_warm_workers(4)
    result = make_plan(build.with_status(observed, membership=MembershipStatus(generation=1, size=4)))
    assert result.published_membership.generation == 1


def test_after_a_suspension_the_next_generation_follows_the_recorded_one() -> None:
    status = TrainingJobStatus(desired=4, next_pod_ordinal=9, membership=MembershipStatus(generation=3, size=0))
    pods = tuple(build.pod(ordinal) for ordinal in range(5, 9))
    observed = build.observation(build.job(status=status), pods, build.agents(range(5, 9)))
    result = make_plan(replace(observed, membership=build.membership(0, 1, 2, 3, generation=3)))
    assert result.published_membership.generation == 4
    assert result.actions[-1].replaces == 3
    assert result.status.history == ()


def with_generations(*, recorded: int = 3, published: int = 3, decided: int = 3, reported: int = 3) -> Observed:
    """Return a job with these generations in the ConfigMap, at the coordinator, in the status and in a heartbeat."""
    status = {"membership": MembershipStatus(generation=decided, size=4)}
    agents = {ordinal: build.agent(ordinal, generation=reported if ordinal == 3 else 0) for ordinal in range(4)}
    observed = build.running_job(4, status=status, published=published, agents=agents)
    return replace(observed, membership=build.membership(0, 1, 2, 3, generation=recorded) if recorded else None)


@pytest.mark.parametrize(
    ("numbers", "following"),
    [
        ({}, 4),
        ({"published": 5}, 6),
        ({"reported": 7}, 8),
        ({"reported": 2}, 4),
        ({"decided": 4}, 4),  # decided before a crash, and never published
        ({"decided": 4, "reported": 4}, 5),
        ({"recorded": 0, "published": 0, "decided": 0, "reported": 0}, 1),
        ({"recorded": 0, "published": 0, "decided": 0, "reported": 2}, 3),
        ({"reported": 1003}, 1004),
        ({"reported": 1004}, 4),  # impossibly far ahead
    ],
)
def test_the_next_generation_exceeds_all_that_were_seen(numbers: dict[str, int], following: int) -> None:
    assert compute_next_generation(build.context(with_generations(**numbers))) == following


@pytest.mark.parametrize(("published", "again"), [(2, True), (3, False), (4, False)])
def test_a_recorded_generation_is_republished_to_the_coordinator(published: int, again: bool) -> None:
    observed = with_generations(published=published)
    actions = republish_membership(build.context(observed))
    assert [action.membership for action in actions] == ([observed.membership] if again else [])
    assert [action.replaces for action in actions] == ([3] if again else [])


def test_a_decision_is_dated_once() -> None:
    open_entry = build.interruption(RecoveryResponse.REPLACE, ago=10, took=None, decided_at=None)
    observed = build.without_pods(build.running_job(4, spares=1, status={"history": (open_entry,)}), 1)
    assert make_plan(observed).newest_entry.decided_at == NOW
    dated = open_entry.replaced(decided_at=NOW - 5)
    again = build.with_status(observed, history=(dated,))
    assert make_plan(again).newest_entry.decided_at == NOW - 5
