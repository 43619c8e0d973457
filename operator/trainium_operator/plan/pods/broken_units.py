"""Find the units that can never be whole again: a node of their UltraServer is bad, gone, or used by others.

The pods of such a unit are replaced by a new unit elsewhere. If the lost instance returns to the UltraServer in time
(a Capacity Block lets another one be launched in its place; EC2 user guide, "Launch instances using Capacity Blocks"),
the unit is completed instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.model.names import LABEL_HOST
from trainium_operator.plan.model.observed import NodeReadiness
from trainium_operator.plan.pods.node_avoidance import list_forbidden_nodes
from trainium_operator.plan.view.units import group_by_unit

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.observed import NodeView
    from trainium_operator.plan.view.facts import Facts


def find_broken_units(facts: Facts, status: TrainingJobStatus) -> frozenset[str]:
    """Return units whose UltraServer has too few nodes that can hold their pods; empty for jobs of single nodes."""
    if facts.unit_nodes == 1:
        return frozenset()
    label = facts.job.spec.workers.accelerator.unit_label()
    servers: dict[str, list[NodeView]] = {}
    for node in facts.observed.nodes.values():
        servers.setdefault(node.labels.get(label, ""), []).append(node)
    forbidden = frozenset(list_forbidden_nodes(facts, status))
    broken: set[str] = set()
    for unit, workers in group_by_unit(worker for worker in facts.workers.values() if worker.alive).items():
        placed = [worker.node for worker in workers if worker.node is not None]
        held = {node.name for node in placed}
        server = next((node.labels[label] for node in placed if label in node.labels), "")
        usable = [
            node
            for node in servers.get(server, ())
            if node.labels.get(LABEL_HOST, node.name) not in forbidden and (node.name in held or _is_free(node))
        ]
        if server and len(usable) < facts.unit_nodes:
            broken.add(unit)
    return frozenset(broken)


def _is_free(node: NodeView) -> bool:
    """Return whether the scheduler may place a pod on it."""
    return node.ready is NodeReadiness.TRUE and node.schedulable and not node.deleting
