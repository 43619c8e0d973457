"""Reactions of a job to a bad node in use."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.plan_builders import NOW
from tests.unit.plan.plan_results import PlanResult, make_plan, member_names
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.status.conditions import ConditionStatus, ConditionType
from trainium_contract.status.internal import FailureRecord
from trainium_contract.wire.messages import CheckResult, Transition, WorkerPhase
from trainium_contract.wire.worker_env import ANNOTATION_AVOIDED_NODES
from trainium_operator.plan.model.observed import FleetView, NodeCondition, NodeReadiness, NodeView, Observed, PodPhase

DEVICE = NodeCondition("NeuronHealth", NodeReadiness.TRUE, "NeuronHasError_DMA_ERROR", "nd0 nc1", NOW - 1)
NETWORK = NodeCondition("NetworkingReady", NodeReadiness.FALSE, "InterfaceNotUp", "", NOW - 1)
PRESSURE = NodeCondition("DiskPressure", NodeReadiness.TRUE, "KubeletHasDiskPressure", "", NOW - 1)


def with_bad_node(observed: Observed, ordinal: int, *conditions: NodeCondition, **changes: Any) -> Observed:
    name = f"node-{ordinal}"
    view = replace(observed.nodes.get(name, build.node(name)), conditions=conditions, **changes)
    return build.with_node(observed, view)


def quarantine(**fields: Any) -> Any:
    return build.spec(workers={"replicas": 4}, health={"quarantine": fields})


def affinity(result: PlanResult) -> Any:
    return result.created_manifests[0]["spec"]["affinity"]


def forbidden_nodes(result: PlanResult) -> list[str]:
    required = affinity(result)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    return list(term["matchExpressions"][-1]["values"])


def nodes_healthy_condition(result: PlanResult) -> tuple[ConditionStatus, str]:
    condition = result.condition(ConditionType.NODES_HEALTHY)
    return condition.status, condition.message


def test_a_wrong_clock_is_reported_and_replaces_nobody() -> None:
    wrong = CheckResult(
        check=PreflightCheck.CLOCK,
        passed=False,
        seconds=0.1,
        detail="The node's clock is 3600.0 s ahead of the coordinator's; check its NTP.",
    )
    result = make_plan(build.running_job(4, spares=1, agents={1: build.training_agent(1, checks=(wrong,))}))
    condition = result.condition(ConditionType.NODES_HEALTHY)
    assert condition.status is ConditionStatus.FALSE
    assert "node-1: check Clock (The node's clock is 3600.0 s ahead of the coordinator's; check its NTP)" in (
        condition.message
    )
    assert "other nodes are preferred" in condition.message
    assert result.published_membership is None, "no member is replaced"


def test_a_device_fault_moves_the_rank_to_a_spare_gracefully() -> None:
    result = make_plan(with_bad_node(build.running_job(spares=1), 2, DEVICE))
    membership = result.published_membership
    assert member_names(membership) == ["demo-w-0", "demo-w-1", "demo-w-4", "demo-w-3"]
    assert membership is not None
    assert membership.transition is Transition.GRACEFUL
    entry = result.newest_entry
    assert (entry.cause, entry.node) == (Cause.DEVICE, "node-2")
    assert entry.detected_seconds == 0.5, "since the last step: the ranks trained on after the condition"
    assert "NeuronHasError_DMA_ERROR" in entry.message
    assert "demo-w-2" not in result.deleted_pods, "it still saves"
    assert result.created_pods == ["demo-w-5"]
    assert forbidden_nodes(result) == ["node-2"]
    assert [(record.cause, record.node) for record in result.status.failures] == [(Cause.DEVICE, "node-2")]
    status, message = nodes_healthy_condition(result)
    assert status is ConditionStatus.FALSE
    assert "node-2: condition NeuronHealth (NeuronHasError_DMA_ERROR) since 2027-01-15T07:59:59Z" in message


def test_a_device_fault_deletes_the_pod_even_without_a_spare() -> None:
    result = make_plan(with_bad_node(build.running_job(), 2, DEVICE))
    assert result.published_membership is None
    assert result.deleted_pods == {"demo-w-2": None}
    assert result.created_pods == ["demo-w-4"]
    assert forbidden_nodes(result) == ["node-2"]


def test_loading_ranks_are_replaced_immediately() -> None:
    loading = build.agent(2, WorkerPhase.LOADING, generation=1)
    membership = make_plan(
        with_bad_node(build.running_job(spares=1, agents={2: loading}), 2, DEVICE)
    ).published_membership
    assert membership is not None
    assert membership.transition is Transition.IMMEDIATE


def test_a_member_on_a_bad_node_trains_until_a_replacement_is_warm() -> None:
    observed = with_bad_node(build.running_job(), 2, NETWORK)
    first = make_plan(observed)
    assert first.published_membership is None
    assert first.deleted_pods == {}
    assert first.created_pods == ["demo-w-4"], "a replacement is created"
    assert first.status.history == (), "nothing was interrupted"

    warm = with_bad_node(build.running_job(spares=1, job_spec=build.spec()), 2, NETWORK)
    second = make_plan(warm)
    membership = second.published_membership
    assert member_names(membership) == ["demo-w-0", "demo-w-1", "demo-w-4", "demo-w-3"]
    assert membership is not None
    assert membership.transition is Transition.GRACEFUL
    assert second.newest_entry.cause is Cause.NETWORK


def test_a_replaced_member_is_deleted_once_it_is_on_standby() -> None:
    def after(phase: WorkerPhase) -> PlanResult:
        observed = build.running_job(
            spares=1,
            job_spec=build.spec(),
            agents={
                2: build.agent(2, phase, generation=1),
                **build.agents((0, 1, 3, 4), WorkerPhase.LOADING, generation=2),
            },
            membership=build.membership(0, 1, 4, 3, generation=2),
            published=2,
        )
        status = observed.job.status.model_copy(
            update={"membership": observed.job.status.membership.model_copy(update={"generation": 2})}
        )
        return make_plan(with_bad_node(build.with_status(observed, status), 2, NETWORK))

    assert after(WorkerPhase.TRAINING).deleted_pods == {}
    assert after(WorkerPhase.STANDBY).deleted_pods == {"demo-w-2": None}
    assert after(WorkerPhase.STANDBY).created_pods == []


def test_a_lost_worker_gets_the_spare_before_a_bad_node() -> None:
    observed = with_bad_node(build.running_job(spares=1), 2, NETWORK)
    missing = build.without_pods(observed, 0, keep_agents=True)
    assert make_plan(missing).published_members == ["demo-w-4", "demo-w-1", "demo-w-2", "demo-w-3"]


def test_workers_on_nodes_under_pressure_are_second_choice() -> None:
    observed = with_bad_node(build.running_job(spares=2), 4, PRESSURE)
    assert make_plan(observed).published_membership is None
    assert make_plan(with_bad_node(observed, 2, PRESSURE)).published_membership is None, "members stay"
    lost = build.without_pods(observed, 0, keep_agents=True)
    assert make_plan(lost).published_members[0] == "demo-w-5"
    alone = build.without_pods(lost, 5, keep_agents=True)
    assert make_plan(alone).published_members[0] == "demo-w-4", "better than none"


def test_a_not_ready_node_with_a_training_agent_is_kept() -> None:
    result = make_plan(with_bad_node(build.running_job(spares=1), 2, ready=NodeReadiness.FALSE, unready_since=NOW - 40))
    assert result.published_membership is None
    assert result.deleted_pods == {}
    assert nodes_healthy_condition(result)[0] is ConditionStatus.FALSE


@pytest.mark.parametrize("condition", [DEVICE, NETWORK])
def test_a_spare_on_a_bad_node_is_not_used_and_is_replaced(condition: NodeCondition) -> None:
    observed = with_bad_node(build.running_job(spares=1), 4, condition)
    result = make_plan(observed)
    assert result.deleted_pods == {"demo-w-4": None}
    assert result.created_pods == ["demo-w-5"]
    assert forbidden_nodes(result) == ["node-4"]
    lost = build.without_pods(observed, 0, keep_agents=True)
    assert make_plan(lost).published_membership is None


def test_non_fatal_problems_are_debounced() -> None:
    young = replace(NETWORK, since=NOW - 8)
    observed = with_bad_node(build.running_job(spares=1, job_spec=quarantine(debounceSeconds=10)), 2, young)
    result = make_plan(observed)
    assert result.published_membership is None
    assert result.requeue_after is not None
    assert result.requeue_after <= 2.0
    assert nodes_healthy_condition(result)[0] is ConditionStatus.TRUE
    assert make_plan(replace(observed, now=NOW + 2)).published_membership is not None
    assert make_plan(with_bad_node(observed, 2, DEVICE)).published_membership is not None, (
        "a broken device counts at once"
    )


@pytest.mark.parametrize("since", [None, NOW + 3600])
def test_a_problem_of_unknown_age_counts_as_old(since: float | None) -> None:
    observed = with_bad_node(
        build.running_job(spares=1, job_spec=quarantine(debounceSeconds=600)), 2, replace(NETWORK, since=since)
    )
    assert make_plan(observed).published_membership is not None


def test_a_frozen_fleet_replaces_only_lost_workers() -> None:
    fleet = FleetView(quarantined=frozenset({"node-4"}), frozen="6 of 20 nodes are bad at once")
    observed = replace(with_bad_node(with_bad_node(build.running_job(spares=1), 2, DEVICE), 3, NETWORK), fleet=fleet)
    result = make_plan(observed)
    assert result.published_membership is None
    assert result.deleted_pods == {}
    assert result.created_pods == []
    assert "6 of 20 nodes" in nodes_healthy_condition(result)[1]
    lost = build.without_pods(observed, 0, keep_agents=True)
    assert make_plan(lost).published_members[0] == "demo-w-4"


def test_nodes_in_quarantine_get_no_new_pod_and_their_spares_are_replaced() -> None:
    fleet = FleetView(quarantined=frozenset({"node-4", "node-77"}))
    observed = replace(build.running_job(spares=1), fleet=fleet)
    result = make_plan(observed)
    assert result.deleted_pods == {"demo-w-4": None}
    assert forbidden_nodes(result) == ["node-4", "node-77"]
    manifest, *_ = result.created_manifests
    assert manifest["metadata"]["annotations"][ANNOTATION_AVOIDED_NODES] == "node-4,node-77"
    members = replace(observed, fleet=FleetView(quarantined=frozenset({"node-2"})))
    assert make_plan(members).actions == (), "training members stay"


UNSCHEDULABLE = {"phase": PodPhase.PENDING, "node": "", "unschedulable_message": "0/5 nodes are available"}


def with_unschedulable_spare() -> Observed:
    """Return a job whose spare waits for a node and avoids node-4."""
    observed = build.running_job(4, spares=1)
    spare = build.pod(4, avoided_nodes=frozenset({"node-4"}), **UNSCHEDULABLE)
    return replace(build.without_pods(observed, 4), pods=(*observed.pods[:4], spare), nodes=observed.nodes)


def test_an_unschedulable_pod_is_recreated_when_an_avoided_node_is_released() -> None:
    observed = with_unschedulable_spare()

    assert make_plan(observed).deleted_pods == {"demo-w-4": None}
    held = replace(observed, fleet=FleetView(quarantined=frozenset({"node-4"})))
    assert make_plan(held).deleted_pods == {}
    missing = replace(observed, nodes={name: node for name, node in observed.nodes.items() if name != "node-4"})
    assert make_plan(missing).deleted_pods == {}, "a node that does not exist takes no pod"


def test_an_unschedulable_pod_is_recreated_once() -> None:
    """Kept away from one of them after the other, each plan would recreate it for minutes."""
    lost = tuple(
        FailureRecord(at=NOW - 20.0, cause=Cause.NODE_LOST, node=f"node-{number}", pod=f"demo-w-{number}")
        for number in (3, 4)
    )
    observed = with_unschedulable_spare()
    observed = build.with_status(observed, failures=lost)

    result = make_plan(observed)
    assert result.deleted_pods == {"demo-w-4": None}
    manifest, *_ = result.created_manifests
    avoided_nodes = frozenset(manifest["metadata"]["annotations"].get(ANNOTATION_AVOIDED_NODES, "").split(",")) - {""}

    ordinal = int(manifest["metadata"]["name"].rpartition("-")[2])
    pods = tuple(pod for pod in observed.pods if pod.ordinal != 4)
    recreated = replace(
        observed, pods=(*pods, build.pod(ordinal, avoided_nodes=avoided_nodes, **UNSCHEDULABLE)), now=NOW + 1.0
    )
    again = make_plan(build.with_status(recreated, result.status))
    assert again.deleted_pods == {}, f"recreated, avoiding {avoided_nodes}"


def test_an_unschedulable_pod_is_kept_while_the_avoided_node_is_bad() -> None:
    observed = with_unschedulable_spare()
    broken = NodeCondition("AcceleratedHardwareReady", NodeReadiness.FALSE, "NeuronDMAError")
    still_bad = build.with_node(observed, NodeView(name="node-4", conditions=(broken,)))

    assert make_plan(still_bad).deleted_pods == {}, (
        "its quarantine is over, and the next pod would be taken off at once"
    )
    assert make_plan(observed).deleted_pods == {"demo-w-4": None}


def test_a_job_may_ignore_the_quarantine() -> None:
    observed = build.running_job(
        spares=1, job_spec=build.spec(workers={"spares": 1}, health={"quarantine": {"enabled": False}})
    )
    assert make_plan(replace(observed, fleet=FleetView(quarantined=frozenset({"node-4"})))).actions == ()


def test_avoided_nodes_are_named_by_their_hostname_label() -> None:
    labels = {"kubernetes.io/hostname": "ip-10-0-0-4"}
    assert forbidden_nodes(make_plan(with_bad_node(build.running_job(spares=1), 4, DEVICE, labels=labels))) == [
        "ip-10-0-0-4"
    ]


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
    job_spec = build.spec(workers={"replicas": 4, "spares": 1, "template": template})
    node_affinity = affinity(make_plan(with_bad_node(build.running_job(spares=1, job_spec=job_spec), 4, DEVICE)))
    away = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-4"]}
    assert node_affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [
        {"matchExpressions": [zone, away]},
        {"matchFields": [zone], "matchExpressions": [away]},
    ]


def test_an_unchanged_condition_is_stable() -> None:
    observed = with_bad_node(build.running_job(), 2, PRESSURE)
    first = make_plan(observed)
    again = replace(observed, job=replace(observed.job, status=first.status), now=NOW + 3)
    assert nodes_healthy_condition(make_plan(again)) == nodes_healthy_condition(first)


def test_many_bad_nodes_make_a_short_message() -> None:
    observed = build.running_job(8)
    for ordinal in range(8):
        observed = with_bad_node(observed, ordinal, PRESSURE)
    assert nodes_healthy_condition(make_plan(observed))[1].endswith("and 5 more nodes")


def test_a_silent_member_is_not_replaced_gracefully() -> None:
    quiet = build.training_agent(2, silent=30.0)
    result = make_plan(with_bad_node(build.running_job(spares=1, agents={2: quiet}), 2, NETWORK))
    membership = result.published_membership
    assert membership is None or membership.transition is Transition.IMMEDIATE


def test_views_of_nodes_that_cannot_be_read_report_nothing() -> None:
    observed = build.running_job()
    assert make_plan(replace(observed, nodes={name: NodeView(name=name) for name in observed.nodes})).actions == ()
