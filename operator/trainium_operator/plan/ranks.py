"""Policy: who gets which node rank. Survivors keep theirs; a newcomer takes a lost one; as few as possible move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.messages import Member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_operator.plan.workers import Worker


def first_order(workers: Sequence[Worker], size: int) -> tuple[Worker, ...]:
    """The workers of a first generation: the oldest `size`, neighbouring nodes next to each other."""
    chosen = sorted(workers, key=lambda worker: worker.pod.ordinal)[:size]
    return tuple(sorted(chosen, key=lambda worker: (worker.pod.node, worker.pod.ordinal)))


def assign_ranks(survivors: Sequence[Member], newcomers: Sequence[Worker], size: int) -> tuple[Member, ...]:
    """Exactly `size` members, ascending by rank; needs at least `size` survivors and newcomers together.

    Survivors whose rank is below `size` keep it. The other survivors, then the newcomers, fill the free ranks from
    below; whoever is not needed is left out.
    """
    placed = {member.node_rank: member for member in survivors if member.node_rank < size}
    movers = [member for member in survivors if member.node_rank >= size]
    waiting = [*movers, *(member_of(worker) for worker in newcomers)]
    for rank in range(size):
        if rank not in placed:
            placed[rank] = waiting.pop(0).model_copy(update={"node_rank": rank})
    return tuple(placed[rank] for rank in range(size))


def member_of(worker: Worker, rank: int = 0) -> Member:
    """A member made from what its agent registered; the worker must have an agent."""
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
