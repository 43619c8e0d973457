"""A new generation: its number, its record, and the order of its writes.

Invariants: the status names the new generation before the ConfigMap holds it, and the ConfigMap holds it before the
coordinator serves it. A number is never one that an agent has been in, so a repeated decision after a crash may take
other members under the same number only while nobody has seen that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.job import MembershipStatus
from trainium_contract.messages import Membership, Transition, WorkerPhase
from trainium_operator.plan.children import membership_map
from trainium_operator.plan.history import open_membership_entry, replace_entry
from trainium_operator.plan.model import PublishMembership
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.troubles import is_second_choice

if TYPE_CHECKING:
    from trainium_contract.exit_codes import Cause
    from trainium_contract.messages import Member
    from trainium_operator.plan.facts import Draft, Facts
    from trainium_operator.plan.workers import Worker


_FARTHEST_AHEAD = 1_000
"""A number that an agent claims to be in counts up to this distance: one faulty agent must not use them all up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration:
    """What a policy decided."""

    members: tuple[Member, ...]
    transition: Transition
    cause: Cause


def begin_generation(facts: Facts, draft: Draft, new: NewGeneration) -> None:
    """Write the decision to the status and ask for its publication."""
    recorded = facts.observed.membership
    number = next_generation(facts)
    membership = Membership(
        generation=number,
        transition=new.transition,
        cause=new.cause,
        members=new.members,
        processes_per_node=facts.job.spec.workers.accelerator.cores(),
    )
    size = len(new.members)
    draft.update(
        membership=MembershipStatus(
            generation=number, attempt=0, size=size, data_parallel=facts.size.data_parallel(size)
        ),
        waiting_since=facts.now if size < draft.status.desired else None,
    )
    draft.actions.append(
        PublishMembership(
            membership=membership,
            manifest=membership_map(facts.job, membership),
            replaces=recorded.generation if recorded else 0,
        )
    )
    if number > facts.job.status.membership.generation:
        # Decided anew after a crash it has been told already.
        draft.note(
            Reason.GENERATION_STARTED,
            f"Generation {number} begins on {size} nodes ({new.cause.value}, {new.transition.value}).",
        )
    _date_decision(facts, draft)


def _date_decision(facts: Facts, draft: Draft) -> None:
    """Tell the interruption that this generation answers when it was decided on."""
    index = None if facts.current is None else open_membership_entry(draft.status, facts.current.generation)
    if index is not None and draft.status.history[index].decided_at is None:
        replace_entry(draft, index, draft.status.history[index].model_copy(update={"decided_at": facts.now}))


def keep_published(facts: Facts, draft: Draft) -> None:
    """Let the coordinator serve what the ConfigMap records, for instance after a restart of the operator."""
    current = facts.current
    if current is not None and facts.observed.published < current.generation:
        draft.actions.append(
            PublishMembership(
                membership=current, manifest=membership_map(facts.job, current), replaces=current.generation
            )
        )


def adopt_recorded(facts: Facts, draft: Draft) -> None:
    """Bring the status up to a recorded generation that it does not know, as after a lost or edited status."""
    current = facts.current
    if current is not None and current.generation > draft.status.membership.generation:
        size = len(current.members)
        draft.update(
            membership=MembershipStatus(
                generation=current.generation, attempt=0, size=size, data_parallel=facts.size.data_parallel(size)
            )
        )


def next_generation(facts: Facts) -> int:
    """The number of the next generation; a number that was decided on but never recorded is taken again."""
    recorded = facts.observed.membership.generation if facts.observed.membership else 0
    known = max(recorded, facts.observed.published, facts.job.status.membership.generation)
    seen = [agent.heartbeat.generation for agent in facts.observed.agents.values() if agent.heartbeat is not None]
    newest = max([recorded, facts.observed.published, *(each for each in seen if each <= known + _FARTHEST_AHEAD)])
    return max(facts.job.status.membership.generation, newest + 1)


def is_settled(facts: Facts) -> bool:
    """Whether every member trains in the generation in force."""
    if facts.current is None:
        return False
    training = sum(beat.phase is WorkerPhase.TRAINING for _, beat in facts.beats)
    return training == len(facts.current.members)


def newcomers_of(facts: Facts) -> tuple[Worker, ...]:
    """Workers that can join at once, those on suspected nodes last."""
    return tuple(sorted(facts.candidates, key=lambda worker: (is_second_choice(facts, worker), worker.pod.ordinal)))
