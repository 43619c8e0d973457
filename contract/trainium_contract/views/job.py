"""Build the typed values of one job from the object that the API server holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.spec.managed_by import is_managed_here
from trainium_contract.views.advice import advise
from trainium_contract.views.goodput import CostView, GoodputView, build_goodput_view
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.job_view import (
    AlertView,
    ArtifactView,
    ChangeView,
    CheckpointsView,
    ConditionView,
    FigureView,
    JobView,
    MilestoneView,
    RoleView,
)
from trainium_contract.views.raw import read_integer, read_mapping, read_objects, read_text
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workload import read_workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.status.conditions import Condition
    from trainium_contract.status.public import PublicStatus, RoleStatus
    from trainium_contract.status.results import ArtifactReport, EvaluationFigure, MilestoneEvaluation
    from trainium_contract.views.events import EventView
    from trainium_contract.views.status_reader import StatusReader
    from trainium_contract.views.workers import WorkersView


def build_job_view(
    job: Mapping[str, Any],
    *,
    now: float,
    workers: WorkersView | None = None,
    events: Sequence[EventView] = (),
    not_shown: tuple[str, ...] = (),
) -> JobView:
    """Return the view of a TrainingJob as the API server holds it."""
    metadata, spec, status = read_mapping(job, "metadata"), read_mapping(job, "spec"), read_public_status(job)
    progress, membership, restarts = (
        status.read_part("progress"),
        status.read_part("membership"),
        status.read_part("restarts"),
    )
    goodput = build_goodput_view(status, now)
    step, total = progress.read_integer("step"), progress.read_integer("totalSteps")
    entries = read_interruptions(status)
    written_at = _find_status_time(metadata, status)
    view = JobView(
        name=read_text(metadata, "name"),
        namespace=read_text(metadata, "namespace"),
        uid=read_text(metadata, "uid"),
        model=read_workload(job).name,
        managed_by=_describe_manager(spec),
        phase=status.read_text("phase"),
        stage=status.read_text("stage"),
        stage_share=status.read_number("stageProgress"),
        age_seconds=_compute_seconds_since(read_text(metadata, "creationTimestamp"), now),
        started_at=parse_rfc3339(status.read_text("startTime")),
        ended_at=parse_rfc3339(status.read_text("completionTime")),
        step=step,
        step_reported_at=parse_rfc3339(progress.read_text("updated")),
        step_age_seconds=_compute_seconds_since(progress.read_text("updated"), now),
        total_steps=total,
        share=min(1.0, step / total) if total > 0 else None,
        eta_seconds=_estimate_remaining_seconds(status, goodput, total - step),
        step_seconds=_read_step_seconds(status),
        loss=progress.read_number("loss"),
        reward_accuracy=progress.read_number("rewardAccuracy"),
        tokens_per_second=progress.read_number("tokensPerSecond"),
        learning_rate=progress.read_number("learningRate"),
        grad_norm=progress.read_number("gradNorm"),
        samples_per_second=progress.read_number("samplesPerSecond"),
        size=status.read_integer("replicas"),
        training=status.read_integer("readyReplicas"),
        requested=read_integer(read_mapping(spec, "workers"), "replicas", 1),
        desired=status.read_integer("desired"),
        spares=status.read_integer("spares"),
        data_parallel=membership.read_integer("dataParallel"),
        generation=membership.read_integer("generation"),
        attempt=membership.read_integer("attempt"),
        checkpoints=_read_checkpoints(status, now),
        goodput=goodput,
        restarts=restarts.read_integer("total"),
        restarts_by_cause=restarts.read_numbers("byCause"),
        verdict=status.read_text("verdict"),
        changes=_list_changes(metadata, status),
        conditions=tuple(_read_condition(condition, now) for condition in status.read_parts("conditions")),
        alerts=tuple(
            AlertView(alert.read_text("kind"), alert.read_integer("step"), alert.read_text("message"))
            for alert in status.read_parts("alerts")
        ),
        artifacts=tuple(_read_artifact(artifact) for artifact in status.read_parts("artifacts")),
        evaluation=tuple(_read_figure(measure) for measure in status.read_parts("evaluation")),
        evaluations=tuple(_read_milestone(evaluation) for evaluation in status.read_parts("evaluations")),
        roles=tuple(_read_role(role) for role in status.read_parts("roles")),
        workers=workers,
        last=entries[-1] if entries else None,
        events=tuple(events),
        advice=(),
        # A deletion raises the generation, and no operator answers it.
        outdated=not metadata.get("deletionTimestamp")
        and status.read_integer("observedGeneration") < read_integer(metadata, "generation"),
        written_seconds_ago=None if written_at is None else max(0.0, now - written_at),
        written_at=written_at,
        not_shown=not_shown,
        status=status,
    )
    return replace(view, advice=advise(view))


def compute_cost(view: JobView, price: float) -> CostView:
    """Return the cost of a job at a price of a node-hour."""
    goodput, hourly = view.goodput, price / 3600
    productive = hourly * goodput.node_seconds * (goodput.fleet_ratio or 0.0)
    unproductive = hourly * goodput.node_seconds - productive
    # Lost time includes the nodes held besides the members, so it is charged for all held nodes.
    held_nodes = goodput.node_seconds / goodput.wall_seconds if goodput.wall_seconds else 0.0
    lost = {cause: hourly * held_nodes * seconds for cause, seconds in goodput.lost_seconds.items()}
    share = min(1.0, unproductive / sum(lost.values())) if any(lost.values()) else 0.0
    lost = {cause: share * cost for cause, cost in lost.items()}
    return CostView(
        price=price,
        so_far=hourly * goodput.node_seconds,
        productive=productive,
        lost=lost,
        idle=unproductive - sum(lost.values()),
        to_end=None if view.eta_seconds is None else hourly * view.eta_seconds * (view.size + view.spares),
    )


def _describe_manager(spec: Mapping[str, Any]) -> str:
    manager = read_text(spec, "managedBy")
    return "" if is_managed_here(manager) else manager


def _compute_seconds_since(stamp: str, now: float) -> float | None:
    at = parse_rfc3339(stamp)
    return None if at is None else max(0.0, now - at)


def _read_condition(condition: StatusReader[Condition], now: float) -> ConditionView:
    age = _compute_seconds_since(condition.read_text("lastTransitionTime"), now)
    return ConditionView(
        condition.read_text("type"),
        condition.read_text("status"),
        condition.read_text("reason"),
        condition.read_text("message"),
        age,
    )


def _read_artifact(report: StatusReader[ArtifactReport]) -> ArtifactView:
    return ArtifactView(
        report.read_text("kind"),
        report.read_text("path"),
        report.read_integer("step"),
        report.read_integer("bytes"),
        report.read_text("digest"),
    )


def _read_figure(measure: StatusReader[EvaluationFigure]) -> FigureView:
    return FigureView(
        measure.read_text("name"),
        measure.read_number("before"),
        measure.read_number("after"),
        measure.read_number("standardError"),
    )


def _read_milestone(evaluation: StatusReader[MilestoneEvaluation]) -> MilestoneView:
    figures = tuple(_read_figure(figure) for figure in evaluation.read_parts("figures"))
    return MilestoneView(
        evaluation.read_integer("step"), evaluation.read_integer("tokens"), figures, evaluation.read_text("message")
    )


def _read_role(role: StatusReader[RoleStatus]) -> RoleView:
    return RoleView(
        name=role.read_text("name"),
        ready=role.read_integer("readyReplicas"),
        replicas=role.read_integer("replicas"),
        min_ready=role.read_integer("minReady"),
        restarts=role.read_integer("restarts"),
        message=role.read_text("message"),
    )


def _list_changes(metadata: Mapping[str, Any], status: StatusReader[PublicStatus]) -> tuple[ChangeView, ...] | None:
    """Return the operator's comparison; None for a spec that it has not observed yet."""
    record = status.read_part("failedSpec")
    is_observed = status.read_integer("observedGeneration") >= read_integer(metadata, "generation")
    if not is_observed or not record.has_list("changes"):
        return None
    return tuple(
        ChangeView(change.read_text("field"), change.read_text("was"), change.read_text("now"))
        for change in record.read_parts("changes")
    )


