"""Report the results of the run in the status: the stage, the artifacts, the figures of the evaluation.

Invariants: a stage lasts until ranks that have loaded report another one, so a recovery does not show as a step back.
An artifact is listed once, however often it is reported. The list keeps the newest steps and stays short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.results import MAX_ARTIFACTS, ArtifactReport, EvaluationFigure, RunStage
from trainium_operator.plan.model.text import format_figure

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.wire.messages import Progress
    from trainium_operator.plan.view.context import PlanContext

_ACTIVITIES = {RunStage.EXPORT.value: "writing artifacts", RunStage.EVALUATE.value: "evaluating"}


def record_results(context: PlanContext, status: TrainingJobStatus, reports: list[Progress]) -> TrainingJobStatus:
    """Update stage, artifacts and evaluation; `reports` are those of the members, by rank."""
    reported = [artifact for report in reports for artifact in report.artifacts]
    status = status.replaced(
        artifacts=_merge_artifacts(status.artifacts, reported) if reported else status.artifacts,
        evaluation=next((report.evaluation for report in reports if report.evaluation), status.evaluation),
    )
    newest = context.newest_progress
    if newest is None:
        return status
    fraction = None if newest.training or newest.stage_progress is None else min(max(newest.stage_progress, 0.0), 1.0)
    return status.replaced(stage=newest.stage, stage_progress=None if fraction is None else round(fraction, 2))


def describe_activity(status: PublicStatus) -> str:
    """Return the workers' activity as a participle."""
    return _ACTIVITIES.get(status.stage, "training")


def get_artifact_key(artifact: ArtifactReport) -> tuple[str, int, str]:
    """Return the identity of an artifact."""
    return artifact.kind, artifact.step, artifact.path


def describe_artifact(artifact: ArtifactReport) -> str:
    """Return `Model of step 500 is complete: /checkpoints/... (13,476,839,424 bytes)`."""
    return f"{artifact.kind} of step {artifact.step} is complete: {artifact.path} ({artifact.bytes:,} bytes)."


def describe_evaluation(figures: Iterable[EvaluationFigure]) -> str:
    """Return `perplexity 12.4 -> 5.1, rougeL 0.11 -> 0.37`."""
    return "The result was measured: " + ", ".join(format_figure(figure) for figure in figures) + "."


def _merge_artifacts(old: tuple[ArtifactReport, ...], reported: list[ArtifactReport]) -> tuple[ArtifactReport, ...]:
    """Return each artifact once with its newest figures: the newest steps, oldest first."""
    by_key = {get_artifact_key(artifact): artifact for artifact in (*old, *reported)}
    return tuple(sorted(by_key.values(), key=lambda artifact: artifact.step)[-MAX_ARTIFACTS:])
