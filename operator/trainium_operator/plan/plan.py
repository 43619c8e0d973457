"""`plan`: from what is observed to what is done, one policy after the other. Reads like a table of contents.

Invariants: pure and level-triggered: the same observation always gives the same plan, and the plan for a state in which
the last plan was carried out asks for nothing. Every decision is in the status before it is acted on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import ConditionType
from trainium_operator.plan.announce import announce
from trainium_operator.plan.budgets import avoided_nodes
from trainium_operator.plan.children import converge_children
from trainium_operator.plan.closing import close_abandoned, close_lapsed, close_recovered
from trainium_operator.plan.conditions import is_terminal
from trainium_operator.plan.decided import finish_decided
from trainium_operator.plan.disruption import limit_disruptions
from trainium_operator.plan.drift import note_drift
from trainium_operator.plan.ending import all_finished, clean_up, complete, stop
from trainium_operator.plan.expiry import expire
from trainium_operator.plan.facts import Draft, sort_facts
from trainium_operator.plan.formation import form_first_generation
from trainium_operator.plan.future import in_the_present
from trainium_operator.plan.gang import withholds_pods
from trainium_operator.plan.generation import adopt_recorded, begin_generation, keep_published
from trainium_operator.plan.in_place import take_restarts
from trainium_operator.plan.losses import find_losses
from trainium_operator.plan.model import Plan
from trainium_operator.plan.node_health import note_nodes
from trainium_operator.plan.notices import heed_notices
from trainium_operator.plan.pods import converge_pods
from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.recovery import note_losses, replace_lost, restart_stopped
from trainium_operator.plan.resize import note_request, resize
from trainium_operator.plan.size import decide_size
from trainium_operator.plan.stragglers import note_stragglers
from trainium_operator.plan.summary import only_counts_differ, only_progress_differs, summarise
from trainium_operator.plan.suspension import stay_active, suspend
from trainium_operator.plan.times import parse_rfc3339
from trainium_operator.plan.verdicts import budget_verdict, reach_verdict

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.facts import Facts
    from trainium_operator.plan.generation import NewGeneration
    from trainium_operator.plan.losses import Loss
    from trainium_operator.plan.model import Observed, PlanSettings

_SHORTEST_REQUEUE_SECONDS = 0.05


def plan(observed: Observed, settings: PlanSettings) -> Plan:
    """What to do about one TrainingJob now; never raises for anything that a user can write."""
    job = observed.job
    if job.deleting:
        # Owner references delete the children; agents save on SIGTERM.
        return Plan(status=job.status)
    observed = in_the_present(observed)
    job = observed.job
    facts = sort_facts(observed, settings, decide_size(job.spec))
    draft = Draft(status=job.status, now=observed.now)
    if is_terminal(job.status):
        clean_up(facts, draft)
        return _sealed(facts, draft)
    _begin(facts, draft)
    losses = heed_notices(facts, draft, find_losses(facts, draft))
    if all_finished(facts):
        # The last heartbeats may tell of restarts while nobody listened.
        take_restarts(facts, draft, member_lost=False)
        close_recovered(facts, draft)
        close_abandoned(facts, draft)
        summarise(facts, draft)
        complete(facts, draft)
        return _sealed(facts, draft)
    verdict = reach_verdict(facts)
    if verdict is None and not job.spec.suspend:
        take_restarts(facts, draft, member_lost=bool(losses))
        if losses:
            note_losses(facts, draft, losses)
    close_recovered(facts, draft)
    verdict = verdict or budget_verdict(facts, draft)
    if verdict is not None:
        summarise(facts, draft)
        stop(facts, draft, verdict)
        return _sealed(facts, draft)
    converge_children(facts, draft)
    if job.spec.suspend:
        close_abandoned(facts, draft)
        suspend(facts, draft)
    else:
        stay_active(draft)
        note_stragglers(facts, draft)
        new = _decide_generation(facts, draft, losses)
        if new is not None:
            begin_generation(facts, draft, new)
        else:
            keep_published(facts, draft)
            if not losses:
                close_lapsed(facts, draft)
        if not withholds_pods(facts, draft):
            converge_pods(facts, draft, losses)
    note_drift(facts, draft)
    if not _knows_less(facts):
        summarise(facts, draft)
    return _sealed(facts, draft)


def _knows_less(facts: Facts) -> bool:
    """Whether the status tells of a newer generation than the record that this process has seen.

    Either that record is about to be written, and the next plan counts; or another operator wrote it, and counts from
    here would overwrite its counts, time after time.
    """
    return facts.current is not None and facts.current.generation < facts.job.status.membership.generation


def _begin(facts: Facts, draft: Draft) -> None:
    """Bring what follows from the spec alone into the status."""
    draft.update(observed_generation=facts.job.generation)
    size = facts.size
    legal = size.desired > 0 and size.reason is Reason.AS_REQUESTED
    draft.condition(ConditionType.SIZE_LEGAL, legal, size.reason, size.message)
    adopt_recorded(facts, draft)
    desired = size.desired or draft.status.desired
    note_request(facts, draft, desired)
    avoid = facts.settings.avoid_node_seconds
    note_nodes(facts, draft)
    draft.update(desired=desired, avoided_nodes=avoided_nodes(draft.status.failures, facts.now, avoid))


def _decide_generation(facts: Facts, draft: Draft, losses: tuple[Loss, ...]) -> NewGeneration | None:
    """The next generation: the first, one without the lost, or one of another size."""
    if facts.current is None:
        return form_first_generation(facts, draft)
    if losses:
        return replace_lost(facts, draft, losses)
    return restart_stopped(facts, draft) or resize(facts, draft) or finish_decided(facts, draft)


def _write_due(facts: Facts, old: TrainingJobStatus, status: TrainingJobStatus) -> float:
    """When the status may be written: one that only brings progress or counts waits a while after the last one."""
    if status == old:
        return 0.0
    if only_progress_differs(old, status):
        written = max(parse_rfc3339(old.progress.updated) or 0.0, old.goodput.accounted_until or 0.0)
        return written + facts.status_interval
    if only_counts_differ(old, status):
        return facts.observed.status_written + facts.settings.count_interval_seconds
    return 0.0


def _is_open(status: TrainingJobStatus) -> bool:
    """Whether an interruption is open: some policies wait until none is."""
    return any(entry.recovered_seconds is None for entry in status.history)


def _sealed(facts: Facts, draft: Draft) -> Plan:
    """The finished plan, with the status as it is to be written now."""
    limit_disruptions(facts, draft)
    if is_terminal(draft.status):
        expire(facts, draft)
    old, status = facts.job.status, draft.status
    announce(old, draft)
    deadlines = list(draft.deadlines)
    acted = bool(draft.actions) or status.membership.size != old.membership.size or _is_open(old) != _is_open(status)
    if acted and not is_terminal(status):
        # What is derived from the outcome (counts, conditions) is written by the next plan.
        deadlines.append(facts.now)
    due = _write_due(facts, old, status)
    if facts.now < due:
        deadlines.append(due)
        status = old
    soonest = min(deadlines, default=None)
    return Plan(
        status=status,
        actions=tuple(draft.actions),
        # What happened shows in the status: without a write of it there is nothing new to tell, or not yet.
        events=() if status == old else tuple(draft.events),
        requeue_after=None if soonest is None else max(_SHORTEST_REQUEUE_SECONDS, soonest - facts.now),
    )
