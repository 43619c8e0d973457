"""Assign node ranks: survivors keep theirs, a newcomer takes a free one, and as few as possible move.

The ranks of a unit (an UltraServer) are neighbours, in the order of its nodes: Neuron's topology identifiers follow the
UltraServers and the nodes in them (aws-neuron-sdk `src/k8/k8s-ultraserver-init-script.sh`).

Neighbouring ranks are near each other in the network. A place is the path from the widest domain to the node: network
layers (a higher number is nearer), zone, host name. The longer the common prefix of two nodes, the nearer they are. A
missing label is an empty element of the path, so clusters without labels keep the order of ordinals.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.accelerators import ULTRA_SERVER_NODE_LABEL
from trainium_contract.wire.messages import Member
from trainium_operator.plan.model.names import LABEL_HOST, LABEL_ZONE, LAYERS
from trainium_operator.plan.view.context import PlanContext, is_second_choice
from trainium_operator.plan.view.units import find_unit, group_by_unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_operator.plan.model.observed import NodeView
    from trainium_operator.plan.view.workers import Worker


Json = dict[str, Any]
Place = tuple[str, ...]


def find_network_path(name: str, node: NodeView | None) -> Place:
    """Return the place of a node; only its name if the node is not known."""
    labels = node.labels if node is not None else {}
    return (*(labels.get(layer, "") for layer in LAYERS), labels.get(LABEL_ZONE, ""), labels.get(LABEL_HOST, name))


def sort_nearest_first(workers: Sequence[Worker], nodes: Mapping[str, NodeView]) -> list[Worker]:
    """Return workers domain by domain, the domains with many of them first; in the nearest domain the oldest first.

    So any prefix of the list spans few domains, and the rest is scattered in any case.
    """
    placed = [(find_network_path(worker.pod.node, nodes.get(worker.pod.node)), worker) for worker in workers]
    return [worker for _, worker in _flatten_domains(placed, 0)]


def _flatten_domains(placed: list[tuple[Place, Worker]], depth: int) -> list[tuple[Place, Worker]]:
    if depth > len(LAYERS):  # below the layers and the zone there are only single nodes
        return sorted(placed, key=lambda item: item[1].pod.ordinal)
    domains: dict[str, list[tuple[Place, Worker]]] = {}
    for item in placed:
        domains.setdefault(item[0][depth], []).append(item)
    order = sorted(domains, key=lambda name: (-len(domains[name]), name))
    return [item for name in order for item in _flatten_domains(domains[name], depth + 1)]


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where joiners are, for a choice among them; without it they are chosen in order."""

    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    last_resort: frozenset[str] = frozenset()
    """Pod uids of newcomers that are chosen only if no other is left."""
    unit_nodes: int = 1
    """Nodes of a unit; the workers and members are whole units of them."""
    units: Mapping[str, str] = field(default_factory=dict)
    """Unit by pod uid; needed for units of several nodes."""


def build_rank_placement(context: PlanContext) -> RankPlacement:
    """Return the nodes, the joiners on suspected ones, and the units."""
    suspected = (worker.pod.uid for worker in context.candidates if is_second_choice(context, worker))
    units = {uid: find_unit(worker.pod) for uid, worker in context.workers.items()} if context.unit_nodes > 1 else {}
    return RankPlacement(context.observed.nodes, frozenset(suspected), context.unit_nodes, units)


def order_first_ranks(
    workers: Sequence[Worker], size: int, placement: RankPlacement | None = None
) -> tuple[Worker, ...]:
    """Return the `size` workers that are nearest to each other, by rank, for a first generation."""
    placement = placement or RankPlacement()
    if placement.unit_nodes > 1:
        return _order_first_units(workers, size, placement)
    good = [worker for worker in workers if worker.pod.uid not in placement.last_resort]
    suspected = [worker for worker in workers if worker.pod.uid in placement.last_resort]
    chosen = [*sort_nearest_first(good, placement.nodes), *sort_nearest_first(suspected, placement.nodes)][:size]
    return tuple(sorted(chosen, key=lambda worker: (_find_place(worker.pod.node, placement), worker.pod.ordinal)))


def assign_ranks(
    survivors: Sequence[Member], newcomers: Sequence[Worker], size: int, placement: RankPlacement | None = None
) -> tuple[Member, ...]:
    """Return exactly `size` members, ascending by rank; needs at least `size` survivors and newcomers together.

    Survivors whose rank is below `size` keep it. The other survivors, then the newcomers, fill the free ranks from
    below, each with the one that is nearest to its neighbours; the rest is left out.
    """
    placement = placement or RankPlacement()
    if placement.unit_nodes > 1:
        return _assign_units(survivors, newcomers, size, placement)
    placed = {member.node_rank: member for member in survivors if member.node_rank < size}
    movers = [member for member in survivors if member.node_rank >= size]
    joining = [build_member(worker) for worker in newcomers]
    good = [member for member in joining if member.pod_uid not in placement.last_resort]
    suspected = [member for member in joining if member.pod_uid in placement.last_resort]
    pools = [_Pool(members, placement) for members in (movers, good, suspected)]
    for rank in range(size):
        if rank not in placed:
            pool = next(pool for pool in pools if pool.size)
            beside = [placed[other].node_name for other in (rank - 1, rank + 1) if other in placed]
            member = pool.pop_nearest([_find_place(node, placement) for node in beside])
            placed[rank] = member.replaced(node_rank=rank)
    return tuple(placed[rank] for rank in range(size))


