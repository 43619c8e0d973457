"""Policy: decide which nodes new pods avoid, when a pod that finds no node may use them again, and which units end.

Avoided are bad nodes, nodes in quarantine, nodes that just stopped reporting (Kubernetes may still count them as
ready), and nodes that refused pods.

Invariant: while the fleet is frozen a node is not avoided because of its signals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_operator.plan.model.names import LABEL_HOST
from trainium_operator.plan.model.observed import NodeReadiness
from trainium_operator.plan.pods.refused_pods import list_refusing_nodes
from trainium_operator.plan.view.context import PlanContext, list_quarantined_nodes
from trainium_operator.plan.view.node_problems import find_worst_problem
from trainium_operator.plan.view.units import group_by_unit

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import InternalStatus
    from trainium_operator.plan.model.observed import NodeView

MAX_FORBIDDEN_NODES = 128
"""Maximum number of nodes in a pod's affinity: a longer list would make each pod large for little."""
_DARK_SECONDS = 300.0
"""For how long new pods avoid a node that went dark. By then Kubernetes has marked it and its scheduler avoids it by
itself (after --node-monitor-grace-period of kube-controller-manager: 50 s unless it was raised)."""


def list_forbidden_nodes(context: PlanContext, status: TrainingJobStatus) -> tuple[str, ...]:
    """Return host names of nodes that no new pod may use; those that this job knows to be bad come first."""
    bad = _list_bad_nodes(context)
    refusing = (_find_host_name(context, node) for node in list_refusing_nodes(status, context.now))
    dark = (_list_dark_nodes(context, status) | frozenset(refusing)) - set(bad)
    if dark and list_released_nodes(context):
        # All of them, not those of one pod: the recreated pod must not wait for another of them.
        nodes_by_host = _index_nodes_by_hostname(context)
        dark = frozenset(name for name in dark if name not in nodes_by_host or _is_bad(context, nodes_by_host[name]))
    return (*bad, *sorted(dark))[:MAX_FORBIDDEN_NODES]


def list_released_nodes(context: PlanContext) -> frozenset[str]:
    """Return host names of nodes that pods without a node avoid, and need not avoid any longer.

    Among them are nodes that are merely dark or that refuse: such a pod has no other node, and is recreated without
    that constraint.
    """
    pods = (worker.pod for worker in context.non_members)
    waiting = [pod for pod in pods if pod.avoided_nodes and pod.unschedulable_message and not pod.node]
    if not waiting:
        return frozenset()
    bad = _list_bad_nodes(context)
    if len(bad) == MAX_FORBIDDEN_NODES:
        return frozenset()  # a node that is not listed may still be bad
    avoided_nodes = frozenset[str]().union(*(pod.avoided_nodes for pod in waiting))
    nodes_by_host = _index_nodes_by_hostname(context)
    return frozenset(
        name for name in avoided_nodes - set(bad) if name in nodes_by_host and not _is_bad(context, nodes_by_host[name])
    )


def _index_nodes_by_hostname(context: PlanContext) -> dict[str, NodeView]:
    """Return the existing nodes by host name."""
    return {node.labels.get(LABEL_HOST, name): node for name, node in context.observed.nodes.items()}


def _is_bad(context: PlanContext, node: NodeView) -> bool:
    """Return whether its signals are bad, so that a pod on it would be replaced at once, and so would the next one."""
    problem = find_worst_problem(context.observed, node)
    return problem is not None and problem.severity >= Severity.DRAIN


def _list_bad_nodes(context: PlanContext) -> tuple[str, ...]:
    """Return host names of nodes that are bad by their signals, or in quarantine.

    A tainted device makes no node bad: the scheduler allocates that device to nobody, and others of the node may be
    healthy.
    """
    bad = {
        worker.pod.node
        for worker in context.workers.values()
        if (problem := context.node_problems.get(worker.pod.uid)) is not None
        and problem.severity >= Severity.DRAIN
        and problem.cause is not Cause.DEVICE_TAINTED
    }
    names = [*sorted(bad), *sorted(list_quarantined_nodes(context) - bad)][:MAX_FORBIDDEN_NODES]
    return tuple(_find_host_name(context, name) for name in names)


def _list_dark_nodes(context: PlanContext, memory: InternalStatus) -> frozenset[str]:
    """Return host names of nodes that went dark a moment ago, including those found by this plan.

    A preference for others is not enough: a scheduler that favours near neighbours may put a new pod back on the lost
    node.
    """
    if context.observed.fleet.frozen:
        return frozenset()
    since = context.now - _DARK_SECONDS
    lost = (record for record in memory.failures if record.cause is Cause.NODE_LOST and record.at > since)
    return frozenset(_find_host_name(context, record.node) for record in lost if record.node)


def _find_host_name(context: PlanContext, node: str) -> str:
    view = context.observed.nodes.get(node)
    return node if view is None else view.labels.get(LABEL_HOST, node)


def find_broken_units(context: PlanContext, status: TrainingJobStatus) -> frozenset[str]:
    """Return units that can never be whole again: too few nodes of their UltraServer can hold their pods.

    Their pods are replaced by a new unit elsewhere. If the lost instance returns to the UltraServer in time (a Capacity
    Block lets another one be launched in its place; EC2 user guide, "Launch instances using Capacity Blocks"), the unit
    is completed instead. Empty for jobs of single nodes.
    """
    if context.unit_nodes == 1:
        return frozenset()
    label = context.job.spec.workers.accelerator.find_unit_label()
    servers: dict[str, list[NodeView]] = {}
    for node in context.observed.nodes.values():
        servers.setdefault(node.labels.get(label, ""), []).append(node)
    forbidden = frozenset(list_forbidden_nodes(context, status))
    broken: set[str] = set()
    for unit, workers in group_by_unit(worker for worker in context.workers.values() if worker.alive).items():
        placed = [worker.node for worker in workers if worker.node is not None]
        held = {node.name for node in placed}
        server = next((node.labels[label] for node in placed if label in node.labels), "")
        usable = [
            node
            for node in servers.get(server, ())
            if node.labels.get(LABEL_HOST, node.name) not in forbidden and (node.name in held or _is_free(node))
        ]
        if server and len(usable) < context.unit_nodes:
            broken.add(unit)
    return frozenset(broken)


def _is_free(node: NodeView) -> bool:
    """Return whether the scheduler may place a pod on it."""
    return node.ready is NodeReadiness.TRUE and node.schedulable and not node.deleting
