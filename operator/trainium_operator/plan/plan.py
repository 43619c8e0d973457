"""Plan one TrainingJob: call one policy after the other.

Guarantees:
- Pure and level-triggered: the same observation always gives the same plan. The plan for a state in which the last plan
  was executed has no actions.
- Every decision is in the status before it is executed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.conditions import ConditionType
from trainium_operator.plan.diagnose import failure_policy, stragglers
from trainium_operator.plan.diagnose.diagnosis import diagnose
from trainium_operator.plan.faults import failure_budgets
from trainium_operator.plan.features import registry
from trainium_operator.plan.history import in_place_restarts, interruptions, recovery
from trainium_operator.plan.lifecycle import completion, stopping
from trainium_operator.plan.membership import decisions, generation
from trainium_operator.plan.model import conditions
from trainium_operator.plan.model.actions import Plan, PolicyResult
from trainium_operator.plan.model.grant import AdmissionState
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.pods import disruption_budget, gang_policy, refused_pods, replicas
from trainium_operator.plan.report import events, reconciled, summary, write_throttle
from trainium_operator.plan.view.context import PlanContext, build_context, pin_running_image
from trainium_operator.plan.view.corrected_status import correct_status
from trainium_operator.plan.view.size import decide_size, find_size_within_quota
from trainium_operator.plan.view.workers import RECONNECT_SECONDS, add_last_reports

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.diagnose.diagnosis import Diagnosis
    from trainium_operator.plan.diagnose.failed_member import FailedMember
    from trainium_operator.plan.diagnose.failure_policy import StopVerdict
    from trainium_operator.plan.model.observed import Observed, PlanSettings

_MIN_REQUEUE_SECONDS = 0.05


def plan(observed: Observed, settings: PlanSettings) -> Plan:
    """Return the plan for one TrainingJob; never raises for anything that a user can write."""
    if observed.job.deleting:
        # Owner references delete the children; agents save on SIGTERM.
        if conditions.is_terminal(observed.job.status):
            return Plan(status=observed.job.status)
        return Plan(status=summary.set_standard_conditions(completion.build_termination_status(observed), observed.now))
    size = decide_size(observed.job.spec)
    observed = correct_status(add_last_reports(observed), size)
    used_features = tuple(feature for feature in registry.FEATURES if feature.is_used(observed, settings))
    context = build_context(observed, pin_running_image(observed, settings), size, used_features)
    if conditions.is_terminal(observed.job.status):
        return _finalize(context, _plan_ended(context))
    diagnosis = diagnose(context)
    result = _build_initial_result(context, diagnosis)
    if completion.have_all_finished(context):
        return _finalize(context, _plan_completion(completion.rewind_to_end(context), result))
    if stopping.is_ending(result.status):
        return _finalize(context, _plan_deadline(context, result))
    verdict = failure_policy.reach_verdict(context)
    if verdict is not None:
        return _finalize(context, _plan_failure(completion.rewind_to_end(context), result, verdict))
    is_unadmitted = context.grant is not None and context.grant.releases_workers
    if not (context.job.spec.suspend or is_unadmitted):
        failed_uids = [failed.member.pod_uid for failed in diagnosis.failed_members]
        result = result.combine(in_place_restarts.record_restarts(context, result.status, failed_uids=failed_uids))
        result = result.replace_status(
            interruptions.record_failed_members(context, result.status, diagnosis.failed_members)
        )
    result = result.replace_status(recovery.close_recovered(context, result.status))
    verdict = failure_policy.judge_budgets(context, result.status)
    if verdict is not None:
        result = result.combine(summary.summarize(context, result.status))
        return _finalize(context, result.combine(completion.stop(context, result.status, verdict)))
    result = result.combine(stopping.watch_deadlines(context, result.status))
    if stopping.is_ending(result.status):
        return _finalize(context, _plan_deadline(context, result))
    return _finalize(context, _plan_active(context, result, diagnosis.failed_members))


def _plan_completion(context: PlanContext, result: PolicyResult) -> PolicyResult:
    """Return the plan once every member has finished; the last heartbeats may be from a time without an operator."""
    result = result.combine(in_place_restarts.record_restarts(context, result.status))
    result = result.replace_status(_close_all(context, result.status))
    result = result.combine(summary.summarize(context, result.status))
    return result.combine(completion.complete(context, result.status))


def _plan_failure(context: PlanContext, result: PolicyResult, verdict: StopVerdict) -> PolicyResult:
    """Return the plan for a verdict that workers report; its last heartbeats may be from a time without an operator.

    Just after a start of the operator it waits for them, because the final figures are in those of all members.
    """
    if not summary.have_members_reported(context):
        reports_by = context.observed.coordinator_since + RECONNECT_SECONDS
        return result.combine(PolicyResult(status=result.status, requeue_at=(reports_by,)))
    result = result.combine(in_place_restarts.record_restarts(context, result.status))
    result = result.replace_status(recovery.close_recovered(context, result.status))
    result = result.combine(summary.summarize(context, result.status))
    return result.combine(completion.stop(context, result.status, verdict))


def _plan_ended(context: PlanContext) -> PolicyResult:
    result = completion.clean_up(context, context.job.status)
    for feature in context.features:
        result = result.combine(feature.finish(context, result.status))
    return result.combine(completion.record_spec_change(context, result.status))


def _plan_deadline(context: PlanContext, result: PolicyResult) -> PolicyResult:
    """Return the plan once a deadline ends the job: no other policy decides any more."""
    result = result.replace_status(_close_all(context, result.status))
    result = _summarize_unless_stale(context, result)
    return result.combine(stopping.stop_after_deadline(context, result.status))


def _plan_active(context: PlanContext, result: PolicyResult, failed_members: tuple[FailedMember, ...]) -> PolicyResult:
    """Return the plan of a job that is to run, or to wait until it may."""
    result = result.combine(replicas.reconcile_configuration(context, result.status))
    for feature in context.features:
        result = result.combine(feature.reconcile_before_pods(context, result.status))
    if context.job.spec.suspend:
        result = result.combine(stopping.suspend(context, recovery.release_generation(context, result.status)))
    elif context.grant is not None and context.grant.releases_workers:
        result = result.replace_status(
            stopping.clear_suspended(context, recovery.release_generation(context, result.status))
        )
        result = result.combine(stopping.delete_workers(context, result.status))
    else:
        result = _plan_workers(context, result, failed_members)
    for feature in context.features:
        result = result.combine(feature.reconcile(context, result.status))
    return _summarize_unless_stale(context, result.combine(summary.count_outdated_pods(context, result.status)))


def _plan_workers(context: PlanContext, result: PolicyResult, failed_members: tuple[FailedMember, ...]) -> PolicyResult:
    """Decide which workers train, and reconcile the pods for them."""
    result = result.replace_status(stopping.clear_suspended(context, result.status))
    result = result.combine(stragglers.find_stragglers(context, result.status))
    failed_uids = frozenset(failed.member.pod_uid for failed in failed_members)
    for feature in context.features:
        result = result.combine(feature.resize(context, result.status, failed_uids))
    result = result.combine(_start_or_keep_generation(context, result.status, failed_members))
    withheld, released = gang_policy.withhold_pods(context, result.status)
    result = result.combine(released)
    return result if withheld else result.combine(replicas.reconcile_pods(context, result.status, failed_members))


def _start_or_keep_generation(
    context: PlanContext, status: TrainingJobStatus, failed_members: tuple[FailedMember, ...]
) -> PolicyResult:
    """Start the new generation, or keep the current one published and close entries that it has outlived."""
    decision = decisions.decide_generation(context, status, failed_members)
    decided = PolicyResult(status=decision.status, requeue_at=decision.requeue_at)
    if decision.new is not None:
        return decided.combine(generation.start_generation(context, decision.status, decision.new))
    status = decision.status if failed_members else recovery.close_lapsed(context, decision.status)
    return decided.combine(PolicyResult(status=status, actions=generation.republish_membership(context)))


def _close_all(context: PlanContext, status: TrainingJobStatus) -> TrainingJobStatus:
    return recovery.close_abandoned(context, recovery.close_recovered(context, status))


def _summarize_unless_stale(context: PlanContext, result: PolicyResult) -> PolicyResult:
    """Add the summary, unless the status names a newer generation than this process's record.

    Either the record is about to be written, and the next plan counts; or another operator wrote it, and these counts
    would overwrite its counts repeatedly.
    """
    if context.current is not None and context.current.generation < context.job.status.membership.generation:
        return result
    return result.combine(summary.summarize(context, result.status))


def _build_initial_result(context: PlanContext, diagnosis: Diagnosis) -> PolicyResult:
    """Return the result of the spec and of the diagnosis alone."""
    size, status = context.size, context.job.status
    legal = size.desired > 0 and size.reason in (Reason.AS_REQUESTED, Reason.NODES_IN_RESERVE)
    status = interruptions.correct_counts(status).replaced(observed_generation=context.job.generation)
    kind = ConditionType.SIZE_LEGAL
    status = conditions.set_condition(status, kind, legal, size.reason, size.message, now=context.now)
    status = summary.record_compiled_sizes(context, status)
    desired = _limit_size_to_quota(context) or status.desired
    status = summary.set_nodes_healthy(context, decisions.record_size_request(context, status, desired))
    avoided = failure_budgets.list_avoided_nodes(status.failures, context.now)
    status = status.replaced(
        desired=desired,
        idle_nodes=status.idle_nodes.replaced(taken=0),
        avoided_nodes=refused_pods.add_refusing_nodes(avoided, status, context.now),
        leaving_since=diagnosis.leaving_since,
    )
    requeue_at = context.problems_count_at + diagnosis.requeue_at
    return PolicyResult(status=status, events=diagnosis.events, requeue_at=requeue_at)


def _limit_size_to_quota(context: PlanContext) -> int:
    """Return the size to work towards: the spec's, unless a queue grants less."""
    if context.grant is None or context.grant.releases_workers:
        return context.size.desired
    if context.grant.state is AdmissionState.UNKNOWN:
        return context.job.status.desired or context.size.desired
    return find_size_within_quota(context.size, context.grant.workers)


