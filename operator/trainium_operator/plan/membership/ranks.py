"""Assign node ranks: survivors keep theirs, a newcomer takes a free one, and as few as possible move.

Neighbouring ranks are near each other in the network. A place is the path from the widest domain to the node: network
layers (the higher the number the nearer), zone, host name; two nodes are the nearer the longer their common prefix. A
missing label is an empty step of the path, so clusters without labels keep the order of ordinals.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_contract.wire.messages import Member
from trainium_operator.plan.model.names import LABEL_HOST, LABEL_ZONE, LAYERS
from trainium_operator.plan.view.facts import Facts, is_second_choice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_operator.plan.model.observed import NodeView
    from trainium_operator.plan.view.workers import Worker


Json = dict[str, Any]
Place = tuple[str, ...]


def place_of(name: str, node: NodeView | None) -> Place:
    """Return the place of a node; of one that is not known, only its name."""
    labels = node.labels if node is not None else {}
    return (*(labels.get(layer, "") for layer in LAYERS), labels.get(LABEL_ZONE, ""), labels.get(LABEL_HOST, name))


def nearest_first(workers: Sequence[Worker], nodes: Mapping[str, NodeView]) -> list[Worker]:
    """Return workers in domains that hold many of them first, domain by domain; within the nearest one, oldest first.

    So any beginning of the list is spread over few domains, and what is left over is scattered anyway.
    """
    placed = [(place_of(worker.pod.node, nodes.get(worker.pod.node)), worker) for worker in workers]
    return [worker for _, worker in _flattened(placed, 0)]


def _flattened(placed: list[tuple[Place, Worker]], depth: int) -> list[tuple[Place, Worker]]:
    if depth > len(LAYERS):  # below the layers and the zone there are only single nodes
        return sorted(placed, key=lambda item: item[1].pod.ordinal)
    domains: dict[str, list[tuple[Place, Worker]]] = {}
    for item in placed:
        domains.setdefault(item[0][depth], []).append(item)
    order = sorted(domains, key=lambda name: (-len(domains[name]), name))
    return [item for name in order for item in _flattened(domains[name], depth + 1)]


@dataclass(frozen=True, slots=True)
class RankContext:
    """Context of the choice among joiners; without it they are taken in their order."""

    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    last_resort: frozenset[str] = frozenset()
    """Pod uids of newcomers that are taken only when no other is left."""


def rank_context(facts: Facts) -> RankContext:
    """Return the nodes, and the joiners on suspected ones."""
    suspected = (worker.pod.uid for worker in facts.candidates if is_second_choice(facts, worker))
    return RankContext(facts.observed.nodes, frozenset(suspected))


def order_first_ranks(workers: Sequence[Worker], size: int, around: RankContext | None = None) -> tuple[Worker, ...]:
    """Return the `size` workers that are nearest to each other, by rank, for a first generation."""
    around = around or RankContext()
    good = [worker for worker in workers if worker.pod.uid not in around.last_resort]
    suspected = [worker for worker in workers if worker.pod.uid in around.last_resort]
    chosen = [*nearest_first(good, around.nodes), *nearest_first(suspected, around.nodes)][:size]
    return tuple(sorted(chosen, key=lambda worker: (_place(worker.pod.node, around), worker.pod.ordinal)))


def assign_ranks(
    survivors: Sequence[Member], newcomers: Sequence[Worker], size: int, around: RankContext | None = None
) -> tuple[Member, ...]:
    """Return exactly `size` members, ascending by rank; needs at least `size` survivors and newcomers together.

    Survivors whose rank is below `size` keep it. The other survivors, then the newcomers, fill the free ranks from
    below, each time the one that is nearest to the ranks beside it; any that is not needed is left out.
    """
    around = around or RankContext()
    placed = {member.node_rank: member for member in survivors if member.node_rank < size}
    movers = [member for member in survivors if member.node_rank >= size]
    joining = [member_of(worker) for worker in newcomers]
    good = [member for member in joining if member.pod_uid not in around.last_resort]
    suspected = [member for member in joining if member.pod_uid in around.last_resort]
    pools = [_Pool(members, around) for members in (movers, good, suspected)]
    for rank in range(size):
        if rank not in placed:
            pool = next(each for each in pools if each.left)
            beside = [placed[other] for other in (rank - 1, rank + 1) if other in placed]
            placed[rank] = pool.take([_place(each.node_name, around) for each in beside]).replaced(node_rank=rank)
    return tuple(placed[rank] for rank in range(size))


class _Pool:
    """Members that wait for a rank, found by how much of their place they share; the order given breaks ties."""

    def __init__(self, members: Sequence[Member], around: RankContext) -> None:
        self.left = len(members)
        self._taken: set[str] = set()
        self._by_start: dict[Place, deque[Member]] = {}
        for member in members:
            place = _place(member.node_name, around)
            for length in range(len(place)):
                self._by_start.setdefault(place[:length], deque()).append(member)

    def take(self, beside: Sequence[Place]) -> Member:
        """Take the first member that shares the longest prefix with a neighbour's place; the pool must not be empty."""
        starts = {place[:length] for place in beside for length in range(len(place))} | {()}
        for start in sorted(starts, key=lambda each: (-len(each), each)):
            if start and not any(start):
                continue  # labels that are missing on both sides mean nothing
            waiting = self._by_start.get(start, deque())
            while waiting and waiting[0].pod_uid in self._taken:
                waiting.popleft()
            found = waiting[0] if waiting else None
            if found is not None:
                self.left -= 1
                self._taken.add(found.pod_uid)
                return found
        raise AssertionError("the pool is empty")


def _place(node: str, around: RankContext) -> Place:
    return place_of(node, around.nodes.get(node))


def member_of(worker: Worker, rank: int = 0) -> Member:
    """Build a member from what its agent registered; the worker must have an agent."""
    assert worker.agent is not None
    registration = worker.agent.registration
    return Member(
        pod_uid=worker.pod.uid,
        pod_name=worker.pod.name,
        pod_ip=registration.pod_ip,
        node_name=worker.pod.node,
        node_rank=rank,
        rendezvous_port=registration.rendezvous_port,
    )
