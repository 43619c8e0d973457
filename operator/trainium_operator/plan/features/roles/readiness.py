"""Decide which pods of a role serve, and whether training waits for them.

Before its first step, and after a suspension, training waits until each role has `minReady` ready pods: the workers are
not created yet (startupPolicy BeforeWorkers), or they are warm and begin no generation. Once it trains, nothing stops
it: the program waits for answers by itself, its agents take no stall for a hang, and the ledger has the time without
steps as `RoleWait`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.spec.roles import RoleStartupPolicy
from trainium_contract.status.ledger import ROLE_WAIT
from trainium_contract.wire.messages import RoleEndpoints
from trainium_operator.plan.model.actions import PolicyResult, PublishEndpoints
from trainium_operator.plan.model.observed import NodeReadiness
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.spec.roles import RoleSpec
    from trainium_operator.plan.model.observed import Observed, PodView
    from trainium_operator.plan.view.context import PlanContext


def list_pods(observed: Observed, role: str) -> tuple[PodView, ...]:
    """Return the pods of a role by ordinal, also those that end."""
    return tuple(pod for pod in observed.role_pods if pod.role == role)


def list_ready_pods(observed: Observed, role: str) -> tuple[PodView, ...]:
    """Return the pods of a role that serve: ready, not leaving, and on a node that reports."""
    return tuple(pod for pod in list_pods(observed, role) if _is_serving(observed, pod))


def _is_serving(observed: Observed, pod: PodView) -> bool:
    node = observed.nodes.get(pod.node)
    reports = node is not None and node.ready is NodeReadiness.TRUE
    return pod.ready and reports and bool(pod.ip) and pod.exit_code is None and not (pod.deleting or pod.disrupted)


def list_waiting_roles(observed: Observed) -> tuple[RoleSpec, ...]:
    """Return the roles with fewer ready pods than training waits for."""
    return tuple(role for role in observed.job.spec.roles if len(list_ready_pods(observed, role.name)) < role.min_ready)


def publish_endpoints(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Let the coordinator serve the addresses if they have changed; before a generation that reads them begins."""
    observed = context.observed
    if observed.other_pods is None or not context.job.spec.roles:
        return PolicyResult(status=status)
    addresses = {
        role.name: tuple(_format_endpoint(pod.ip, role.port) for pod in list_ready_pods(observed, role.name))
        for role in context.job.spec.roles
    }
    endpoints = RoleEndpoints(addresses=addresses, is_waiting=bool(list_waiting_roles(observed)))
    actions = () if endpoints == observed.endpoints else (PublishEndpoints(endpoints),)
    return PolicyResult(status=status, actions=actions)


def _format_endpoint(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def is_start_blocked(context: PlanContext) -> bool:
    """Return whether the first generation waits for a role."""
    return context.observed.other_pods is None or bool(list_waiting_roles(context.observed))


def find_creation_blocker(context: PlanContext) -> tuple[Reason, str] | None:
    """Return why no worker is created yet; None once the job has trained, or without a role that starts before."""
    if context.job.status.membership.size > 0 or context.workers:
        return None
    waiting = [
        role for role in list_waiting_roles(context.observed) if role.startup_policy is RoleStartupPolicy.BEFORE_WORKERS
    ]
    if not waiting:
        return None
    role, ready = waiting[0], len(list_ready_pods(context.observed, waiting[0].name))
    return Reason.WAITING_FOR_ROLES, (
        f"workers start when role {role.name} has {role.min_ready} ready pods, and it has {ready}"
    )


def find_waiting_cause(context: PlanContext) -> str:
    """Return the ledger's key for time without steps now; empty while each role has enough ready pods."""
    return ROLE_WAIT if context.observed.other_pods is not None and list_waiting_roles(context.observed) else ""
