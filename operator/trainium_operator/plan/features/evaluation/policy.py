"""Policy: measure the model of each milestone in a pod beside the workers, one after the other (evaluate.atMilestones).

The pod is a member of no generation, has no token and the lowest priority. Its termination message has the figures.

Guarantees:
- There is one pod at a time, because it has one name. It is deleted before the next one is created.
- The status has each result before its pod is deleted, so no model is measured twice.
- A model whose pod fails is tried again with a back-off, `ATTEMPTS` times in all; after a user error only once. A pod
  that was evicted, preempted or deleted does not count.
- Neither a failure nor a refused pod changes anything else of the job.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainium_contract.exit_codes import ExitCode
from trainium_contract.rfc3339 import format_rfc3339, parse_rfc3339
from trainium_contract.status.conditions import ConditionType
from trainium_contract.status.results import MAX_EVALUATIONS, EvaluationFigure, MilestoneEvaluation, RunResults
from trainium_contract.trainer.artifacts import ArtifactKind
from trainium_operator.plan.features.evaluation.pod import build_evaluation_pod
from trainium_operator.plan.model.actions import CreateOtherPod, DeleteOtherPod, PolicyResult, build_event
from trainium_operator.plan.model.conditions import is_true
from trainium_operator.plan.model.names import format_evaluation_name
from trainium_operator.plan.model.observed import PodPhase
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import format_figure, format_sentence
from trainium_operator.plan.view.context import Feature, PlanContext

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.observed import Observed, PlanSettings, PodView

MAX_ATTEMPTS = 3
BACKOFF_SECONDS = 30.0
"""Pause after the first failure; each further one doubles it."""
RECHECK_SECONDS = 5.0
"""Interval of checks until the pods have been read."""


def reconcile_evaluation(context: PlanContext, status: TrainingJobStatus) -> PolicyResult:
    """Record the result of the pod that has ended, or create the next one."""
    observed, spec = context.observed, context.job.spec
    is_active = spec.workload.evaluates_milestones and not spec.suspend and not is_true(status, ConditionType.FAILED)
    if is_active:
        status = status.replaced(evaluations=_add_new_models(status))
    if observed.other_pods is None:
        return PolicyResult(status=status, requeue_at=(context.now + RECHECK_SECONDS,) if is_active else ())
    if observed.evaluation_pod is not None:
        return _reconcile_pod(context, status, observed.evaluation_pod, is_active=is_active)
    entry = next((evaluation for evaluation in status.evaluations if is_pending(evaluation)), None)
    if entry is None or not is_active:
        return PolicyResult(status=status)
    start_at = _find_next_start(entry)
    refusal = observed.refusals.get(f"Pod/{format_evaluation_name(context.job.name)}")
    if refusal is not None:
        start_at = max(start_at, refusal.retry_at)
        message = format_sentence(f"its pod cannot be created: {refusal.sentence}")
        status = _set_entry(status, entry.replaced(message=message))
    if context.now < start_at:
        return PolicyResult(status=status, requeue_at=(start_at,))
    manifest = build_evaluation_pod(context.job, context.settings, entry, describe_attempt(entry))
    return PolicyResult(status=status, actions=(CreateOtherPod(manifest),))


def is_pending(entry: MilestoneEvaluation) -> bool:
    """Return whether a model is still to be measured."""
    return not entry.figures and entry.failures < MAX_ATTEMPTS


def describe_attempt(entry: MilestoneEvaluation) -> str:
    """Return the annotation of the next pod for a model: the model, and the failed attempts before."""
    return f"{entry.failures} {entry.path}"


def _add_new_models(status: TrainingJobStatus) -> tuple[MilestoneEvaluation, ...]:
    known_paths = {artifact.path for artifact in status.evaluations}
    new_entries = tuple(
        MilestoneEvaluation(step=artifact.step, tokens=artifact.tokens, path=artifact.path, bytes=artifact.bytes)
        for artifact in status.artifacts
        if artifact.kind == ArtifactKind.MODEL and artifact.path not in known_paths
    )
    return (*status.evaluations, *new_entries)[-MAX_EVALUATIONS:] if new_entries else status.evaluations


def _reconcile_pod(context: PlanContext, status: TrainingJobStatus, pod: PodView, *, is_active: bool) -> PolicyResult:
    """Return the result of a pod that has ended, and its deletion; also for a model that is no longer wanted."""
    if pod.deleting:
        return PolicyResult(status=status)
    has_ended = pod.exit_code is not None or pod.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)
    entry = next(
        (
            evaluation
            for evaluation in status.evaluations
            if is_pending(evaluation) and describe_attempt(evaluation) == pod.evaluates
        ),
        None,
    )
    if is_active and entry is not None and not has_ended:
        return PolicyResult(status=status)
    result = PolicyResult(status=status) if entry is None or not has_ended else _record_end(context, status, pod, entry)
    return replace(result, actions=(DeleteOtherPod(pod.name, pod.uid),))


def _record_end(
    context: PlanContext, status: TrainingJobStatus, pod: PodView, entry: MilestoneEvaluation
) -> PolicyResult:
    figures = _read_figures(pod)
    entry = entry.replaced(time=format_rfc3339(context.now))
    if figures:
        entry = entry.replaced(figures=figures, message="")
        text = ", ".join(format_figure(figure) for figure in figures)
        note = build_event(Reason.EVALUATED, f"The model of step {entry.step} was measured: {text}.")
        return PolicyResult(status=_set_entry(status, entry), events=(note,))
    reason = pod.message or pod.reason or "its pod left no figures"
    if pod.disrupted:
        return PolicyResult(status=_set_entry(status, entry.replaced(message=format_sentence(reason))))
    failures = MAX_ATTEMPTS if pod.exit_code == ExitCode.USER_ERROR else entry.failures + 1
    entry = entry.replaced(failures=failures, message=format_sentence(reason))
    consequence = "it is tried again" if is_pending(entry) else "it is left out"
    code = "" if pod.exit_code is None else f" (exit code {pod.exit_code})"
    text = f"The model of step {entry.step} could not be measured{code}, {consequence}: {reason}"
    warning = build_event(Reason.EVALUATION_FAILED, text, warning=True)
    return PolicyResult(status=_set_entry(status, entry), events=(warning,))


def _read_figures(pod: PodView) -> tuple[EvaluationFigure, ...]:
    """Return the figures in the termination message of a pod that succeeded; empty if it has no such message."""
    if pod.exit_code != 0:
        return ()
    try:
        return RunResults.model_validate_json(pod.message).evaluation
    except ValidationError:
        return ()


def _find_next_start(entry: MilestoneEvaluation) -> float:
    failed_at = parse_rfc3339(entry.time)
    return 0.0 if failed_at is None else failed_at + BACKOFF_SECONDS * 2**entry.failures


def _set_entry(status: TrainingJobStatus, entry: MilestoneEvaluation) -> TrainingJobStatus:
    evaluations = tuple(entry if other.path == entry.path else other for other in status.evaluations)
    return status.replaced(evaluations=evaluations)


def _is_used(observed: Observed, _settings: PlanSettings) -> bool:
    return observed.job.spec.workload.evaluates_milestones or observed.evaluation_pod is not None


FEATURE = Feature(name="evaluation", is_used=_is_used, reconcile=reconcile_evaluation, finish=reconcile_evaluation)
