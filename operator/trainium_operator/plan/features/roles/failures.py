"""Find the pods of a role that must be replaced, by the table of faults, and the pause before new ones.

Guarantees:
- A failure counts for no budget of the training, and the job's own recovery rules do not apply to it.
- A node is blamed as for a worker: by the reason of its pod's end, or by its own signals. An exit code blames none,
  because the codes of the trainer mean nothing in a server.
- Pods that were ready are replaced at once. Pods that end before they are ready are replaced after a pause that grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import KILLED
from trainium_contract.faults.causes import Cause
from trainium_contract.faults.classify import find_cause, suspects_node
from trainium_contract.faults.node_polarity import Severity
from trainium_contract.faults.signs import SignKind
from trainium_contract.status.internal import MAX_ROLE_FAILURES, FailureRecord, RoleState
from trainium_operator.backoff import compute_backoff
from trainium_operator.plan.diagnose.pod_failures import classify_ended_pod
from trainium_operator.plan.faults.node_signals import PodRequirements
from trainium_operator.plan.manifests.worker_needs import build_device_tolerations, find_extended_resources
from trainium_operator.plan.model.observed import NodeReadiness, PodPhase
from trainium_operator.plan.view.node_problems import find_worst_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.spec.roles import RoleSpec
    from trainium_operator.plan.faults.node_signals import NodeProblem
    from trainium_operator.plan.model.observed import Observed, PodView

_FIRST_PAUSE_SECONDS = 4.0
_MAX_PAUSE_SECONDS = 300.0
_FREE_FAILURES = 2


@dataclass(frozen=True, slots=True)
class RoleFailure:
    """Why a pod of a role is replaced."""

    cause: Cause
    node: str
    """The node to avoid; empty if none is to blame."""
    message: str


def has_ended(pod: PodView) -> bool:
    """Return whether the serving container of the pod, or the whole pod, has ended."""
    return pod.exit_code is not None or pod.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)


def is_node_missing(observed: Observed, pod: PodView) -> bool:
    """Return whether the node of the pod does not exist or does not report, so that it cannot confirm a deletion."""
    node = observed.nodes.get(pod.node)
    return bool(pod.node) and (node is None or node.ready is not NodeReadiness.TRUE)


def find_failure(observed: Observed, role: RoleSpec, pod: PodView) -> RoleFailure | None:
    """Return why the pod must be replaced; None while it may stay."""
    if has_ended(pod):
        return _classify_end(pod)
    if not pod.node:
        return None
    node = observed.nodes.get(pod.node)
    if node is None:
        return RoleFailure(Cause.NODE_LOST, "", f"pod {pod.name} was on node {pod.node}, which was deleted")
    problem = find_worst_problem(observed, node, build_requirements(role))
    if problem is None or not _must_leave(observed, problem):
        return None
    blamed_node = pod.node if suspects_node(problem.cause) else ""
    return RoleFailure(problem.cause, blamed_node, f"pod {pod.name} is on node {pod.node}: {problem}")


def _must_leave(observed: Observed, problem: NodeProblem) -> bool:
    """Return whether a pod of a role leaves a node with this problem.

    A node that does not report suffices: no agent shows that the pod still works, and a second one does no harm.
    """
    is_lost = problem.cause is Cause.NODE_LOST and not observed.fleet.frozen
    return is_lost or problem.severity >= Severity.DRAIN


def _classify_end(pod: PodView) -> RoleFailure:
    cause = _find_cause_of_end(pod)
    code = "" if pod.exit_code is None else f"exit code {pod.exit_code}"
    description = ", ".join(part for part in (pod.reason, code, pod.message) if part)
    is_blamed = cause is not Cause.CRASH and suspects_node(cause)
    text = f"pod {pod.location} ended ({description or 'no reason given'})"
    return RoleFailure(cause, pod.node if is_blamed else "", text)


def _find_cause_of_end(pod: PodView) -> Cause:
    """Return why the pod ended: by an eviction, a disruption or its reason, else by its exit code."""
    by_reason = find_cause(SignKind.POD_REASON, pod.reason)
    is_memory = by_reason is Cause.OUT_OF_MEMORY and pod.exit_code not in (None, KILLED)
    if pod.exit_code is None or pod.disrupted or (by_reason is not None and not is_memory):
        return classify_ended_pod(pod, ()).cause
    return Cause.FINISHED if pod.exit_code == 0 else Cause.CRASH


def build_requirements(role: RoleSpec) -> PodRequirements:
    """Return the demands of a role's pods on their nodes."""
    spec = role.template.get("spec") or {}
    listed = tuple(spec.get("tolerations") or ())
    if role.accelerator is None:
        return PodRequirements({}, listed)
    resources = find_extended_resources(role.accelerator)
    numbers = {name: int(text) for name, text in resources.items() if text.isdecimal()}
    return PodRequirements(numbers, (*build_device_tolerations(role.accelerator), *listed))


def record_ready(state: RoleState, pods: Sequence[PodView]) -> RoleState:
    """Record which of the existing pods have been ready; a new one ends the pause."""
    ready = {pod.ordinal for pod in pods if pod.ready} | (set(state.ready) & {pod.ordinal for pod in pods})
    state = state.replaced(ready=tuple(sorted(ready)))
    has_started = any(pod.ready and (state.failed_at is None or pod.created >= state.failed_at - 1) for pod in pods)
    return state.replaced(failed_starts=0, failed_at=None) if has_started and state.failed_starts else state


def is_counted(state: RoleState, pod: PodView) -> bool:
    """Return whether the failure of the pod is in the state."""
    return any(record.pod == pod.name for record in state.failures)


def count_failure(state: RoleState, pod: PodView, failure: RoleFailure, now: float) -> RoleState:
    """Add a failure to the state of its role."""
    record = FailureRecord(at=now, cause=failure.cause, pod=pod.name, node=failure.node)
    state = state.replaced(failures=(*state.failures, record)[-MAX_ROLE_FAILURES:])
    if failure.node or pod.ordinal in state.ready or not has_ended(pod):
        return state
    is_same_round = state.failed_at is not None and pod.created < state.failed_at - 1
    failed_starts = state.failed_starts if is_same_round else state.failed_starts + 1
    return state.replaced(failed_starts=failed_starts, failed_at=now)


def find_next_creation(state: RoleState, now: float) -> float:
    """Return when new pods may be created (Unix seconds)."""
    excess = state.failed_starts - _FREE_FAILURES
    if state.failed_at is None or excess <= 0:
        return now
    return min(state.failed_at, now) + compute_backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, excess)
