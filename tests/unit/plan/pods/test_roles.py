"""Pods of `spec.roles`: their creation, replacement, addresses and end, and what they never change."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan import plan_builders as build
from tests.unit.plan.kueue_builders import EVICTED, workload
from tests.unit.plan.plan_builders import NOW, SETTINGS
from tests.unit.plan.plan_results import PlanResult, check_ledger, get_condition, make_plan
from trainium_contract.faults.causes import Cause
from trainium_contract.job import GoodputStatus, TrainingJobStatus
from trainium_contract.status.conditions import ConditionStatus, ConditionType
from trainium_contract.status.internal import FailureRecord, RoleState
from trainium_contract.status.ledger import OVERHEAD, ROLE_WAIT
from trainium_contract.status.public import MembershipStatus, RoleStatus
from trainium_operator.plan.model.actions import (
    ApplyOptional,
    ApplyWorkload,
    CreateOtherPod,
    CreatePod,
    DeleteOtherPod,
    DeletePod,
    PublishEndpoints,
    PublishMembership,
    SetQuotaConditions,
)
from trainium_operator.plan.model.observed import (
    ApiState,
    FleetView,
    NodeReadiness,
    Observed,
    PodPhase,
    PodView,
    Taint,
    WorkerIngress,
    WriteRefusal,
)
from trainium_operator.plan.model.quota import (
    Placement,
    QuotaView,
)
from trainium_operator.plan.model.reasons import Reason

TEMPLATE = {"spec": {"containers": [{"image": "vllm:1", "args": ["--model", "m"]}]}}


def role_spec(**changes: Any) -> dict[str, Any]:
    return {"name": "rollout", "replicas": 3, "port": 8000, "minReady": 2, "template": TEMPLATE, **changes}


def role_pod(ordinal: int, **changes: Any) -> PodView:
    """Return a ready pod of role rollout on `serving-<ordinal>`."""
    fields = {
        "name": f"demo-rollout-{ordinal}",
        "uid": f"role-{ordinal}",
        "node": f"serving-{ordinal}",
        "ip": f"10.1.0.{ordinal}",
        "role": "rollout",
        **changes,
    }
    return build.pod(ordinal, **fields)


def failed_pod(ordinal: int, code: int = 1, **changes: Any) -> PodView:
    return role_pod(ordinal, **{"phase": PodPhase.FAILED, "exit_code": code, "ready": False, **changes})


def with_role_pods(observed: Observed, *pods: PodView) -> Observed:
    """Return the observation with these pods of roles, and their nodes."""
    nodes = {pod.node: build.node(pod.node) for pod in pods if pod.node and pod.node not in observed.nodes}
    return replace(observed, other_pods=pods, nodes={**observed.nodes, **nodes})


def job_with_roles(
    *pods: PodView, roles: tuple[dict[str, Any], ...] = (role_spec(),), training: bool = True, **changes: Any
) -> Observed:
    """Return a job that trains, or whose four workers are warm, with these pods of its roles."""
    spec = build.program_spec(roles=list(roles), **changes.pop("spec", {}))
    status = {"role_states": (RoleState(name="rollout", next_ordinal=len(pods)),), **changes.pop("status", {})}
    if training:
        observed = build.running_job(job_spec=spec, status=status, **changes)
    else:
        view = build.job(spec, TrainingJobStatus(next_pod_ordinal=4, **status))
        workers = {"pods": tuple(map(build.pod, range(4))), "agents": build.agents(range(4)), **changes}
        observed = build.observation(view, **workers)
    return with_role_pods(observed, *pods)


def applied(observed: Observed, result: PlanResult) -> Observed:
    """Return the observation after the writes of a plan, without its pods."""
    children = dict(observed.children)
    for action in result.actions_of_type(ApplyOptional):
        metadata = action.manifest["metadata"]
        children[f"{action.manifest['kind']}/{metadata['name']}"] = metadata["annotations"]["trainium.dev/content-hash"]
    published = [action.endpoints for action in result.actions_of_type(PublishEndpoints)]
    changed = replace(observed, children=children, endpoints=(published or [observed.endpoints])[0])
    return build.with_status(changed, result.status)


def created(result: PlanResult) -> list[str]:
    return [action.manifest["metadata"]["name"] for action in result.actions_of_type(CreateOtherPod)]


def deleted(result: PlanResult) -> dict[str, int | None]:
    return {action.name: action.grace_seconds for action in result.actions_of_type(DeleteOtherPod)}


def role_of(result: PlanResult) -> RoleStatus:
    (role,) = result.status.roles
    return role


def test_a_job_without_roles_creates_and_reports_nothing_of_them() -> None:
    observed = build.running_job(job_spec=build.program_spec())
    result = make_plan(replace(observed, other_pods=()))
    assert result.actions == make_plan(observed).actions
    assert (result.status.roles, result.status.role_states) == ((), ())
    assert all(condition.type is not ConditionType.ROLES_READY for condition in result.status.conditions)


def test_a_role_gets_its_pods_service_and_budget_once() -> None:
    observed = job_with_roles()
    result = make_plan(observed)
    assert created(result) == ["demo-rollout-0", "demo-rollout-1", "demo-rollout-2"]
    objects = {action.manifest["kind"]: action.manifest for action in result.actions_of_type(ApplyOptional)}
    assert objects["Service"]["metadata"]["name"] == "demo-rollout"
    selector = {"trainium.dev/job-name": "demo", "trainium.dev/role": "rollout"}
    assert (objects["Service"]["spec"]["clusterIP"], objects["Service"]["spec"]["selector"]) == ("None", selector)
    budget = objects["PodDisruptionBudget"]["spec"]
    assert (budget["minAvailable"], budget["selector"]["matchLabels"]) == (2, selector)
    after = with_role_pods(applied(observed, result), *map(role_pod, range(3)))
    after = applied(after, make_plan(after))
    assert make_plan(after).actions == (), "the plan of a state that the last plan led to has no actions"


def test_a_pod_of_a_role_is_an_ordinary_pod_without_what_makes_a_member() -> None:
    accelerator = {"instanceType": "trn2.48xlarge"}
    roles = (role_spec(accelerator=accelerator),)
    observed = job_with_roles(roles=roles, spec={"scheduling": {"priorityClassName": "high"}})
    (pod, *_) = [action.manifest for action in make_plan(observed).actions_of_type(CreateOtherPod)]
    (container,) = pod["spec"]["containers"]
    assert (container["name"], container["image"], container["args"]) == ("rollout", "vllm:1", ["--model", "m"])
    assert container["resources"]["limits"]["aws.amazon.com/neuron"] == "16"
    assert container["readinessProbe"]["tcpSocket"] == {"port": 8000}
    assert container["ports"] == [{"containerPort": 8000, "protocol": "TCP"}]
    assert pod["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "trn2.48xlarge"}
    assert (pod["spec"]["restartPolicy"], pod["spec"]["priorityClassName"]) == ("Never", "high")
    assert (pod["spec"]["automountServiceAccountToken"], pod["spec"]["securityContext"]["runAsNonRoot"]) == (
        False,
        True,
    )
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert "volumes" not in pod["spec"]
    identity = {f"TRAINIUM_{name}" for name in ("NAMESPACE", "JOB", "ROLE", "ROLE_PORT")}
    assert {variable["name"] for variable in container["env"]} == identity | {"POD_IP"}
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "job-uid"
    assert pod["metadata"]["labels"]["trainium.dev/role"] == "rollout"


def test_the_template_may_set_anything_but_the_identity() -> None:
    template = {
        "metadata": {"labels": {"trainium.dev/role": "worker", "team": "rl"}},
        "spec": {
            "restartPolicy": "Always",
            "serviceAccountName": "judge",
            "containers": [
                {"name": "server", "command": ["serve"], "readinessProbe": {"exec": {"command": ["true"]}}},
                {"name": "sidecar", "image": "proxy:1"},
            ],
        },
    }
    observed = job_with_roles(roles=(role_spec(template=template),))
    pod = make_plan(observed).actions_of_type(CreateOtherPod)[0].manifest
    labels, spec = pod["metadata"]["labels"], pod["spec"]
    assert (labels["trainium.dev/role"], labels["team"]) == ("rollout", "rl")
    assert (spec["restartPolicy"], spec["serviceAccountName"]) == ("Never", "judge")
    images = {container["name"]: container["image"] for container in spec["containers"]}
    assert images == {"server": "team/own:5", "sidecar": "proxy:1"}
    assert spec["containers"][0]["readinessProbe"] == {"exec": {"command": ["true"]}}


def test_pods_of_roles_accept_each_other_and_workers_accept_none_of_them() -> None:
    settings = replace(SETTINGS, worker_ingress=WorkerIngress(operator_namespace="system", operator_labels={"a": "b"}))
    result = make_plan(replace(job_with_roles(), policies_listed=True), settings)
    policies = {
        action.manifest["metadata"]["name"]: action.manifest["spec"]
        for action in result.actions_of_type(ApplyOptional)
        if action.manifest["kind"] == "NetworkPolicy"
    }
    peers = policies["demo-workers"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert peers["trainium.dev/role"] == "worker"
    others = policies["demo-roles"]["podSelector"]
    assert policies["demo-roles"]["ingress"] == [{"from": [{"podSelector": others}]}]
    assert others["matchExpressions"][0]["operator"] == "NotIn"


@pytest.mark.parametrize(("policy", "waits_with_pods"), [("WithWorkers", True), ("BeforeWorkers", False)], ids=str)
def test_training_starts_when_enough_pods_are_ready(policy: str, waits_with_pods: bool) -> None:
    roles = (role_spec(startupPolicy=policy),)
    empty = job_with_roles(role_pod(0), roles=roles, training=False, pods=(), agents={}, status={})
    first = make_plan(empty)
    assert bool(first.actions_of_type(CreatePod)) is waits_with_pods
    assert first.condition(ConditionType.READY).reason == "WaitingForRoles"
    enough = make_plan(with_role_pods(empty, role_pod(0), role_pod(1)))
    assert enough.actions_of_type(CreatePod)
    warm = job_with_roles(role_pod(0), roles=roles, training=False)
    waiting = make_plan(warm)
    assert not waiting.actions_of_type(PublishMembership)
    condition = waiting.condition(ConditionType.ROLES_READY)
    assert condition.status is ConditionStatus.FALSE
    assert "role rollout: 1 of 3 pods are ready" in condition.message
    assert "training waits for 2" in condition.message
    assert waiting.condition(ConditionType.READY).message == condition.message
    ready = make_plan(with_role_pods(warm, role_pod(0), role_pod(1)))
    kinds = ready.action_kinds
    assert kinds.index("PublishEndpoints") < kinds.index("PublishMembership"), "ranks read the addresses at their start"


def test_training_waits_for_no_role_with_min_ready_0_and_for_none_while_pods_are_unknown() -> None:
    never = job_with_roles(roles=(role_spec(minReady=0),), training=False)
    assert make_plan(never).actions_of_type(PublishMembership)
    unknown = replace(never, other_pods=None)
    result = make_plan(unknown)
    assert not result.actions_of_type(PublishMembership)
    assert not created(result)


@pytest.mark.parametrize(
    "lost",
    [
        {"ready": False},
        {"deleting": True},
        {"disrupted": True},
        {"exit_code": 137, "phase": PodPhase.FAILED},
        {"ip": ""},
    ],
    ids=str,
)
def test_addresses_are_those_of_pods_that_serve(lost: dict[str, Any]) -> None:
    result = make_plan(job_with_roles(role_pod(0), role_pod(1, **lost), role_pod(2)))
    published = result.only_action(PublishEndpoints)
    assert published.endpoints.addresses == {"rollout": ("10.1.0.0:8000", "10.1.0.2:8000")}
    assert published.endpoints.is_waiting is False


def test_a_pod_on_a_node_that_does_not_report_serves_no_more_and_training_goes_on() -> None:
    observed = job_with_roles(role_pod(0), role_pod(1), role_pod(2))
    for name in ("serving-0", "serving-1"):
        observed = build.with_node(observed, build.node(name, NodeReadiness.UNKNOWN))
    result = make_plan(observed)
    published = result.only_action(PublishEndpoints)
    assert (published.endpoints.addresses, published.endpoints.is_waiting) == ({"rollout": ("10.1.0.2:8000",)}, True)
    assert not result.actions_of_type(PublishMembership)
    assert not result.actions_of_type(DeletePod)
    assert result.status.history == ()


@pytest.mark.parametrize(
    ("pod", "cause", "blamed"),
    [
        (failed_pod(0, 1), Cause.CRASH, ""),
        (failed_pod(0, 137), Cause.CRASH, ""),
        (failed_pod(0, 137, reason="OOMKilled"), Cause.OUT_OF_MEMORY, ""),
        (failed_pod(0, 0, phase=PodPhase.SUCCEEDED), Cause.FINISHED, ""),
        (failed_pod(0, 80), Cause.CRASH, ""),
        (failed_pod(0, 1, reason="Evicted", message="The node was low on resource: memory."), Cause.HOST, "serving-0"),
        (failed_pod(0, 1, reason="NodeShutdown"), Cause.NODE_LOST, "serving-0"),
    ],
    ids=lambda value: str(getattr(value, "exit_code", value)),
)
def test_an_ended_pod_is_replaced_alone_and_classified_by_the_table(pod: PodView, cause: Cause, blamed: str) -> None:
    observed = job_with_roles(pod, role_pod(1), role_pod(2))
    result = make_plan(observed)
    assert deleted(result) == {"demo-rollout-0": None}
    assert created(result) == ["demo-rollout-3"]
    (state,) = result.status.role_states
    assert [(record.cause, record.node) for record in state.failures] == [(cause, blamed)]
    assert role_of(result).restarts == 1
    assert result.event_notes(Reason.ROLE_POD_REPLACED)
    assert (result.status.failures, result.status.history) == ((), ()), "no budget of the training counts it"
    assert result.status.all_failures == state.failures, "the memory of bad machines reads it"
    again = make_plan(build.with_status(observed, result.status))
    assert role_of(again).restarts == 1, "a pod counts once"


def test_pods_leave_bad_nodes_which_new_pods_avoid() -> None:
    observed = job_with_roles(role_pod(0), role_pod(1), role_pod(2))
    bad = replace(build.node("serving-1"), taints=(Taint("maintenance", effect="NoExecute"),))
    result = make_plan(build.with_node(observed, bad))
    assert deleted(result) == {"demo-rollout-1": None}
    manifest = result.actions_of_type(CreateOtherPod)[0].manifest
    terms = manifest["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == ["serving-1"]
    missing = replace(observed, nodes={name: node for name, node in observed.nodes.items() if name != "serving-2"})
    lost = make_plan(missing)
    assert deleted(lost) == {"demo-rollout-2": None}
    assert lost.status.role_states[0].failures[0].cause is Cause.NODE_LOST
    stuck = role_pod(2, deleting=True, deletion_deadline=NOW - 1)
    assert deleted(make_plan(replace(missing, other_pods=(role_pod(0), role_pod(1), stuck)))) == {"demo-rollout-2": 0}


def test_a_pod_on_a_node_that_does_not_report_is_replaced_unless_too_many_nodes_are_bad() -> None:
    observed = job_with_roles(role_pod(0), role_pod(1), role_pod(2))
    observed = build.with_node(observed, build.node("serving-1", NodeReadiness.UNKNOWN))
    result = make_plan(observed)
    assert (deleted(result), created(result)) == ({"demo-rollout-1": None}, ["demo-rollout-3"])
    failures = [(record.cause, record.node) for record in result.status.role_states[0].failures]
    assert failures == [(Cause.NODE_LOST, "serving-1")]
    frozen = make_plan(replace(observed, fleet=FleetView(frozen="2 of 4 nodes are bad")))
    assert (deleted(frozen), created(frozen)) == ({}, [])


def test_pods_that_end_before_they_are_ready_are_created_ever_later_and_ready_ones_at_once() -> None:
    state = RoleState(name="rollout", next_ordinal=9, failed_starts=5, failed_at=NOW - 1)
    observed = job_with_roles(role_pod(0), role_pod(1), status={"role_states": (state,)})
    waiting = make_plan(observed)
    assert created(waiting) == []
    assert "5 pods in a row" not in role_of(waiting).message, "nothing is known of the last one"
    record = FailureRecord(at=NOW - 1, cause=Cause.CRASH, pod="demo-rollout-8")
    known = state.replaced(failures=(record,))
    observed = build.with_status(observed, observed.job.status.replaced(role_states=(known,)))
    observed = applied(observed, make_plan(observed))
    waiting = make_plan(observed)
    assert (
        "5 pods in a row ended before they were ready, the last was demo-rollout-8 (Crash)" in role_of(waiting).message
    )
    assert waiting.requeue_after == pytest.approx(15.0, abs=0.1)
    later = make_plan(replace(observed, now=NOW + 32))
    assert created(later) == ["demo-rollout-9"]
    started = with_role_pods(observed, role_pod(0), role_pod(1), role_pod(9, created=NOW))
    assert make_plan(started).status.role_states[0].failed_starts == 0
    was_ready = RoleState(name="rollout", next_ordinal=3, ready=(0, 1, 2))
    killed = job_with_roles(failed_pod(0, 137), role_pod(1), role_pod(2), status={"role_states": (was_ready,)})
    for _ in range(3):
        result = make_plan(killed)
        assert created(result)
        assert result.status.role_states[0].failed_starts == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": PodPhase.PENDING, "reason": "ImagePullBackOff", "message": "none"}, "ImagePullBackOff none"),
        ({"phase": PodPhase.PENDING, "node": "", "unschedulable_message": "0/3"}, "cannot be scheduled: 0/3"),
        ({}, "runs since 2027"),
    ],
)
def test_a_role_that_does_not_start_reports_why_and_since_when(change: dict[str, Any], message: str) -> None:
    pods = [role_pod(0, **{"ready": False, **change}), role_pod(1), role_pod(2)]
    result = make_plan(job_with_roles(*pods, roles=(role_spec(minReady=3),)))
    assert message in role_of(result).message
    assert role_of(result).since
    condition = result.condition(ConditionType.ROLES_READY)
    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, Reason.ROLE_NOT_STARTING)
    assert message in condition.message
    enough = make_plan(job_with_roles(*pods))
    assert enough.condition(ConditionType.ROLES_READY).status is ConditionStatus.TRUE
    assert message in enough.condition(ConditionType.ROLES_READY).message


def test_refused_pods_are_reported_and_stop_no_worker() -> None:
    refusal = WriteRefusal("exceeded quota: pods=4", name_in_use=False, retry_at=NOW + 30)
    observed = job_with_roles(refusals={"Pod/demo-rollout": refusal}, training=False, pods=(), agents={})
    result = make_plan(observed)
    assert (created(result), len(result.created_pods)) == ([], 4)
    assert "cannot be created: exceeded quota" in role_of(result).message


def test_a_role_is_scaled_and_its_unready_pods_go_first() -> None:
    pods = (role_pod(0), role_pod(1, ready=False), role_pod(2), role_pod(3))
    result = make_plan(job_with_roles(*pods, roles=(role_spec(replicas=2),)))
    assert set(deleted(result)) == {"demo-rollout-1", "demo-rollout-3"}
    assert len(created(make_plan(job_with_roles(*pods, roles=(role_spec(replicas=6),))))) == 2


@pytest.mark.parametrize(("edited", "first"), [(-5, 3), (2**40, 3), (7, 7)])
def test_an_edited_ordinal_gives_no_name_twice_and_none_that_is_too_long(edited: int, first: int) -> None:
    state = RoleState(name="rollout", next_ordinal=edited)
    observed = job_with_roles(role_pod(0), role_pod(2), status={"role_states": (state,)})
    assert created(make_plan(observed)) == [f"demo-rollout-{first}"]


def test_a_corrected_template_replaces_pods_that_are_not_ready_and_no_other() -> None:
    pods = (role_pod(0, template_hash="old"), role_pod(1, template_hash="old", ready=False), role_pod(2))
    result = make_plan(job_with_roles(*pods))
    assert deleted(result) == {"demo-rollout-1": None}
    assert role_of(result).restarts == 0


def test_a_suspended_job_releases_its_roles_after_its_workers() -> None:
    pods = (role_pod(0), role_pod(1), role_pod(2))
    saving = make_plan(job_with_roles(*pods, spec={"suspend": True}))
    assert len(saving.deleted_pods) == 4
    assert deleted(saving) == {}, "the last step may need the role"
    left = job_with_roles(*pods, spec={"suspend": True}, pods=(), agents={}, membership=None, published=0)
    left = build.with_status(left, left.job.status.replaced(membership=MembershipStatus(generation=1)))
    result = make_plan(left)
    assert len(deleted(result)) == 3
    assert result.condition(ConditionType.SUSPENDED).status is ConditionStatus.FALSE
    assert "3 pods of its roles" in result.condition(ConditionType.SUSPENDED).message
    missing = make_plan(with_role_pods(left))
    assert (created(missing), missing.condition(ConditionType.SUSPENDED).status) == ([], ConditionStatus.TRUE)


def test_a_job_that_has_ended_keeps_no_pod_of_a_role() -> None:
    finished = {ordinal: build.agent(ordinal) for ordinal in range(4)}
    observed = job_with_roles(
        role_pod(0), failed_pod(1), pods=tuple(map(build.finished_pod, range(4))), agents=finished
    )
    ended = make_plan(observed)
    assert get_condition(ended.status, ConditionType.COMPLETE).status is ConditionStatus.TRUE
    after = make_plan(build.with_status(observed, ended.status))
    assert set(deleted(after)) == {"demo-rollout-0", "demo-rollout-1"}
    assert created(after) == []


def test_time_without_steps_below_min_ready_is_the_roles() -> None:
    goodput = GoodputStatus(
        accounted_until=NOW - 30, wall_seconds=100.0, lost_seconds={"Startup": 10.0}, lost_by_stage={"Startup": 10.0}
    )
    window = goodput.window.replaced(size=4, step=20, at=NOW - 40)
    sizes = ({"size": 4, "steps": 18, "stepSeconds": 5.0, "settled": True},)
    ledger = GoodputStatus.model_validate({**goodput.to_wire(), "sizes": sizes, "countedStep": 20}).replaced(
        window=window, starting=False
    )
    waiting = make_plan(job_with_roles(role_pod(0), status={"goodput": ledger, "start_time": "2027-01-15T07:00:00Z"}))
    check_ledger(waiting.status.goodput)
    enough = make_plan(
        job_with_roles(role_pod(0), role_pod(1), status={"goodput": ledger, "start_time": "2027-01-15T07:00:00Z"})
    )
    assert ROLE_WAIT not in enough.status.goodput.lost_seconds
    assert waiting.status.goodput.lost_seconds[ROLE_WAIT] == pytest.approx(
        enough.status.goodput.lost_seconds[OVERHEAD], abs=0.01
    )


def test_warm_workers_that_wait_for_a_role_are_in_the_ledger() -> None:
    observed = job_with_roles(
        role_pod(0), training=False, status={"desired": 4, "goodput": GoodputStatus(accounted_until=NOW - 30)}
    )
    goodput = make_plan(observed).status.goodput
    assert goodput.lost_seconds == {ROLE_WAIT: 30.0}
    check_ledger(goodput)


def test_a_queue_counts_the_pods_of_roles_and_limits_them_to_what_it_admitted() -> None:
    spec = {"scheduling": {"queueName": "team"}}
    settings = replace(SETTINGS, kueue=ApiState.READY)
    new = job_with_roles(training=False, pods=(), agents={}, spec=spec, quota=QuotaView())
    request = make_plan(new, settings).only_action(ApplyWorkload)
    sets = {each["name"]: each for each in request.manifest["spec"]["podSets"]}
    assert {name: each["count"] for name, each in sets.items()} == {"workers": 4, "role-rollout": 3}
    assert sets["role-rollout"]["template"]["spec"]["containers"] == [{"name": "rollout"}]
    assert created(make_plan(new, settings)) == [], "no pod without an admission"

    flavor = Placement(node_selector={"pool": "blue"})
    two_of_three = workload(0, 4, roles={"rollout": 2})
    admitted = replace(new, quota=QuotaView(workloads=(two_of_three,), flavors={"blue": flavor}))
    result = make_plan(admitted, settings)
    assert created(result) == ["demo-rollout-0", "demo-rollout-1"]
    pod = result.actions_of_type(CreateOtherPod)[0].manifest
    assert (pod["spec"]["nodeSelector"], pod["metadata"]["labels"]["kueue.x-k8s.io/podset"]) == (
        {"pool": "blue"},
        "role-rollout",
    )
    assert role_of(result).replicas == 2
    ready = make_plan(with_role_pods(build.with_status(admitted, result.status), role_pod(0), role_pod(1)), settings)
    assert "the queue admitted 2 of 3 pods; suspend the job and resume it" in role_of(ready).message

    evicted = replace(two_of_three, conditions=EVICTED)
    leaving = replace(with_role_pods(admitted, role_pod(0)), quota=QuotaView(workloads=(evicted,)))
    result = make_plan(leaving, settings)
    assert deleted(result) == {"demo-rollout-0": None}
    condition = result.condition(ConditionType.ROLES_READY)
    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, Reason.WAITING_FOR_QUEUE)
    assert not result.actions_of_type(SetQuotaConditions), "quota is returned when no pod is left"
