"""The first generation of a job, and the numbers of generations."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import (
    NOW,
    agent,
    created,
    facts_of,
    heartbeat,
    interruption,
    job,
    kinds,
    membership,
    newest,
    node,
    observed,
    planned,
    pod,
    published,
    ranks,
    running,
    spec,
    with_pod,
    with_status,
    without,
)
from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import Phase
from trainium_contract.status.interruptions import Rung
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire.messages import Transition
from trainium_operator.plan.membership.generation import next_generation, republish_membership
from trainium_operator.plan.model.observed import Observed, PodPhase


def waiting(count: Any, job_spec: Any = None, since: Any = NOW, **changes: Any) -> Any:
    status = TrainingJobStatus(desired=4, next_pod_ordinal=count, waiting_since=since)
    view = job(job_spec or spec(), status)
    pods = tuple(pod(at) for at in range(count))
    return observed(view, pods, {at: agent(at) for at in range(count)}, **changes)


def test_a_new_job_gets_its_configuration_before_its_pods() -> None:
    result = planned(replace(observed(job(spec(workers={"spares": 1}))), children={}))
    assert kinds(result.actions) == ["ApplyObject", *["CreatePod"] * 5]
    assert created(result) == [f"demo-w-{at}" for at in range(5)]
    assert result.status.next_pod_ordinal == 5
    assert result.status.phase is Phase.PENDING


def test_ordinals_are_never_reused() -> None:
    seen = observed(job(status=TrainingJobStatus(desired=4, next_pod_ordinal=4)))
    assert created(planned(seen)) == ["demo-w-4", "demo-w-5", "demo-w-6", "demo-w-7"]


def test_an_agent_of_a_pod_without_a_node_is_no_member() -> None:
    """A user who may create tokens can get one of a pending pod and report it as warm."""
    seen = waiting(4)
    pods = tuple(replace(each, node="", scheduled=False) if each.ordinal == 2 else each for each in seen.pods)
    result = planned(replace(seen, pods=pods))
    assert published(result) is None
    assert result.status.membership.generation == 0


def test_the_first_generation_begins_when_the_desired_workers_are_warm() -> None:
    result = planned(waiting(4))
    membership = published(result)
    assert membership is not None
    assert membership.generation == 1
    assert membership.transition is Transition.IMMEDIATE
    assert ranks(membership) == ["demo-w-0", "demo-w-1", "demo-w-2", "demo-w-3"]
    assert result.status.membership == MembershipStatus(
        generation=1, size=4, data_parallel=4, passes=6, batch=24, speed=1.0
    )
    assert result.status.waiting_since is None


def test_starting_workers_are_not_lost_contact() -> None:
    seen = replace(waiting(4), agents={}, coordinator_since=NOW - 600)
    reasons = {each.reason for each in planned(seen).status.conditions}
    assert "ContactLost" not in reasons
    older = replace(seen, pods=tuple(replace(each, created=NOW - 700) for each in seen.pods))
    result = planned(older)
    assert any(each.reason == "ContactLost" for each in result.status.conditions), "they called the operator before"


def test_only_later_generations_name_a_reason_in_their_event() -> None:
    def messages(seen: Any) -> list[str]:
        return [each.note for each in planned(seen).events if each.reason == "GenerationStarted"]

    assert messages(waiting(4)) == ["Generation 1 begins on 4 nodes."]
    lost = with_pod(running(4, spares=1), pod(1, phase=PodPhase.FAILED, reason="Evicted"))
    assert messages(lost) == ["Generation 2 begins on 4 nodes (Preempted, Immediate)."]


def test_ranks_follow_the_nodes_so_that_neighbours_are_next_to_each_other() -> None:
    seen = waiting(4)
    pods = tuple(replace(each, node=f"node-{9 - each.ordinal}") for each in seen.pods)
    seen = replace(seen, pods=pods, nodes={each.node: node(each.node) for each in pods})
    assert ranks(published(planned(seen))) == ["demo-w-3", "demo-w-2", "demo-w-1", "demo-w-0"]


def test_the_first_generation_waits_for_cold_workers() -> None:
    seen = waiting(4)
    cold = replace(seen.agents["uid-2"], heartbeat=heartbeat(2, ready=False))
    assert published(planned(replace(seen, agents={**seen.agents, "uid-2": cold}))) is None


def test_an_elastic_job_starts_smaller_after_the_wait() -> None:
    elastic = spec(workers={"minReplicas": 2})
    seen = waiting(3, elastic, since=NOW - 119)
    pending = pod(3, node="", scheduled=False, phase=PodPhase.PENDING)
    early = planned(replace(seen, pods=(*seen.pods, pending)))
    assert published(early) is None
    assert early.requeue_after == 1.0
    late = planned(waiting(3, elastic, since=NOW - 120))
    assert len(ranks(published(late))) == 3
    assert late.status.waiting_since == NOW


def test_a_rigid_job_waits_for_all_its_workers() -> None:
    assert published(planned(waiting(3, since=NOW - 10_000))) is None


def test_an_unrecorded_first_generation_keeps_its_number() -> None:
    seen = waiting(4)
    status = seen.job.status.model_copy(update={"membership": MembershipStatus(generation=1, size=4)})
    result = planned(with_status(seen, status))
    assert published(result).generation == 1


def test_after_a_suspension_the_next_generation_follows_the_recorded_one() -> None:
    status = TrainingJobStatus(desired=4, next_pod_ordinal=9, membership=MembershipStatus(generation=3, size=0))
    pods = tuple(pod(at) for at in range(5, 9))
    seen = observed(job(status=status), pods, {at: agent(at) for at in range(5, 9)})
    result = planned(replace(seen, membership=membership(0, 1, 2, 3, generation=3)))
    assert published(result).generation == 4
    assert result.actions[-1].replaces == 3
    assert result.status.history == ()


def with_generations(*, recorded: int = 3, published: int = 3, known: int = 3, seen: int = 3) -> Observed:
    """Return a job with these generations in the ConfigMap, at the coordinator, in the status and of an agent."""
    status = {"membership": MembershipStatus(generation=known, size=4)}
    agents = {at: agent(at, generation=seen if at == 3 else 0) for at in range(4)}
    here = running(4, status=status, published=published, agents=agents)
    return replace(here, membership=membership(0, 1, 2, 3, generation=recorded) if recorded else None)


@pytest.mark.parametrize(
    ("numbers", "following"),
    [
        ({}, 4),
        ({"published": 5}, 6),
        ({"seen": 7}, 8),
        ({"seen": 2}, 4),
        ({"known": 4}, 4),  # decided before a crash, and never published
        ({"known": 4, "seen": 4}, 5),
        ({"recorded": 0, "published": 0, "known": 0, "seen": 0}, 1),
        ({"recorded": 0, "published": 0, "known": 0, "seen": 2}, 3),
        ({"seen": 1003}, 1004),
        ({"seen": 1004}, 4),  # impossibly far ahead
    ],
)
def test_the_next_generation_exceeds_all_that_were_seen(numbers: dict[str, int], following: int) -> None:
    assert next_generation(facts_of(with_generations(**numbers))) == following


@pytest.mark.parametrize(("published", "again"), [(2, True), (3, False), (4, False)])
def test_a_recorded_generation_is_republished_to_the_coordinator(published: int, again: bool) -> None:
    seen = with_generations(published=published)
    actions = republish_membership(facts_of(seen))
    assert [action.membership for action in actions] == ([seen.membership] if again else [])
    assert [action.replaces for action in actions] == ([3] if again else [])


def test_a_decision_is_dated_once() -> None:
    open_entry = interruption(Rung.REPLACE, ago=10, took=None, decided_at=None)
    seen = without(running(4, spares=1, status={"history": (open_entry,)}), 1)
    assert newest(planned(seen)).decided_at == NOW
    dated = open_entry.replaced(decided_at=NOW - 5)
    again = with_status(seen, seen.job.status.replaced(history=(dated,)))
    assert newest(planned(again)).decided_at == NOW - 5
