"""Encode the difference of two memberships for an agent that has the first.

If one of a thousand workers is replaced, it is a few hundred bytes instead of 15 to 40 kB for each agent.

Invariants: a change that is applied to the membership that it was computed from gives the new one, field by field.
Applied to any other it is refused.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pydantic import Field

from trainium_contract.wire.messages import (
    PROTOCOL,
    Generation,
    KnownCause,
    Member,
    Membership,
    Protocol,
    Transition,
    WireMessage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_CHANGED_SHARE = 0.5
"""Share of changed members above which the whole membership is sent, because it is not much longer."""


class StaleChangeError(ValueError):
    """The change was computed from another membership; request the whole one."""


class MembershipChange(WireMessage):
    """The generation `generation`, for agents with the generation `since`."""

    protocol: Protocol = PROTOCOL
    since: Generation
    generation: Generation
    transition: Transition
    cause: KnownCause
    processes_per_node: int = Field(ge=1)
    accumulation: int = Field(ge=0, default=0)
    requested_nodes: int = Field(ge=0, default=0)
    size: int = Field(ge=1)
    """Number of members; members of `since` with a higher node rank have left."""
    members: tuple[Member, ...] = ()
    """Members that are new or changed since `since`, by node rank."""
    digest: str = Field(max_length=64)
    """`digest_members` of all members."""


def diff_memberships(old: Membership, new: Membership) -> MembershipChange | None:
    """Return the change for an agent with `old`; None if the whole membership is as short."""
    old_members = {member.node_rank: member for member in old.members}
    changed = tuple(member for member in new.members if old_members.get(member.node_rank) != member)
    if len(changed) > len(new.members) * MAX_CHANGED_SHARE:
        return None
    return MembershipChange(
        since=old.generation,
        generation=new.generation,
        transition=new.transition,
        cause=new.cause,
        processes_per_node=new.processes_per_node,
        accumulation=new.accumulation,
        requested_nodes=new.requested_nodes,
        size=len(new.members),
        members=changed,
        digest=digest_members(new.members),
    )


def apply_change(change: MembershipChange, known: Membership | None) -> Membership:
    """Return the new membership. Raises StaleChangeError."""
    if known is None or known.generation != change.since:
        known_generation = f"generation {known.generation}" if known is not None else "none"
        raise StaleChangeError(f"a change of generation {change.since} was received, and {known_generation} is known")
    members_by_rank = {member.node_rank: member for member in known.members if member.node_rank < change.size}
    members_by_rank |= {member.node_rank: member for member in change.members}
    members = tuple(members_by_rank[rank] for rank in sorted(members_by_rank))
    if not members or digest_members(members) != change.digest:
        raise StaleChangeError(f"generation {change.generation} does not follow from what is known of {change.since}")
    return Membership(
        generation=change.generation,
        transition=change.transition,
        cause=change.cause,
        members=members,
        processes_per_node=change.processes_per_node,
        accumulation=change.accumulation,
        requested_nodes=change.requested_nodes,
    )


def digest_members(members: Iterable[Member]) -> str:
    """Return a digest of ranks, pods and addresses, without fields that a later version adds to a member."""
    lines = (
        f"{member.node_rank} {member.pod_uid} {member.pod_name} {member.pod_ip} {member.node_name} "
        f"{member.rendezvous_port}\n"
        for member in members
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