def _finalize(context: PlanContext, result: PolicyResult) -> Plan:
    """Return the complete plan with the status to write now."""
    result = result.combine(disruption_budget.limit_disruptions(context, result.status))
    for feature in context.features:
        result = result.combine(feature.finalize(context, result.status))
    if not conditions.is_terminal(context.job.status):
        result = result.combine(reconciled.report_differences(context, result.status))
    if conditions.is_terminal(result.status):
        result = result.combine(completion.delete_after_ttl(context, result.status))
    old, status = context.job.status, result.status
    if not conditions.is_terminal(old):
        status = summary.set_standard_conditions(status, context.now)
    new_events = result.events + events.list_events(old, status)
    requeue_at = list(result.requeue_at)
    is_resized = status.membership.size != old.membership.size
    was_interrupted, is_interrupted = bool(old.list_open_interruptions()), bool(status.list_open_interruptions())
    has_acted = bool(result.actions) or is_resized or was_interrupted != is_interrupted
    if has_acted and not conditions.is_terminal(status):
        # The next plan writes the consequences of the outcome: counts, conditions.
        requeue_at.append(context.now)
    write_at = write_throttle.find_next_write(context, old, status)
    if context.now < write_at:
        requeue_at.append(write_at)
        status = old
    next_at = min(requeue_at, default=None)
    return Plan(
        status=status,
        actions=result.actions,
        # Events follow from the status: without a write of it none is new.
        events=() if status == old else new_events,
        requeue_after=None if next_at is None else max(_MIN_REQUEUE_SECONDS, next_at - context.now),
    )
