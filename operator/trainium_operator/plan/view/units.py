"""Group workers into units: nodes that are placed, lost and replaced together (an UltraServer).

A label of the pods names their unit; each worker of a job without UltraServers is a unit of one node. AWS sells
UltraServers as a whole (EC2 Capacity Blocks), and its example for Neuron replaces all pods of one together
(LeaderWorkerSet, `RecreateGroupOnPodRestart`; aws-neuron-sdk `deploy/eks/dra.rst`).

Guarantee: only whole units join or stay, so a size is always whole units.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.model.observed import PodView
    from trainium_operator.plan.view.workers import Worker


def find_unit(pod: PodView) -> str:
    """Return the name of the unit that a pod belongs to."""
    return pod.unit or pod.uid


def group_by_unit(workers: Iterable[Worker]) -> dict[str, list[Worker]]:
    """Return the workers of each unit, in the given order."""
    units: dict[str, list[Worker]] = {}
    for worker in workers:
        units.setdefault(find_unit(worker.pod), []).append(worker)
    return units


def select_whole_units(workers: Iterable[Worker], unit_nodes: int) -> tuple[Worker, ...]:
    """Return the workers of units that have all their nodes, unit by unit; no more of one than it has nodes."""
    if unit_nodes == 1:
        return tuple(workers)
    units = group_by_unit(workers).values()
    return tuple(worker for unit in units if len(unit) >= unit_nodes for worker in unit[:unit_nodes])


def complete_units(
    survivors: Sequence[Member], workers: Mapping[str, Worker], returned: Iterable[Worker], unit_nodes: int
) -> tuple[tuple[Member, ...], tuple[Worker, ...]]:
    """Return the members of units that are whole, some with workers that returned to them, and those workers.

    workers: by pod uid. returned: workers outside the generation that can join at once.
    """
    if unit_nodes == 1:
        return tuple(survivors), ()
    joining = group_by_unit(returned)
    members_by_unit: dict[str, list[Member]] = {}
    for member in survivors:
        worker = workers.get(member.pod_uid)
        members_by_unit.setdefault(find_unit(worker.pod) if worker else member.pod_uid, []).append(member)
    kept: list[Member] = []
    fillers: list[Worker] = []
    for unit, members in members_by_unit.items():
        missing = unit_nodes - len(members)
        if len(joining.get(unit, ())) >= missing:
            kept += members
            fillers += joining.get(unit, [])[:missing]
    return tuple(sorted(kept, key=lambda member: member.node_rank)), tuple(fillers)


def count_missing_pods(present: Iterable[str], wanted: int, unit_nodes: int) -> tuple[int, tuple[str, ...]]:
    """Return how many pods are to be created, and the units that the first of them complete; the others form new units.

    present: the unit of each pod that counts. wanted: the number of pods. The fullest units are kept.
    """
    kept = Counter(present).most_common(wanted // unit_nodes)
    completed = tuple(unit for unit, count in kept for _ in range(count, unit_nodes))
    return wanted // unit_nodes * unit_nodes - sum(min(count, unit_nodes) for _, count in kept), completed


def select_surplus(
    candidates: Iterable[Worker], present: Sequence[str], wanted: int, unit_nodes: int
) -> tuple[Worker, ...]:
    """Return the candidates of the units beyond the wanted number of pods, those that lack a node first.

    candidates: the workers that may be deleted, in order. A unit that has others too is not deleted.
    """
    counts = Counter(present)
    units = [unit for name, unit in group_by_unit(candidates).items() if unit_nodes == 1 or len(unit) == counts[name]]
    units.sort(key=lambda unit: len(unit) >= unit_nodes)
    return tuple(worker for unit in units[: max(0, len(counts) - wanted // unit_nodes)] for worker in unit)
