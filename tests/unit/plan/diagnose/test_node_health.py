"""Reactions of a job to a bad node in use."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.plan_builders import (
    NOW,
    agent,
    condition_of,
    created,
    deleted,
    membership,
    newest,
    node,
    planned,
    pod,
    published,
    ranks,
    running,
    spec,
    training,
    with_pod,
    with_status,
)
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.status.conditions import ConditionStatus, ConditionType
from trainium_contract.status.internal import FailureRecord
from trainium_contract.wire.messages import CheckResult, Transition, WorkerPhase
from trainium_contract.wire.worker_env import ANNOTATION_AVOIDED_NODES
from trainium_operator.plan.model.actions import CreatePod, Plan
from trainium_operator.plan.model.observed import FleetView, NodeCondition, NodeReadiness, NodeView, Observed, PodPhase

DEVICE = NodeCondition("NeuronHealth", NodeReadiness.TRUE, "NeuronHasError_DMA_ERROR", "nd0 nc1", NOW - 1)
NETWORK = NodeCondition("NetworkingReady", NodeReadiness.FALSE, "InterfaceNotUp", "", NOW - 1)
PRESSURE = NodeCondition("DiskPressure", NodeReadiness.TRUE, "KubeletHasDiskPressure", "", NOW - 1)


def bad(seen: Observed, ordinal: int, *conditions: NodeCondition, **changes: Any) -> Observed:
    name = f"node-{ordinal}"
    view = replace(seen.nodes.get(name, node(name)), conditions=conditions, **changes)
    return replace(seen, nodes={**seen.nodes, name: view})


def quarantine(**fields: Any) -> Any:
    return spec(workers={"replicas": 4}, health={"quarantine": fields})


def affinity(result: Plan) -> Any:
    (first, *_) = [action.manifest for action in result.actions if isinstance(action, CreatePod)]
    return first["spec"]["affinity"]


def forbidden(result: Plan) -> list[str]:
    required = affinity(result)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    return list(term["matchExpressions"][-1]["values"])


def healthy(result: Plan) -> tuple[ConditionStatus, str]:
    condition = condition_of(result.status, ConditionType.NODES_HEALTHY)
    return condition.status, condition.message


def test_a_wrong_clock_is_reported_and_replaces_nobody() -> None:
    wrong = CheckResult(
        check=PreflightCheck.CLOCK,
        passed=False,
        seconds=0.1,
        detail="The node's clock is 3600.0 s ahead of the coordinator's; check its NTP.",
    )
    result = planned(running(4, spares=1, agents={1: training(1, checks=(wrong,))}))
    condition = condition_of(result.status, ConditionType.NODES_HEALTHY)
    assert condition.status is ConditionStatus.FALSE
    assert "node-1: check Clock (The node's clock is 3600.0 s ahead of the coordinator's; check its NTP)" in (
        condition.message
    )
    assert "other nodes are preferred" in condition.message
    assert published(result) is None, "no member is replaced"


def test_a_device_fault_moves_the_rank_to_a_spare_gracefully() -> None:
    result = planned(bad(running(spares=1), 2, DEVICE))
    membership = published(result)
    assert ranks(membership) == ["demo-w-0", "demo-w-1", "demo-w-4", "demo-w-3"]
    assert membership is not None
    assert membership.transition is Transition.GRACEFUL
    entry = newest(result)
    assert (entry.cause, entry.node) == (Cause.DEVICE, "node-2")
    assert entry.detected_seconds == 0.5, "since the last step: the ranks trained on after the condition"
    assert "NeuronHasError_DMA_ERROR" in entry.message
    assert "demo-w-2" not in deleted(result), "it still saves"
    assert created(result) == ["demo-w-5"]
    assert forbidden(result) == ["node-2"]
    assert [(record.cause, record.node) for record in result.status.failures] == [(Cause.DEVICE, "node-2")]
    status, message = healthy(result)
    assert status is ConditionStatus.FALSE
    assert "node-2: condition NeuronHealth (NeuronHasError_DMA_ERROR) since 2027-01-15T07:59:59Z" in message


def test_a_device_fault_deletes_the_pod_even_without_a_spare() -> None:
    result = planned(bad(running(), 2, DEVICE))
    assert published(result) is None
    assert deleted(result) == {"demo-w-2": None}
    assert created(result) == ["demo-w-4"]
    assert forbidden(result) == ["node-2"]


def test_loading_ranks_are_replaced_immediately() -> None:
    loading = agent(2, WorkerPhase.LOADING, generation=1)
    membership = published(planned(bad(running(spares=1, agents={2: loading}), 2, DEVICE)))
    assert membership is not None
    assert membership.transition is Transition.IMMEDIATE


def test_a_member_on_a_bad_node_trains_until_a_replacement_is_warm() -> None:
    seen = bad(running(), 2, NETWORK)
    first = planned(seen)
    assert published(first) is None
    assert deleted(first) == {}
    assert created(first) == ["demo-w-4"], "a replacement is created"
    assert first.status.history == (), "nothing was interrupted"

    warm = bad(running(spares=1, job_spec=spec()), 2, NETWORK)
    second = planned(warm)
    membership = published(second)
    assert ranks(membership) == ["demo-w-0", "demo-w-1", "demo-w-4", "demo-w-3"]
    assert membership is not None
    assert membership.transition is Transition.GRACEFUL
    assert newest(second).cause is Cause.NETWORK


def test_a_replaced_member_is_deleted_once_it_is_on_standby() -> None:
    def after(phase: WorkerPhase) -> Plan:
        seen = running(
            spares=1,
            job_spec=spec(),
            agents={
                2: agent(2, phase, generation=1),
                **{at: agent(at, WorkerPhase.LOADING, generation=2) for at in (0, 1, 3, 4)},
            },
            membership=membership(0, 1, 4, 3, generation=2),
            published=2,
        )
        status = seen.job.status.model_copy(
            update={"membership": seen.job.status.membership.model_copy(update={"generation": 2})}
        )
        return planned(bad(with_status(seen, status), 2, NETWORK))

    assert deleted(after(WorkerPhase.TRAINING)) == {}
    assert deleted(after(WorkerPhase.STANDBY)) == {"demo-w-2": None}
    assert created(after(WorkerPhase.STANDBY)) == []


def test_a_lost_worker_gets_the_spare_before_a_bad_node() -> None:
    seen = bad(running(spares=1), 2, NETWORK)
    missing = replace(seen, pods=tuple(each for each in seen.pods if each.ordinal != 0))
    membership = published(planned(missing))
    assert ranks(membership) == ["demo-w-4", "demo-w-1", "demo-w-2", "demo-w-3"]


def test_workers_on_nodes_under_pressure_are_second_choice() -> None:
    seen = bad(running(spares=2), 4, PRESSURE)
    assert published(planned(seen)) is None
    assert published(planned(bad(seen, 2, PRESSURE))) is None, "members stay"
    lost = replace(seen, pods=tuple(each for each in seen.pods if each.ordinal != 0))
    assert ranks(published(planned(lost)))[0] == "demo-w-5"
    alone = replace(lost, pods=tuple(each for each in lost.pods if each.ordinal != 5))
    assert ranks(published(planned(alone)))[0] == "demo-w-4", "better than none"


def test_a_not_ready_node_with_a_training_agent_is_kept() -> None:
    result = planned(bad(running(spares=1), 2, ready=NodeReadiness.FALSE, unready_since=NOW - 40))
    assert published(result) is None
    assert deleted(result) == {}
    assert healthy(result)[0] is ConditionStatus.FALSE


@pytest.mark.parametrize("condition", [DEVICE, NETWORK])
def test_a_spare_on_a_bad_node_is_not_used_and_is_replaced(condition: NodeCondition) -> None:
    seen = bad(running(spares=1), 4, condition)
    result = planned(seen)
    assert deleted(result) == {"demo-w-4": None}
    assert created(result) == ["demo-w-5"]
    assert forbidden(result) == ["node-4"]
    lost = replace(seen, pods=tuple(each for each in seen.pods if each.ordinal != 0))
    assert published(planned(lost)) is None


def test_non_fatal_problems_are_debounced() -> None:
    young = replace(NETWORK, since=NOW - 8)
    seen = bad(running(spares=1, job_spec=quarantine(debounceSeconds=10)), 2, young)
    result = planned(seen)
    assert published(result) is None
    assert result.requeue_after is not None
    assert result.requeue_after <= 2.0
    assert healthy(result)[0] is ConditionStatus.TRUE
    assert published(planned(replace(seen, now=NOW + 2))) is not None
    assert published(planned(bad(seen, 2, DEVICE))) is not None, "a broken device counts at once"


@pytest.mark.parametrize("since", [None, NOW + 3600])
def test_a_problem_of_unknown_age_counts_as_old(since: float | None) -> None:
    seen = bad(running(spares=1, job_spec=quarantine(debounceSeconds=600)), 2, replace(NETWORK, since=since))
    assert published(planned(seen)) is not None


def test_a_frozen_fleet_replaces_only_lost_workers() -> None:
    fleet = FleetView(quarantined=frozenset({"node-4"}), frozen="6 of 20 nodes are bad at once")
    seen = replace(bad(bad(running(spares=1), 2, DEVICE), 3, NETWORK), fleet=fleet)
    result = planned(seen)
    assert published(result) is None
    assert deleted(result) == {}
    assert created(result) == []
    assert "6 of 20 nodes" in healthy(result)[1]
    lost = replace(seen, pods=tuple(each for each in seen.pods if each.ordinal != 0))
    assert ranks(published(planned(lost)))[0] == "demo-w-4"


def test_nodes_in_quarantine_get_no_new_pod_and_their_spares_are_replaced() -> None:
    fleet = FleetView(quarantined=frozenset({"node-4", "node-77"}))
    seen = replace(running(spares=1), fleet=fleet)
    result = planned(seen)
    assert deleted(result) == {"demo-w-4": None}
    assert forbidden(result) == ["node-4", "node-77"]
    made = next(action.manifest for action in result.actions if isinstance(action, CreatePod))
    assert made["metadata"]["annotations"][ANNOTATION_AVOIDED_NODES] == "node-4,node-77"
    members = replace(seen, fleet=FleetView(quarantined=frozenset({"node-2"})))
    assert planned(members).actions == (), "training members stay"


def test_an_unschedulable_pod_is_recreated_when_an_avoided_node_is_released() -> None:
    waits = {"phase": PodPhase.PENDING, "node": "", "unschedulable_message": "0/5 nodes are available"}
    seen = with_pod(running(4, spares=1), pod(4, avoided_nodes=frozenset({"node-4"}), **waits))
    seen = replace(seen, agents={uid: each for uid, each in seen.agents.items() if uid != "uid-4"})

    assert deleted(planned(seen)) == {"demo-w-4": None}
    held = replace(seen, fleet=FleetView(quarantined=frozenset({"node-4"})))
    assert deleted(planned(held)) == {}
    missing = replace(seen, nodes={name: each for name, each in seen.nodes.items() if name != "node-4"})
    assert deleted(planned(missing)) == {}, "a node that does not exist takes no pod"


def test_an_unschedulable_pod_is_recreated_once() -> None:
    """Kept away from one of them after the other, each plan would recreate it for minutes."""
    lost = tuple(
        FailureRecord(at=NOW - 20.0, cause=Cause.NODE_LOST, node=f"node-{number}", pod=f"demo-w-{number}")
        for number in (3, 4)
    )
    waits = {"phase": PodPhase.PENDING, "node": "", "unschedulable_message": "0/5 nodes are available"}
    seen = with_pod(running(4, spares=1), pod(4, avoided_nodes=frozenset({"node-4"}), **waits))
    seen = replace(seen, agents={uid: each for uid, each in seen.agents.items() if uid != "uid-4"})
    seen = with_status(seen, seen.job.status.replaced(failures=lost))

    result = planned(seen)
    assert deleted(result) == {"demo-w-4": None}
    made = next(action.manifest for action in result.actions if isinstance(action, CreatePod))
    avoided_nodes = frozenset(made["metadata"]["annotations"].get(ANNOTATION_AVOIDED_NODES, "").split(",")) - {""}

    ordinal = int(made["metadata"]["name"].rpartition("-")[2])
    pods = tuple(each for each in seen.pods if each.ordinal != 4)
    then = replace(seen, pods=(*pods, pod(ordinal, avoided_nodes=avoided_nodes, **waits)), now=NOW + 1.0)
    again = planned(with_status(then, result.status))
    assert deleted(again) == {}, f"recreated, avoiding {avoided_nodes}"


def test_an_unschedulable_pod_is_kept_while_the_avoided_node_is_bad() -> None:
    waits = {"phase": PodPhase.PENDING, "node": "", "unschedulable_message": "0/5 nodes are available"}
    seen = with_pod(running(4, spares=1), pod(4, avoided_nodes=frozenset({"node-4"}), **waits))
    seen = replace(seen, agents={uid: each for uid, each in seen.agents.items() if uid != "uid-4"})
    broken = NodeCondition("AcceleratedHardwareReady", NodeReadiness.FALSE, "NeuronDMAError")
    still = replace(seen, nodes={**seen.nodes, "node-4": NodeView(name="node-4", conditions=(broken,))})

    assert deleted(planned(still)) == {}, "its quarantine is over, and the next pod would be taken off at once"
    assert deleted(planned(seen)) == {"demo-w-4": None}


def test_a_job_may_ignore_the_quarantine() -> None:
    seen = running(spares=1, job_spec=spec(workers={"spares": 1}, health={"quarantine": {"enabled": False}}))
    assert planned(replace(seen, fleet=FleetView(quarantined=frozenset({"node-4"})))).actions == ()


def test_avoided_nodes_are_named_by_their_hostname_label() -> None:
    labels = {"kubernetes.io/hostname": "ip-10-0-0-4"}
    assert forbidden(planned(bad(running(spares=1), 4, DEVICE, labels=labels))) == ["ip-10-0-0-4"]


def test_node_affinity_of_the_user_is_kept_beside_the_avoided_nodes() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = [{"matchExpressions": [zone]}, {"matchFields": [zone]}]
    template = {
        "spec": {
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            }
        }
    }
    job_spec = spec(workers={"replicas": 4, "spares": 1, "template": template})
    node_affinity = affinity(planned(bad(running(spares=1, job_spec=job_spec), 4, DEVICE)))
    away = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-4"]}
    assert node_affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [
        {"matchExpressions": [zone, away]},
        {"matchFields": [zone], "matchExpressions": [away]},
    ]


def test_an_unchanged_condition_is_stable() -> None:
    seen = bad(running(), 2, PRESSURE)
    first = planned(seen)
    again = replace(seen, job=replace(seen.job, status=first.status), now=NOW + 3)
    assert healthy(planned(again)) == healthy(first)


def test_many_bad_nodes_make_a_short_message() -> None:
    seen = running(8)
    for ordinal in range(8):
        seen = bad(seen, ordinal, PRESSURE)
    assert healthy(planned(seen))[1].endswith("and 5 more nodes")


def test_a_silent_member_is_not_replaced_gracefully() -> None:
    quiet = training(2, silent=30.0)
    result = planned(bad(running(spares=1, agents={2: quiet}), 2, NETWORK))
    membership = published(result)
    assert membership is None or membership.transition is Transition.IMMEDIATE


def test_views_of_nodes_that_cannot_be_read_report_nothing() -> None:
    seen = running()
    assert planned(replace(seen, nodes={name: NodeView(name=name) for name in seen.nodes})).actions == ()
