"""Simulate the cluster's slots, the machine in each, and its Node object.

Guarantees:
- A machine's identity is its provider ID, whatever the name of its node.
- A node without power stays Ready until the control plane's grace period is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_operator.plan.model.names import LABEL_HOST, LABEL_INSTANCE_TYPE, LAYERS
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint

if TYPE_CHECKING:
    from trainium_simulator.virtual.failures import FailureModel

MAINTENANCE_TAINT = "aws-node-termination-handler/scheduled-maintenance"
_REPELLING_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


@dataclass(slots=True)
class Slot:
    """A slot of the cluster, and its machine."""

    number: int
    view: NodeView
    is_lemon: bool
    installed_at: float
    """Time at which the machine was installed."""
    machine_serial: int = 0
    has_power: bool = True
    slowness: float = 1.0
    """Factor by which a step's own work takes longer here."""
    occupied: bool = False
    """Whether pods of other users occupy it."""
    repair_count: int = 0
    """Number of repairs here: only the newest restores the node."""

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.view.name

    @property
    def is_schedulable(self) -> bool:
        """Whether the scheduler would bind a pod of the job here."""
        view = self.view
        tainted = any(taint.effect in _REPELLING_EFFECTS for taint in view.taints)
        return (
            view.ready is NodeReadiness.TRUE
            and view.schedulable
            and not view.deleting
            and not tainted
            and not self.occupied
        )


class Nodes:
    """All slots, and the Node objects."""

    def __init__(self, count: int, *, instance_type: str, model: FailureModel, lemons: frozenset[int]) -> None:
        self._model = model
        self._instance_type = instance_type
        self.deleted_provider_ids: dict[str, str] = {}
        """Node name -> provider ID of nodes that no longer exist."""
        self.slots = [
            Slot(number, self._create_node_view(number, 0), is_lemon=number in lemons, installed_at=float("-inf"))
            for number in range(count)
        ]
        self.views = {slot.name: slot.view for slot in self.slots}

    def _create_node_view(self, number: int, machine_serial: int) -> NodeView:
        name = f"node-{number}" if machine_serial == 0 else f"node-{number}-{machine_serial}"
        labels = {LABEL_HOST: name, LAYERS[-1]: f"rack-{number // self._model.rack_nodes}"}
        if self._instance_type:
            labels[LABEL_INSTANCE_TYPE] = self._instance_type
        return NodeView(name=name, provider_id=f"sim:///{number}/{machine_serial}", labels=labels)

    def list_slots_in_rack(self, number: int) -> list[Slot]:
        """Return the slots that share a switch with this one."""
        rack = number // self._model.rack_nodes
        return [slot for slot in self.slots if slot.number // self._model.rack_nodes == rack]

    def compute_relative_hazard(self, slot: Slot, now: float) -> float:
        """Return the failure rate of the machine as a multiple of that of a healthy one."""
        is_new = now - slot.installed_at < self._model.infant_seconds
        return (self._model.lemon_factor if slot.is_lemon else 1.0) * (self._model.infant_factor if is_new else 1.0)

    def set_view(self, slot: Slot, view: NodeView) -> None:
        """Replace the Node object of a slot."""
        slot.view = view
        self.views[view.name] = view

    def mark_not_ready(self, slot: Slot, now: float) -> None:
        """Set the node NotReady, at the end of the control plane's grace period."""
        self.set_view(slot, replace(slot.view, ready=NodeReadiness.UNKNOWN, unready_since=now))

    def report_device_fault(self, slot: Slot, now: float) -> None:
        """Set the condition with which the node monitor reports a broken device."""
        condition = NodeCondition(
            "AcceleratedHardwareReady", NodeReadiness.FALSE, "NeuronHBMUncorrectableError", since=now
        )
        self.set_view(slot, replace(slot.view, conditions=(condition,)))

    def announce_maintenance(self, slot: Slot) -> None:
        """Taint the node: its machine is scheduled for maintenance."""
        self.set_view(slot, replace(slot.view, taints=(Taint(MAINTENANCE_TAINT),)))

    def restore(self, slot: Slot, now: float, *, same_machine: bool, lemon: bool) -> str | None:
        """End a repair; return the name of the deleted node if another machine was installed, else None."""
        slot.has_power = True
        if same_machine:
            healthy = replace(slot.view, ready=NodeReadiness.TRUE, unready_since=None, conditions=(), taints=())
            self.set_view(slot, healthy)
            return None
        old_view = slot.view
        del self.views[old_view.name]
        self.deleted_provider_ids[old_view.name] = old_view.provider_id
        slot.machine_serial += 1
        slot.is_lemon, slot.installed_at, slot.slowness = lemon, now, 1.0
        self.set_view(slot, self._create_node_view(slot.number, slot.machine_serial))
        return old_view.name