def _read_checkpoints(status: StatusReader[PublicStatus], now: float) -> CheckpointsView:
    part = status.read_part("checkpoint")
    memory, durable = part.read_integer("memoryStep", -1), part.read_integer("durableStep", -1)
    if status.read_text("phase") in {"Completed", "Failed", "Suspended"}:
        memory = -1  # deleted with the pods
    return CheckpointsView(
        memory_step=None if memory < 0 else memory,
        durable_step=None if durable < 0 else durable,
        durable_age_seconds=_compute_seconds_since(part.read_text("durableTime"), now) if durable >= 0 else None,
        notice=part.read_text("notice"),
    )


def _read_step_seconds(status: StatusReader[PublicStatus]) -> float | None:
    """Return the reference step time of the present size."""
    size = status.read_integer("replicas")
    accounts = [
        account for account in status.read_part("goodput").read_parts("sizes") if account.read_integer("size") == size
    ]
    return accounts[-1].read_number("stepSeconds") if accounts else None


def _estimate_remaining_seconds(status: StatusReader[PublicStatus], goodput: GoodputView, left: int) -> float | None:
    """Estimate the remaining time: remaining steps at the reference step time, with the same share of lost time."""
    reference = _read_step_seconds(status)
    if reference is None or left <= 0 or status.read_text("phase") in {"Completed", "Failed", "Suspended"}:
        return None
    spent = goodput.wall_seconds - goodput.lost_by_stage.get("Startup", 0.0)
    factor = max(1.0, spent / goodput.productive_seconds) if goodput.productive_seconds > 0 else 1.0
    return left * reference * factor


def _find_status_time(metadata: Mapping[str, Any], status: StatusReader[PublicStatus]) -> float | None:
    """Return when the status was last written (Unix seconds); None if it never was."""
    if not status:
        return None
    stamps = [
        parse_rfc3339(read_text(entry, "time"))
        for entry in read_objects(metadata, "managedFields")
        if entry.get("subresource") == "status"
    ]
    stamps_known = [stamp for stamp in stamps if stamp is not None]
    accounted = status.read_part("goodput").read_number("accountedUntil")
    return max([*stamps_known, *([accounted] if accounted is not None else [])], default=None)
