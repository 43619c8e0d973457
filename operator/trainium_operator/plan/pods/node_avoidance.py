"""Policy: which nodes new pods are kept away from, and from when on one that finds no node may have them again.

Nodes that are bad by what is known of them or in quarantine, one that has just gone dark for as long as Kubernetes may
still take it for ready, and those that refused pods. Invariant: while the fleet is frozen no node is avoided for what
its own signals state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.faults.causes import Cause
from trainium_contract.faults.node_polarity import Severity
from trainium_operator.plan.model.names import LABEL_HOST
from trainium_operator.plan.pods.refused_pods import refusing_nodes
from trainium_operator.plan.view.facts import Facts, quarantined_nodes
from trainium_operator.plan.view.node_problems import problem_of

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.internal import InternalStatus
    from trainium_operator.plan.model.observed import NodeView

MOST_FORBIDDEN = 128
"""Nodes that a pod's affinity names at most: a longer list would make each pod large for little."""
_DARK_SECONDS = 300.0
"""For how long new pods keep away from a node that went dark; by then Kubernetes has marked it and its scheduler keeps
away by itself (after --node-monitor-grace-period of kube-controller-manager: 50 s unless it was raised)."""


def forbidden_nodes(facts: Facts, status: TrainingJobStatus) -> tuple[str, ...]:
    """Return host names of nodes that no new pod may be put on; those that this job knows to be bad come first."""
    bad = _bad_nodes(facts)
    refusing = (_host_name(facts, node) for node in refusing_nodes(status, facts.now))
    dark = (_dark_nodes(facts, status) | frozenset(refusing)) - set(bad)
    if dark and released_nodes(facts):
        # All of them, not those of one pod: the recreated pod must not wait for another of them.
        there = _there(facts)
        dark = frozenset(name for name in dark if name not in there or _is_bad(facts, there[name]))
    return (*bad, *sorted(dark))[:MOST_FORBIDDEN]


def released_nodes(facts: Facts) -> frozenset[str]:
    """Return host names of nodes that pods which find no node keep away from, and need not any longer.

    Among them those that are merely dark, or that refuse: such a pod has nowhere else to go, and is made again without
    that demand.
    """
    pods = (worker.pod for worker in facts.outsiders)
    waiting = [pod for pod in pods if pod.avoided_nodes and pod.unschedulable_message and not pod.node]
    if not waiting:
        return frozenset()
    bad = _bad_nodes(facts)
    if len(bad) == MOST_FORBIDDEN:
        return frozenset()  # what is not named may be bad all the same
    avoided_nodes = frozenset[str]().union(*(pod.avoided_nodes for pod in waiting))
    there = _there(facts)
    return frozenset(name for name in avoided_nodes - set(bad) if name in there and not _is_bad(facts, there[name]))


def _there(facts: Facts) -> dict[str, NodeView]:
    """Return the nodes that exist, by host name."""
    return {node.labels.get(LABEL_HOST, name): node for name, node in facts.observed.nodes.items()}


def _is_bad(facts: Facts, node: NodeView) -> bool:
    """Return whether its signals are bad: a pod on it would be replaced at once, and so would the next one."""
    problem = problem_of(facts.observed, node)
    return problem is not None and problem.severity >= Severity.DRAIN


def _bad_nodes(facts: Facts) -> tuple[str, ...]:
    """Return host names of nodes that are bad by what is known of them, or in quarantine.

    A tainted device makes none bad: the scheduler gives that device to nobody, and others of the node may be healthy.
    """
    bad = {
        worker.pod.node
        for worker in facts.workers.values()
        if (problem := facts.node_problems.get(worker.pod.uid)) is not None
        and problem.severity >= Severity.DRAIN
        and problem.cause is not Cause.DEVICE_TAINTED
    }
    names = [*sorted(bad), *sorted(quarantined_nodes(facts) - bad)][:MOST_FORBIDDEN]
    return tuple(_host_name(facts, name) for name in names)


def _dark_nodes(facts: Facts, memory: InternalStatus) -> frozenset[str]:
    """Return host names of nodes that went dark a moment ago, also by this very plan.

    To prefer others is not enough: a scheduler that favours near neighbours may put a new pod back on the node that was
    just lost.
    """
    if facts.observed.fleet.frozen:
        return frozenset()
    since = facts.now - _DARK_SECONDS
    lost = (record for record in memory.failures if record.cause is Cause.NODE_LOST and record.at > since)
    return frozenset(_host_name(facts, record.node) for record in lost if record.node)


def _host_name(facts: Facts, node: str) -> str:
    known = facts.observed.nodes.get(node)
    return node if known is None else known.labels.get(LABEL_HOST, node)
