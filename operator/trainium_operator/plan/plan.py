"""`plan`: from what is observed to what is done, one policy after the other. Reads like a table of contents.

Invariants: pure and level-triggered: the same observation always gives the same plan, and the plan for a state in which
the last plan was carried out asks for nothing. Every decision is in the status before it is acted on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.diagnose.failure_policy import budget_verdict, reach_verdict
from trainium_operator.plan.diagnose.losses import Diagnosis, diagnose
from trainium_operator.plan.diagnose.stragglers import find_stragglers
from trainium_operator.plan.faults.failure_budgets import avoided_nodes
from trainium_operator.plan.features import registry
from trainium_operator.plan.history.in_place_restarts import take_restarts
from trainium_operator.plan.history.interruptions import note_losses, with_sound_counts
from trainium_operator.plan.history.recovered import close_abandoned, close_lapsed, close_recovered
from trainium_operator.plan.lifecycle.completion import (
    all_finished,
    clean_up,
    complete,
    expire,
    note_change,
    stop,
    termination_status,
)
from trainium_operator.plan.lifecycle.deadlines import end, is_ending, watch_deadlines
from trainium_operator.plan.lifecycle.suspension import release, stay_active, suspend
from trainium_operator.plan.membership.decide import decide_generation, note_request
from trainium_operator.plan.membership.generation import begin_generation, keep_published
from trainium_operator.plan.model.actions import Answer, Plan
from trainium_operator.plan.model.conditions import is_terminal, with_condition
from trainium_operator.plan.model.feature import AdmissionState
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.pods.configuration import converge_configuration
from trainium_operator.plan.pods.disruption_budget import limit_disruptions
from trainium_operator.plan.pods.gang_policy import withhold_pods
from trainium_operator.plan.pods.refused_pods import with_refusing
from trainium_operator.plan.pods.replicas import converge_pods
from trainium_operator.plan.report.compiled_sizes import note_compiled
from trainium_operator.plan.report.events import announce
from trainium_operator.plan.report.node_conditions import note_nodes
from trainium_operator.plan.report.status import summarise
from trainium_operator.plan.report.template_drift import note_drift
from trainium_operator.plan.report.tool_conditions import tell_tools
from trainium_operator.plan.report.write_throttle import write_due
from trainium_operator.plan.view.corrected_status import correct_status
from trainium_operator.plan.view.facts import sort_facts
from trainium_operator.plan.view.image_of_run import with_image_of_run
from trainium_operator.plan.view.size import decide_size, size_within

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.diagnose.loss import Loss
    from trainium_operator.plan.model.observed import Observed, PlanSettings
    from trainium_operator.plan.view.facts import Facts

_SHORTEST_REQUEUE_SECONDS = 0.05


def plan(observed: Observed, settings: PlanSettings) -> Plan:
    """What to do about one TrainingJob now; never raises for anything that a user can write."""
    job = observed.job
    if job.deleting:
        # Owner references delete the children; agents save on SIGTERM.
        if is_terminal(job.status):
            return Plan(status=job.status)
        return Plan(status=tell_tools(termination_status(observed), observed.now))
    size = decide_size(job.spec)
    observed = correct_status(observed, size)
    job = observed.job
    used = tuple(feature for feature in registry.FEATURES if feature.is_used(observed, settings))
    settings = replace(with_image_of_run(observed, settings), features=used)
    facts = sort_facts(observed, settings, size)
    if is_terminal(job.status):
        ended = clean_up(facts, job.status)
        for feature in used:
            ended = ended.then(feature.finish(facts, ended.status))
        return _sealed(facts, ended.then(note_change(facts)))
    diagnosis = diagnose(facts)
    losses = diagnosis.losses
    answer = _begun(facts, diagnosis)
    if all_finished(facts):
        # The last heartbeats may report restarts while nobody listened.
        answer = answer.then(take_restarts(facts, answer.status, member_lost=False))
        answer = answer.having(close_abandoned(facts, close_recovered(facts, answer.status)))
        answer = answer.then(summarise(facts, answer.status))
        return _sealed(facts, answer.then(complete(facts, answer.status)))
    if is_ending(answer.status):
        return _sealed(facts, _ended(facts, answer))
    verdict = reach_verdict(facts)
    unadmitted = facts.grant is not None and facts.grant.releases
    if verdict is None and not (job.spec.suspend or unadmitted):
        answer = answer.then(take_restarts(facts, answer.status, member_lost=bool(losses)))
        answer = answer.having(note_losses(facts, answer.status, losses))
    answer = answer.having(close_recovered(facts, answer.status))
    verdict = verdict or budget_verdict(facts, answer.status)
    if verdict is not None:
        answer = answer.then(summarise(facts, answer.status))
        return _sealed(facts, answer.then(stop(facts, answer.status, verdict)))
    answer = answer.then(watch_deadlines(facts, answer.status))
    if is_ending(answer.status):
        return _sealed(facts, _ended(facts, answer))
    answer = answer.then(converge_configuration(facts, answer.status))
    for feature in used:
        answer = answer.then(feature.converge_before_pods(facts, answer.status))
    if job.spec.suspend:
        answer = answer.then(suspend(facts, close_abandoned(facts, answer.status)))
    elif unadmitted:
        answer = answer.having(stay_active(facts, close_abandoned(facts, answer.status)))
        answer = answer.then(release(facts, answer.status))
    else:
        answer = answer.having(stay_active(facts, answer.status))
        answer = answer.then(find_stragglers(facts, answer.status))
        for feature in used:
            answer = answer.then(feature.resize(facts, answer.status, losses))
        answer = answer.then(_decided(facts, answer.status, losses))
        withheld, given_back = withhold_pods(facts, answer.status)
        answer = answer.then(given_back)
        if not withheld:
            answer = answer.then(converge_pods(facts, answer.status, losses))
    for feature in used:
        answer = answer.then(feature.converge(facts, answer.status))
    answer = answer.then(note_drift(facts, answer.status))
    if not _knows_less(facts):
        answer = answer.then(summarise(facts, answer.status))
    return _sealed(facts, answer)


def _ended(facts: Facts, answer: Answer) -> Answer:
    """What follows once it is decided that the job ends for a deadline: nothing else is decided any more."""
    answer = answer.having(close_abandoned(facts, close_recovered(facts, answer.status)))
    if not _knows_less(facts):
        answer = answer.then(summarise(facts, answer.status))
    return answer.then(end(facts, answer.status))


def _knows_less(facts: Facts) -> bool:
    """Whether the status reports a newer generation than the record that this process has seen.

    Either that record is about to be written, and the next plan counts; or another operator wrote it, and counts from
    here would overwrite its counts, time after time.
    """
    return facts.current is not None and facts.current.generation < facts.job.status.membership.generation


def _begun(facts: Facts, diagnosis: Diagnosis) -> Answer:
    """What follows from the spec and from the diagnosis alone."""
    size, status = facts.size, facts.job.status
    legal = size.desired > 0 and size.reason in (Reason.AS_REQUESTED, Reason.NODES_IN_RESERVE)
    status = with_sound_counts(status).replaced(observed_generation=facts.job.generation)
    status = with_condition(status, ConditionType.SIZE_LEGAL, legal, size.reason, size.message, now=facts.now)
    status = note_compiled(facts, status)
    desired = _within_quota(facts) or status.desired
    status = note_nodes(facts, note_request(facts, status, desired))
    avoided = avoided_nodes(status.failures, facts.now, facts.settings.avoid_node_seconds)
    avoided = with_refusing(avoided, status, facts.now)
    idle = status.idle_nodes.replaced(taken=0)
    status = status.replaced(
        desired=desired, idle_nodes=idle, avoided_nodes=avoided, leaving_since=diagnosis.leaving_since
    )
    return Answer(status=status, notes=diagnosis.notes, looks=facts.counts_from + diagnosis.looks)


def _within_quota(facts: Facts) -> int:
    """The size to work towards: the spec's, unless a queue grants less."""
    if facts.grant is None or facts.grant.releases:
        return facts.size.desired
    if facts.grant.stand is AdmissionState.UNKNOWN:
        return facts.job.status.desired or facts.size.desired
    return size_within(facts.size, facts.grant.workers)


