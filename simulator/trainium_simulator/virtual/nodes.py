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

NOTICE = "aws-node-termination-handler/scheduled-maintenance"
_REPELLING_EFFECTS = frozenset({"NoSchedule", "NoExecute"})


@dataclass(slots=True)
class Slot:
    """A slot of the cluster, and its machine."""

    number: int
    view: NodeView
    lemon: bool
    installed_at: float
    """Time at which the machine was installed."""
    serial: int = 0
    up: bool = True
    slowness: float = 1.0
    """Factor by which a step's own work takes longer here."""
    occupied: bool = False
    """Whether pods of other users occupy it."""
    repair: int = 0
    """Number of repairs here: only the newest restores the node."""

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.view.name

    @property
    def takes_pods(self) -> bool:
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
        self.deleted: dict[str, str] = {}
        """Node name -> provider ID of nodes that no longer exist."""
        self.slots = [
            Slot(number, self._view(number, 0), lemon=number in lemons, installed_at=float("-inf"))
            for number in range(count)
        ]
        self.views = {slot.name: slot.view for slot in self.slots}
        self._by_name = {slot.name: slot for slot in self.slots}

    def _view(self, number: int, serial: int) -> NodeView:
        name = f"node-{number}" if serial == 0 else f"node-{number}-{serial}"
        labels = {LABEL_HOST: name, LAYERS[-1]: f"rack-{number // self._model.rack_nodes}"}
        if self._instance_type:
            labels[LABEL_INSTANCE_TYPE] = self._instance_type
        return NodeView(name=name, provider_id=f"sim:///{number}/{serial}", labels=labels)

    def of(self, name: str) -> Slot | None:
        """Return the slot of a node; None when it is deleted."""
        return self._by_name.get(name)

    def rack_of(self, number: int) -> list[Slot]:
        """Return the slots that share a switch with this one."""
        rack = number // self._model.rack_nodes
        return [slot for slot in self.slots if slot.number // self._model.rack_nodes == rack]

    def hazard(self, slot: Slot, now: float) -> float:
        """Return how often the machine fails, in units of a healthy one."""
        young = now - slot.installed_at < self._model.infant_seconds
        return (self._model.lemon_factor if slot.lemon else 1.0) * (self._model.infant_factor if young else 1.0)

    def set_view(self, slot: Slot, view: NodeView) -> None:
        """Replace the Node object of a slot."""
        slot.view = view
        self.views[view.name] = view

    def mark_not_ready(self, slot: Slot, now: float) -> None:
        """Set the node NotReady, at the end of the control plane's grace period."""
        self.set_view(slot, replace(slot.view, ready=NodeReadiness.UNKNOWN, unready_since=now))

    def report_device_fault(self, slot: Slot, now: float) -> None:
        """Have the node monitor report a broken device."""
        broken = NodeCondition(
            "AcceleratedHardwareReady", NodeReadiness.FALSE, "NeuronHBMUncorrectableError", since=now
        )
        self.set_view(slot, replace(slot.view, conditions=(broken,)))

    def announce_maintenance(self, slot: Slot) -> None:
        """Taint the node: its machine is scheduled for maintenance."""
        self.set_view(slot, replace(slot.view, taints=(Taint(NOTICE),)))

    def restore(self, slot: Slot, now: float, *, same_machine: bool, lemon: bool) -> str | None:
        """End a repair; return the name of the deleted node when another machine was installed."""
        slot.up = True
        if same_machine:
            whole = replace(slot.view, ready=NodeReadiness.TRUE, unready_since=None, conditions=(), taints=())
            self.set_view(slot, whole)
            return None
        old = slot.view
        del self.views[old.name], self._by_name[old.name]
        self.deleted[old.name] = old.provider_id
        slot.serial += 1
        slot.lemon, slot.installed_at, slot.slowness = lemon, now, 1.0
        self.set_view(slot, self._view(slot.number, slot.serial))
        self._by_name[slot.name] = slot
        return old.name
