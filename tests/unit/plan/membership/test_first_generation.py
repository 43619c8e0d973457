from dataclasses import replace
from typing import Any

from plan_builders import (
    NOW,
    agent,
    created,
    heartbeat,
    job,
    kinds,
    membership,
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
)

from trainium_contract.job import TrainingJobStatus
from trainium_contract.status.conditions import Phase
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire.messages import Transition, WorkerPhase
from trainium_operator.plan.model.observed import PodPhase


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


def test_ordinals_whose_pods_were_never_created_are_skipped_and_never_used_again() -> None:
    seen = observed(job(status=TrainingJobStatus(desired=4, next_pod_ordinal=4)))
    assert created(planned(seen)) == ["demo-w-4", "demo-w-5", "demo-w-6", "demo-w-7"]


def test_an_agent_of_a_pod_without_a_node_is_no_member() -> None:
    """A user who may request tokens can get one for a pod that waits for a node, and report with it that it is warm."""
    seen = waiting(4)
    pods = tuple(replace(each, node="", scheduled=False) if each.ordinal == 2 else each for each in seen.pods)
    result = planned(replace(seen, pods=pods))
    assert published(result) is None
    assert result.status.membership.generation == 0


def test_the_first_generation_begins_when_the_desired_workers_are_warm() -> None:
    result = planned(waiting(4))
    found = published(result)
    assert found is not None
    assert found.generation == 1
    assert found.transition is Transition.IMMEDIATE
    assert ranks(found) == ["demo-w-0", "demo-w-1", "demo-w-2", "demo-w-3"]
    assert result.status.membership == MembershipStatus(
        generation=1, size=4, data_parallel=4, passes=6, batch=24, speed=1.0
    )
    assert result.status.waiting_since is None


def test_workers_that_start_are_no_lost_contact_although_none_has_called_yet() -> None:
    seen = replace(waiting(4), agents={}, coordinator_since=NOW - 600)
    reasons = {each.reason for each in planned(seen).status.conditions}
    assert "ContactLost" not in reasons
    older = replace(seen, pods=tuple(replace(each, created=NOW - 700) for each in seen.pods))
    result = planned(older)
    assert any(each.reason == "ContactLost" for each in result.status.conditions), "they called the operator before"


def test_the_first_generation_answers_nothing_and_a_later_one_names_its_reason() -> None:
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


def test_a_worker_that_is_not_warm_yet_is_waited_for() -> None:
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


def test_a_decision_that_was_written_but_not_recorded_is_finished_under_its_number() -> None:
    seen = waiting(4)
    status = seen.job.status.model_copy(update={"membership": MembershipStatus(generation=1, size=4)})
    result = planned(with_status(seen, status))
    assert published(result).generation == 1


def test_a_number_that_an_agent_has_been_in_is_never_used_again() -> None:
    seen = waiting(4)
    agents = {at: agent(at, WorkerPhase.TRAINING, generation=3) for at in range(4)}
    seen = replace(seen, agents={f"uid-{at}": known for at, known in agents.items()})
    assert published(planned(seen)).generation == 4


def test_after_a_suspension_the_next_generation_follows_the_recorded_one() -> None:
    status = TrainingJobStatus(desired=4, next_pod_ordinal=9, membership=MembershipStatus(generation=3, size=0))
    pods = tuple(pod(at) for at in range(5, 9))
    seen = observed(job(status=status), pods, {at: agent(at) for at in range(5, 9)})
    result = planned(replace(seen, membership=membership(0, 1, 2, 3, generation=3)))
    assert published(result).generation == 4
    assert result.actions[-1].replaces == 3
    assert result.status.history == ()
