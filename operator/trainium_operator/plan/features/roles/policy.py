"""Policy: create, replace and delete the pods of each role, and report them.

Guarantees:
- Nothing here changes the membership, the workers' pods or a budget of the training.
- A job that is suspended or evicted keeps its roles until its workers have left, because their last step may need them.
- Pods of a role that are ready stay when its template changes; those that are not are replaced.
- A job that has ended keeps no pod of a role.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.faults.node_polarity import Severity
from trainium_contract.pages.formatting import pluralize
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.internal import RoleState
from trainium_contract.status.public import RoleStatus
from trainium_contract.wire.worker_env import ANNOTATION_TEMPLATE_HASH
from trainium_operator.plan.faults.failure_budgets import list_avoided_nodes
from trainium_operator.plan.features.roles import failures, objects, readiness
from trainium_operator.plan.manifests.affinity import AvoidedNodes
from trainium_operator.plan.manifests.worker_pod import is_outdated
from trainium_operator.plan.model import names
from trainium_operator.plan.model.actions import (
    CreateOtherPod,
    DeleteOtherPod,
    PolicyResult,
    build_event,
)
from trainium_operator.plan.model.conditions import set_condition
from trainium_operator.plan.model.grant import AdmissionState
from trainium_operator.plan.model.names import LABEL_HOST
from trainium_operator.plan.model.observed import STARTING_REASONS, PodPhase
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import format_sentence
from trainium_operator.plan.pods.node_avoidance import list_forbidden_nodes
from trainium_operator.plan.view.context import Feature, PlanContext, PodSet, reconcile_object
from trainium_operator.plan.view.node_problems import find_worst_problem

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.spec.roles import RoleSpec
    from trainium_operator.plan.model.actions import Action, Event
    from trainium_operator.plan.model.observed import Observed, PlanSettings, PodView

RECHECK_SECONDS = 5.0
"""Interval of checks until the pods have been read."""
MAX_BATCH = 64
"""Maximum number of pods of a role that one plan creates."""


def list_pod_sets(context: PlanContext) -> tuple[PodSet, ...]:
    """Return the pods of each role for which a queue needs quota."""
    return tuple(
        PodSet(
            _format_pod_set_name(role.name),
            role.replicas,
            objects.build_role_template(context.job, context.settings, role),
        )
        for role in context.job.spec.roles
    )


def count_pods(context: PlanContext) -> int:
    """Return the pods of roles that hold a node or may get one."""
    return sum(not failures.has_ended(pod) for pod in context.observed.role_pods)


def finish_roles(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Delete all pods of roles of a job that has ended."""
    if context.observed.other_pods is None:
        return PolicyResult(status=status, requeue_at=(context.now + RECHECK_SECONDS,))
    roles = tuple(role.replaced(replicas=0, ready_replicas=0, message="", since="") for role in status.roles)
    deletions = tuple(action for pod in context.observed.role_pods for action in _build_deletion(context, pod))
    return PolicyResult(status=status.replaced(roles=roles), actions=deletions)