def _order_first_units(workers: Sequence[Worker], size: int, placement: RankPlacement) -> tuple[Worker, ...]:
    """Return the workers of the units that are nearest to each other, unit by unit."""
    units = group_by_unit(workers)
    firsts = [_find_representative(unit, placement) for unit in units.values()]
    chosen = order_first_ranks(firsts, size // placement.unit_nodes, replace(placement, unit_nodes=1))
    ordered = (
        sorted(units[find_unit(first.pod)], key=lambda unit_worker: _build_sort_key(unit_worker.pod.node, placement))
        for first in chosen
    )
    return tuple(worker for unit in ordered for worker in unit)


def _assign_units(
    survivors: Sequence[Member], newcomers: Sequence[Worker], size: int, placement: RankPlacement
) -> tuple[Member, ...]:
    """Return the members unit by unit; a unit has the place of one rank in `assign_ranks`."""
    count, units = placement.unit_nodes, group_by_unit(newcomers)
    staying: dict[str, list[Member]] = {}
    for member in survivors:
        staying.setdefault(placement.units[member.pod_uid], []).append(member)
    firsts = assign_ranks(
        [unit[0].replaced(node_rank=unit[0].node_rank // count) for unit in staying.values()],
        [_find_representative(workers, placement) for unit, workers in units.items() if unit not in staying],
        size // count,
        replace(placement, unit_nodes=1),
    )
    members: list[Member] = []
    for first in firsts:
        unit = placement.units[first.pod_uid]
        by_place = {member.node_rank % count: member for member in staying.get(unit, ())}
        joining = sorted(units.get(unit, ()), key=lambda worker: _build_sort_key(worker.pod.node, placement))
        free = (place for place in range(count) if place not in by_place)
        by_place |= {place: build_member(worker) for place, worker in zip(free, joining, strict=True)}
        members += (by_place[place].replaced(node_rank=first.node_rank * count + place) for place in range(count))
    return tuple(members)


def _find_representative(unit: Sequence[Worker], placement: RankPlacement) -> Worker:
    """Return the worker that stands for its unit: a suspected one, if there is one."""
    return next((worker for worker in unit if worker.pod.uid in placement.last_resort), unit[0])


def _build_sort_key(node: str, placement: RankPlacement) -> tuple[int, Place]:
    """Return the order of a node in its unit: its number in the UltraServer, if it has one, then its place."""
    view = placement.nodes.get(node)
    number = view.labels.get(ULTRA_SERVER_NODE_LABEL.format(placement.unit_nodes), "") if view is not None else ""
    return int(number) if number.isdecimal() and number.isascii() else 0, _find_place(node, placement)


class _Pool:
    """Members without a rank, found by the length of the shared prefix of their place; ties keep the given order."""

    def __init__(self, members: Sequence[Member], placement: RankPlacement) -> None:
        self.size = len(members)
        self._removed: set[str] = set()
        self._by_prefix: dict[Place, deque[Member]] = {}
        for member in members:
            place = _find_place(member.node_name, placement)
            for length in range(len(place)):
                self._by_prefix.setdefault(place[:length], deque()).append(member)

    def pop_nearest(self, neighbours: Sequence[Place]) -> Member:
        """Remove and return the first member with the longest prefix shared with a neighbour's place.

        The pool must not be empty.
        """
        prefixes = {place[:length] for place in neighbours for length in range(len(place))} | {()}
        for prefix in sorted(prefixes, key=lambda prefix: (-len(prefix), prefix)):
            if prefix and not any(prefix):
                continue  # labels that are missing on both sides match nothing
            members = self._by_prefix.get(prefix, deque())
            while members and members[0].pod_uid in self._removed:
                members.popleft()
            if members:
                self.size -= 1
                self._removed.add(members[0].pod_uid)
                return members[0]
        raise AssertionError("the pool is empty")


def _find_place(node: str, placement: RankPlacement) -> Place:
    return find_network_path(node, placement.nodes.get(node))


def build_member(worker: Worker, rank: int = 0) -> Member:
    """Build a member from what its agent registered; the worker must have an agent."""
    registration = worker.agent.registration if worker.agent is not None else None
    assert registration is not None
    return Member(
        pod_uid=worker.pod.uid,
        pod_name=worker.pod.name,
        pod_ip=registration.pod_ip,
        node_name=worker.pod.node,
        node_rank=rank,
        rendezvous_port=registration.rendezvous_port,
    )
