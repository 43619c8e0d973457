"""Start a generation: its number, its record, and the order of its writes.

Invariants: the status names the new generation before the ConfigMap holds it, and the ConfigMap holds it before the
coordinator serves it. A number is never one that an agent has been in. So a decision that is repeated after a crash may
choose other members under the same number only while no agent has seen that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import pluralize
from trainium_contract.status.public import MembershipStatus
from trainium_contract.wire.messages import MAX_GENERATION_LEAD, Member, Membership, Transition
from trainium_operator.plan.history.interruptions import find_open_membership_entry, replace_entry
from trainium_operator.plan.manifests.config_maps import build_membership_map
from trainium_operator.plan.membership.changed_pods import report_changed_pods, shorten_grace
from trainium_operator.plan.model.actions import Event, PolicyResult, PublishMembership, build_event
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from trainium_contract.faults.causes import Cause
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.view.context import PlanContext


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration:
    """A generation that a policy decided on."""

    members: tuple[Member, ...]
    transition: Transition
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Result of a membership policy."""

    status: TrainingJobStatus
    """The status with the interruption that a new generation ends."""
    new: NewGeneration | None = None
    """None while the current generation stays."""
    requeue_at: tuple[float, ...] = ()
    """When to decide again (Unix seconds)."""


def start_generation(context: PlanContext, status: TrainingJobStatus, new: NewGeneration) -> PolicyResult:
    """Record the decision in the status and publish it."""
    recorded = context.observed.membership
    number, size, workload = compute_next_generation(context), len(new.members), context.job.spec.workload
    members = tuple(shorten_grace(context, member) for member in new.members)
    membership = Membership(
        generation=number,
        transition=new.transition,
        cause=new.cause,
        members=members,
        processes_per_node=workload.processes_per_node,
        accumulation=context.size.count_micro_batches(size) if workload.reads_accumulation else 0,
        requested_nodes=context.job.spec.workers.replicas,
    )
    status = status.replaced(
        membership=MembershipStatus(
            generation=number, attempt=0, size=size, data_parallel=context.size.compute_data_parallel(size)
        )
    )
    publish = PublishMembership(
        membership=membership,
        manifest=build_membership_map(context.job, membership),
        replaces=recorded.generation if recorded else 0,
    )
    events: tuple[Event, ...] = ()
    if number > context.job.status.membership.generation:
        # A decision repeated after a crash was reported already.
        # The first generation answers no interruption, so it has no cause.
        why = f" ({new.cause.value}, {new.transition.value})" if number > 1 else ""
        note = f"Generation {number} begins on {pluralize(size, 'node')}{why}."
        events = (build_event(Reason.GENERATION_STARTED, note), *report_changed_pods(context, members))
    return PolicyResult(status=_date_decision(context, status), actions=(publish,), events=events)


def _date_decision(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """Set in the interruption that this generation answers when it was decided."""
    index = None if context.current is None else find_open_membership_entry(status, context.current.generation)
    if index is None or status.history[index].decided_at is not None:
        return status
    return replace_entry(status, index, status.history[index].replaced(decided_at=context.now))


def republish_membership(context: PlanContext) -> tuple[PublishMembership, ...]:
    """Let the coordinator serve the generation in the ConfigMap, for instance after a restart of the operator."""
    current = context.current
    if current is None or context.observed.published >= current.generation:
        return ()
    manifest = build_membership_map(context.job, current)
    return (PublishMembership(membership=current, manifest=manifest, replaces=current.generation),)


def find_newest_generation(context: PlanContext) -> int:
    """Return the newest generation that is recorded, served, or reported by an agent or a member's rank; 0 for none.

    A rank reports the one that owns the checkpoints of the run. Each report counts up to a limited lead.
    """
    recorded = context.observed.membership.generation if context.observed.membership else 0
    newest_known = max(recorded, context.observed.published, context.job.status.membership.generation)
    reported = [agent.heartbeat.generation for agent in context.observed.agents.values() if agent.heartbeat is not None]
    reported += [
        failure.newer_generation
        for _, heartbeat in context.heartbeats
        for failure in heartbeat.failures
        if failure.generation == heartbeat.generation
    ]
    credible = [generation for generation in reported if generation <= newest_known + MAX_GENERATION_LEAD]
    return max([recorded, context.observed.published, *credible])


def compute_next_generation(context: PlanContext) -> int:
    """Return the number of the next generation; a number that was decided but never recorded is used again."""
    return max(context.job.status.membership.generation, find_newest_generation(context) + 1)