def reconcile_roles(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Reconcile all roles, and report whether training waits for one."""
    if context.observed.other_pods is None:
        return PolicyResult(status=status, requeue_at=(context.now + RECHECK_SECONDS,))
    result = PolicyResult(status=status)
    is_held = context.job.spec.suspend or (context.grant is not None and context.grant.releases_workers)
    for role in context.job.spec.roles:
        reconcile = _release_role if is_held else _reconcile_role
        result = result.combine(reconcile(context, result.status, role))
    if not is_held:
        result = result.combine(_apply_objects(context, result.status))
    return result.replace_status(_set_condition(context, result.status, is_held=is_held))


def _release_role(context: PlanContext, status: TrainingJobStatus, role: RoleSpec) -> PolicyResult:
    """Delete the pods of a role once no worker is left."""
    pods = readiness.list_pods(context.observed, role.name)
    state = _find_state(status, role.name).replaced(failed_starts=0, failed_at=None)
    report = _build_report(context, status, role, replicas=0, message="")
    status = _set_role(status, state, report)
    if context.workers:
        return PolicyResult(status=status)
    return PolicyResult(status=status, actions=tuple(a for pod in pods for a in _build_deletion(context, pod)))


@dataclass(slots=True)
class _Review:
    """The pods of a role, sorted."""

    state: RoleState
    alive: list[PodView]
    actions: list[Action]
    events: list[Event]
    restarts: int = 0


def _reconcile_role(context: PlanContext, status: TrainingJobStatus, role: RoleSpec) -> PolicyResult:
    body = objects.build_role_template(context.job, context.settings, role)
    review = _review_pods(context, status, role, body["metadata"]["annotations"][ANNOTATION_TEMPLATE_HASH])
    wanted = _limit_to_quota(context, role)
    if not context.job.unknown:
        review.actions += _delete_surplus(context, review.alive, wanted)
    missing = min(MAX_BATCH, max(0, wanted - len(review.alive)))
    create_at = _find_next_creation(context, review.state, role)
    requeue_at: tuple[float, ...] = ()
    if missing and _may_create(context):
        if context.now < create_at:
            requeue_at = (create_at,)
        else:
            ordinals = _choose_next_ordinals(context, review.state, missing)
            review.state = review.state.replaced(next_ordinal=ordinals.stop)
            avoided = _find_avoided_nodes(context, status, review.state, role)
            manifests = objects.build_role_pods(context.job, role.name, body, ordinals, avoided)
            for feature in context.features:
                manifests = feature.place_pod_set(context, _format_pod_set_name(role.name), manifests)
            review.actions += map(CreateOtherPod, manifests)
    message = _explain_missing(context, role, review, wanted, create_at if requeue_at else None)
    report = _build_report(context, status, role, replicas=wanted, message=message)
    report = report.replaced(restarts=report.restarts + review.restarts)
    return PolicyResult(
        status=_set_role(status, review.state, report),
        actions=tuple(review.actions),
        events=tuple(review.events),
        requeue_at=requeue_at,
    )


def _choose_next_ordinals(context: PlanContext, state: RoleState, count: int) -> range:
    """Return ordinals that no existing pod has; they restart at 0 after the last one, or an edited status."""
    highest = max((pod.ordinal for pod in readiness.list_pods(context.observed, state.name)), default=-1)
    next_ordinal = state.next_ordinal if 0 <= state.next_ordinal <= names.LAST_ORDINAL else 0
    first = max(next_ordinal, highest + 1)
    return range(first, first + count)


def _review_pods(context: PlanContext, status: TrainingJobStatus, role: RoleSpec, template_hash: str) -> _Review:
    """Sort the pods of a role; count failures and delete those that must go."""
    observed, pods = context.observed, readiness.list_pods(context.observed, role.name)
    review = _Review(failures.record_ready(_find_state(status, role.name), pods), [], [], [])
    for pod in pods:
        failure = None if pod.deleting else failures.find_failure(observed, role, pod)
        if failure is not None and not failures.is_counted(review.state, pod):
            review.state = failures.count_failure(review.state, pod, failure, context.now)
            review.restarts += 1
            note = f"Role {role.name}: {failure.message} ({failure.cause.value}); another pod takes its place"
            series = f"{role.name} {failure.cause.value}"
            review.events.append(build_event(Reason.ROLE_POD_REPLACED, note, warning=True, pod=pod.name, series=series))
        is_stale = not pod.ready and is_outdated(pod.template_hash, template_hash) and not context.job.unknown
        if failure is None and not (pod.deleting or is_stale):
            review.alive.append(pod)
        else:
            review.actions += _build_deletion(context, pod)
    return review


def _build_deletion(context: PlanContext, pod: PodView) -> tuple[DeleteOtherPod, ...]:
    """Return the deletion of a pod, once; forced if its grace period is over and its node cannot confirm it."""
    if not pod.deleting:
        return (DeleteOtherPod(pod.name, pod.uid),)
    is_overdue = pod.deletion_deadline is not None and context.now >= pod.deletion_deadline
    is_forced = is_overdue and failures.is_node_missing(context.observed, pod) and not context.observed.fleet.frozen
    return (DeleteOtherPod(pod.name, pod.uid, 0),) if is_forced else ()


def _delete_surplus(context: PlanContext, alive: list[PodView], wanted: int) -> tuple[DeleteOtherPod, ...]:
    order = sorted(alive, key=lambda pod: (pod.ready, pod.phase is PodPhase.RUNNING, -pod.ordinal))
    surplus = order[: max(0, len(alive) - wanted)]
    return tuple(action for pod in surplus for action in _build_deletion(context, pod))


def _limit_to_quota(context: PlanContext, role: RoleSpec) -> int:
    grant = context.grant
    if grant is None or grant.state is not AdmissionState.ADMITTED:
        return role.replicas
    return min(role.replicas, grant.other_pods.get(_format_pod_set_name(role.name), 0))


def _may_create(context: PlanContext) -> bool:
    return context.grant is None or context.grant.state is AdmissionState.ADMITTED


def _find_next_creation(context: PlanContext, state: RoleState, role: RoleSpec) -> float:
    refusal = context.observed.refusals.get(_find_refusal_place(context, role))
    return max(failures.find_next_creation(state, context.now), refusal.retry_at if refusal is not None else 0.0)


def _find_refusal_place(context: PlanContext, role: RoleSpec) -> str:
    return f"Pod/{names.format_role_object_name(context.job.name, role.name)}"


def _find_avoided_nodes(
    context: PlanContext, status: TrainingJobStatus, state: RoleState, role: RoleSpec
) -> AvoidedNodes:
    """Return nodes that new pods avoid: as workers do, and those that are bad for, or were blamed by, this role."""
    requirements, bad = failures.build_requirements(role), set()
    for name in {pod.node for pod in context.observed.role_pods if pod.node}:
        node = context.observed.nodes.get(name)
        problem = None if node is None else find_worst_problem(context.observed, node, requirements)
        if node is not None and problem is not None and problem.severity >= Severity.DRAIN:
            bad.add(node.labels.get(LABEL_HOST, name))
    blamed = list_avoided_nodes(state.failures, context.now)
    return AvoidedNodes(
        required=tuple(sorted({*list_forbidden_nodes(context, status), *bad})),
        preferred=tuple(dict.fromkeys((*status.avoided_nodes, *blamed))),
    )


def _explain_missing(
    context: PlanContext, role: RoleSpec, review: _Review, wanted: int, create_at: float | None
) -> str:
    """Return why fewer pods are ready than requested; empty if none is missing."""
    refusal = context.observed.refusals.get(_find_refusal_place(context, role))
    if refusal is not None and len(review.alive) < wanted:
        return f"its pods cannot be created: {refusal.sentence}"
    not_ready = [pod for pod in review.alive if not pod.ready]
    reasons = (
        *(f"{pod.name} cannot be scheduled: {pod.unschedulable_message}" for pod in not_ready if _waits_for_node(pod)),
        *(f"{pod.location}: {pod.reason} {pod.message}" for pod in not_ready if _is_held(pod)),
    )
    if reasons:
        return reasons[0]
    if create_at is not None and review.state.failures:
        last = review.state.failures[-1]
        return (
            f"{pluralize(review.state.failed_starts, 'pod')} in a row ended before they were ready, the last was "
            f"{last.pod} ({last.cause.value}); the next is created at {format_rfc3339(create_at)}"
        )
    if wanted < role.replicas:
        return (
            f"the queue admitted {wanted} of {role.replicas} pods; suspend the job and resume it to request the others"
        )
    running = [pod for pod in not_ready if pod.phase is PodPhase.RUNNING]
    if running:
        return f"{running[0].location} runs since {format_rfc3339(running[0].created)} and is not ready"
    return "its pods start" if len(review.alive) > len(not_ready) or not_ready or wanted > len(review.alive) else ""


def _waits_for_node(pod: PodView) -> bool:
    return bool(pod.unschedulable_message) and not pod.node


def _is_held(pod: PodView) -> bool:
    return pod.phase is PodPhase.PENDING and bool(pod.reason) and pod.reason not in STARTING_REASONS


def _build_report(
    context: PlanContext, status: TrainingJobStatus, role: RoleSpec, *, replicas: int, message: str
) -> RoleStatus:
    old = next((report for report in status.roles if report.name == role.name), None)
    ready = len(readiness.list_ready_pods(context.observed, role.name))
    is_missing = ready < replicas or replicas < role.replicas
    since = "" if old is None else old.since
    return RoleStatus(
        name=role.name,
        replicas=replicas,
        ready_replicas=ready,
        min_ready=role.min_ready,
        restarts=0 if old is None else old.restarts,
        message=format_sentence(message) if is_missing and message else "",
        since=(since or format_rfc3339(context.now)) if is_missing and replicas else "",
    )


def _set_condition(context: PlanContext, status: TrainingJobStatus, *, is_held: bool) -> TrainingJobStatus:
    """Set RolesReady: False while a role has fewer ready pods than training waits for."""
    kind, missing = ConditionType.ROLES_READY, [report for report in status.roles if report.since]
    waiting = [report for report in missing if report.ready_replicas < report.min_ready]
    if is_held:
        reason = Reason.SUSPENDED if context.job.spec.suspend else Reason.WAITING_FOR_QUEUE
        return set_condition(status, kind, False, reason, "", now=context.now)
    if not missing:
        return set_condition(status, kind, True, Reason.ROLES_READY, "", now=context.now)
    role = (waiting or missing)[0]
    counts = f"role {role.name}: {role.ready_replicas} of {role.replicas} pods are ready since {role.since}"
    needs = f", and training waits for {role.min_ready}" if waiting else ""
    text = f"{counts}{needs}{f': {role.message}' if role.message else ''}"
    reason = Reason.ROLES_READY
    if waiting:
        has_reason = role.message and role.message != _STARTING
        reason = Reason.ROLE_NOT_STARTING if has_reason else Reason.WAITING_FOR_ROLES
    return set_condition(status, kind, not waiting, reason, text, now=context.now)


_STARTING = format_sentence("its pods start")


def _apply_objects(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Apply Service and budget of each role, and the NetworkPolicy of all."""
    job, result = context.job, PolicyResult(status=status)
    manifests = [
        build(job, role) for role in job.spec.roles for build in (objects.build_service, objects.build_role_budget)
    ]
    if context.settings.worker_ingress is not None and context.observed.policies_listed:
        manifests.append(objects.build_role_policy(job, tuple(map(dict, context.settings.worker_ingress.rules))))
    for manifest in manifests:
        result = result.combine(reconcile_object(context, status, manifest))
    return result


def _find_state(status: TrainingJobStatus, role: str) -> RoleState:
    return next((role_state for role_state in status.role_states if role_state.name == role), RoleState(name=role))


def _set_role(status: TrainingJobStatus, state: RoleState, report: RoleStatus) -> TrainingJobStatus:
    states = {role_state.name: role_state for role_state in status.role_states} | {state.name: state}
    reports = {role.name: role for role in status.roles} | {report.name: report}
    return status.replaced(role_states=tuple(states.values()), roles=tuple(reports.values()))


def _format_pod_set_name(role: str) -> str:
    return f"role-{role}"


def _is_used(observed: Observed, _settings: PlanSettings) -> bool:
    return bool(observed.job.spec.roles) or bool(observed.role_pods)


FEATURE = Feature(
    name="roles",
    is_used=_is_used,
    reconcile_before_pods=readiness.publish_endpoints,
    find_creation_blocker=readiness.find_creation_blocker,
    is_start_blocked=readiness.is_start_blocked,
    find_waiting_cause=readiness.find_waiting_cause,
    list_pod_sets=list_pod_sets,
    count_pods=count_pods,
    reconcile=reconcile_roles,
    finish=finish_roles,
)
