"""Which workers are extras: beyond what was asked for, on nodes that nobody else needs, and the first to go.

Invariant: what a job asked for never hangs on an extra, so of several workers that could stay those that are none do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_operator.plan.view.facts import sound_newcomers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trainium_contract.wire.messages import Member
    from trainium_operator.plan.view.facts import Facts
    from trainium_operator.plan.view.workers import Worker


def extras_alive(facts: Facts) -> tuple[Worker, ...]:
    """Extras that are there or may come, by ordinal."""
    return tuple(worker for worker in facts.workers.values() if worker.pod.extra and worker.alive)


def extras_usable(facts: Facts, lost: Collection[str]) -> tuple[Worker, ...]:
    """Extras that train, or can join at once; `lost` are pod uids of members that do not count."""
    members = [worker for _, worker in facts.members if worker is not None and worker.pod.uid not in lost]
    return tuple(worker for worker in (*members, *sound_newcomers(facts)) if worker.pod.extra)


def staying(facts: Facts, members: Sequence[Member], size: int) -> tuple[Member, ...]:
    """At most `size` of the members: extras go first, then the highest ranks."""
    extra = {uid for uid, worker in facts.workers.items() if worker.pod.extra}
    kept = sorted(members, key=lambda member: (member.pod_uid in extra, member.node_rank))[:size]
    return tuple(sorted(kept, key=lambda member: member.node_rank))


def joining(
    facts: Facts, survivors: Sequence[Member], newcomers: tuple[Worker, ...], size: int, base: int
) -> tuple[Worker, ...]:
    """The newcomers that may fill the ranks up to `size`; those beyond `base` are for extras, so that spares stay."""
    extra = [worker for worker in newcomers if worker.pod.extra]
    if size <= base or not extra:
        return newcomers
    known = {member.pod_uid for member in survivors}
    taken = sum(worker.pod.extra for uid, worker in facts.workers.items() if uid in known)
    first = extra[: max(0, size - base - taken)]
    rest = [worker for worker in newcomers if worker not in first]
    return (*first, *rest)[: max(0, size - len(survivors))]