def _decided(facts: Facts, status: TrainingJobStatus, losses: tuple[Loss, ...]) -> Answer:
    """Begin the new generation, or keep the one in force served and close what it has outlived."""
    decision = decide_generation(facts, status, losses)
    decided = Answer(status=decision.status, looks=decision.looks)
    if decision.new is not None:
        return decided.then(begin_generation(facts, decision.status, decision.new))
    status = decision.status if losses else close_lapsed(facts, decision.status)
    return decided.then(Answer(status=status, actions=keep_published(facts)))


def _is_open(status: PublicStatus) -> bool:
    """Whether an interruption is open: some policies wait until none is."""
    return any(entry.recovered_seconds is None for entry in status.history)


def _sealed(facts: Facts, answer: Answer) -> Plan:
    """The finished plan, with the status as it is to be written now."""
    answer = answer.then(limit_disruptions(facts, answer.status))
    for feature in facts.settings.features:
        answer = answer.then(feature.finalize(facts, answer.status))
    if is_terminal(answer.status):
        answer = answer.then(expire(facts, answer.status))
    old, status = facts.job.status, answer.status
    if not is_terminal(old):
        status = tell_tools(status, facts.now)
    notes = answer.notes + announce(old, status)
    looks = list(answer.looks)
    acted = bool(answer.actions) or status.membership.size != old.membership.size or _is_open(old) != _is_open(status)
    if acted and not is_terminal(status):
        # What is derived from the outcome (counts, conditions) is written by the next plan.
        looks.append(facts.now)
    due = write_due(facts, old, status)
    if facts.now < due:
        looks.append(due)
        status = old
    soonest = min(looks, default=None)
    return Plan(
        status=status,
        actions=answer.actions,
        # What happened shows in the status: without a write of it there is nothing new to tell, or not yet.
        events=() if status == old else notes,
        requeue_after=None if soonest is None else max(_SHORTEST_REQUEUE_SECONDS, soonest - facts.now),
    )
