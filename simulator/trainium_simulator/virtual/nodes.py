"""The simulated cluster: places, the machine in each, and what the API server shows of its node.

Invariants: a machine's identity is its provider ID, whatever its node is called; a node that lost its power is shown as
ready until the control plane's grace is over, as a real one is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_operator.plan.model.names import LABEL_HOST, LABEL_INSTANCE_TYPE, LAYERS
from trainium_operator.plan.model.observed import NodeCondition, NodeReadiness, NodeView, Taint

if TYPE_CHECKING:
    from trainium_simulator.virtual.failures import FailureModel

NOTICE = "aws-node-termination-handler/scheduled-maintenance"
_KEEP_AWAY = frozenset({"NoSchedule", "NoExecute"})


@dataclass(slots=True)
class Slot:
    """One place of the cluster, and the machine that is in it."""

    number: int
    view: NodeView
    lemon: bool
    born: float
    """When the machine was put in."""
    serial: int = 0
    up: bool = True
    slowness: float = 1.0
    """Factor by which a step's own work takes longer here."""
    taken: bool = False
    """Somebody else's pods hold it."""
    repair: int = 0
    """Counts what is being repaired here: only the newest repair ends it."""

    @property
    def name(self) -> str:
        """The node's name."""
        return self.view.name

    @property
    def takes_pods(self) -> bool:
        """Whether a scheduler would put a pod of ours here."""
        view = self.view
        shut = any(taint.effect in _KEEP_AWAY for taint in view.taints)
        return (
            view.ready is NodeReadiness.TRUE and view.schedulable and not view.deleting and not shut and not self.taken
        )


class Nodes:
    """All places, and the nodes as the API server shows them."""

    def __init__(self, count: int, *, instance_type: str, model: FailureModel, lemons: frozenset[int]) -> None:
        self._model = model
        self._instance_type = instance_type
        self.deleted: dict[str, str] = {}
        """Node name -> provider ID of nodes that no longer exist."""
        self.slots = [
            Slot(number, self._view(number, 0), lemon=number in lemons, born=float("-inf")) for number in range(count)
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
        """Return the place of a node; None when it is gone."""
        return self._by_name.get(name)

    def rack_of(self, number: int) -> list[Slot]:
        """Return the places that share a switch with this one."""
        rack = number // self._model.rack_nodes
        return [slot for slot in self.slots if slot.number // self._model.rack_nodes == rack]

    def hazard(self, slot: Slot, now: float) -> float:
        """Return how often the machine fails, in units of a healthy one."""
        young = now - slot.born < self._model.infant_seconds
        return (self._model.lemon_factor if slot.lemon else 1.0) * (self._model.infant_factor if young else 1.0)

    def show(self, slot: Slot, view: NodeView) -> None:
        """Another state of the node."""
        slot.view = view
        self.views[view.name] = view

    def darken(self, slot: Slot, now: float) -> None:
        """End the control plane's grace for this node."""
        self.show(slot, replace(slot.view, ready=NodeReadiness.UNKNOWN, unready_since=now))

    def condemn(self, slot: Slot, now: float) -> None:
        """Have the node monitor report a broken device."""
        broken = NodeCondition(
            "AcceleratedHardwareReady", NodeReadiness.FALSE, "NeuronHBMUncorrectableError", since=now
        )
        self.show(slot, replace(slot.view, conditions=(broken,)))

    def give_notice(self, slot: Slot) -> None:
        """Announce that the machine will be taken away."""
        self.show(slot, replace(slot.view, taints=(Taint(NOTICE),)))

    def restore(self, slot: Slot, now: float, *, same_machine: bool, lemon: bool) -> str | None:
        """Return what was broken is whole: the name of the node that is gone, when another machine took the place."""
        slot.up = True
        if same_machine:
            whole = replace(slot.view, ready=NodeReadiness.TRUE, unready_since=None, conditions=(), taints=())
            self.show(slot, whole)
            return None
        old = slot.view
        del self.views[old.name], self._by_name[old.name]
        self.deleted[old.name] = old.provider_id
        slot.serial += 1
        slot.lemon, slot.born, slot.slowness = lemon, now, 1.0
        self.show(slot, self._view(slot.number, slot.serial))
        self._by_name[slot.name] = slot
        return old.name
