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
from trainium_contract.views.raw import integer, mapping, objects, text
from trainium_contract.views.status_reader import public_status
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
    metadata, spec, status = mapping(job, "metadata"), mapping(job, "spec"), public_status(job)
    progress, membership, restarts = status.part("progress"), status.part("membership"), status.part("restarts")
    goodput = build_goodput_view(status, now)
    step, total = progress.integer("step"), progress.integer("totalSteps")
    entries = read_interruptions(status)
    written_at = _find_status_time(metadata, status)
    view = JobView(
        name=text(metadata, "name"),
        namespace=text(metadata, "namespace"),
        uid=text(metadata, "uid"),
        model=read_workload(job).name,
        managed_by=_manager(spec),
        phase=status.text("phase"),
        stage=status.text("stage"),
        stage_share=status.number("stageProgress"),
        age_seconds=_seconds_since(text(metadata, "creationTimestamp"), now),
        started_at=parse_rfc3339(status.text("startTime")),
        ended_at=parse_rfc3339(status.text("completionTime")),
        step=step,
        step_reported_at=parse_rfc3339(progress.text("updated")),
        step_age_seconds=_seconds_since(progress.text("updated"), now),
        total_steps=total,
        share=min(1.0, step / total) if total > 0 else None,
        eta_seconds=_eta(status, goodput, total - step),
        step_seconds=_step_seconds(status),
        loss=progress.number("loss"),
        reward_accuracy=progress.number("rewardAccuracy"),
        tokens_per_second=progress.number("tokensPerSecond"),
        learning_rate=progress.number("learningRate"),
        grad_norm=progress.number("gradNorm"),
        samples_per_second=progress.number("samplesPerSecond"),
        size=status.integer("replicas"),
        training=status.integer("readyReplicas"),
        requested=integer(mapping(spec, "workers"), "replicas", 1),
        desired=status.integer("desired"),
        spares=status.integer("spares"),
        data_parallel=membership.integer("dataParallel"),
        generation=membership.integer("generation"),
        attempt=membership.integer("attempt"),
        checkpoints=_checkpoints(status, now),
        goodput=goodput,
        restarts=restarts.integer("total"),
        restarts_by_cause=restarts.numbers("byCause"),
        verdict=status.text("verdict"),
        changes=_changes(metadata, status),
        conditions=tuple(_condition(condition, now) for condition in status.parts("conditions")),
        alerts=tuple(
            AlertView(alert.text("kind"), alert.integer("step"), alert.text("message"))
            for alert in status.parts("alerts")
        ),
        artifacts=tuple(_artifact(artifact) for artifact in status.parts("artifacts")),
        evaluation=tuple(_figure(measure) for measure in status.parts("evaluation")),
        evaluations=tuple(_milestone(evaluation) for evaluation in status.parts("evaluations")),
        roles=tuple(_role(role) for role in status.parts("roles")),
        workers=workers,
        last=entries[-1] if entries else None,
        events=tuple(events),
        advice=(),
        # A deletion raises the generation, and no operator answers it.
        outdated=not metadata.get("deletionTimestamp")
        and status.integer("observedGeneration") < integer(metadata, "generation"),
        written_seconds_ago=None if written_at is None else max(0.0, now - written_at),
        written_at=written_at,
        not_shown=not_shown,
        status=status,
    )
    return replace(view, advice=advise(view))


def cost_view(view: JobView, price: float) -> CostView:
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


def _manager(spec: Mapping[str, Any]) -> str:
    manager = text(spec, "managedBy")
    return "" if is_managed_here(manager) else manager


def _seconds_since(stamp: str, now: float) -> float | None:
    at = parse_rfc3339(stamp)
    return None if at is None else max(0.0, now - at)


def _condition(condition: StatusReader[Condition], now: float) -> ConditionView:
    age = _seconds_since(condition.text("lastTransitionTime"), now)
    return ConditionView(
        condition.text("type"), condition.text("status"), condition.text("reason"), condition.text("message"), age
    )


def _artifact(report: StatusReader[ArtifactReport]) -> ArtifactView:
    return ArtifactView(
        report.text("kind"), report.text("path"), report.integer("step"), report.integer("bytes"), report.text("digest")
    )


def _figure(measure: StatusReader[EvaluationFigure]) -> FigureView:
    return FigureView(
        measure.text("name"), measure.number("before"), measure.number("after"), measure.number("standardError")
    )


def _milestone(evaluation: StatusReader[MilestoneEvaluation]) -> MilestoneView:
    figures = tuple(_figure(figure) for figure in evaluation.parts("figures"))
    return MilestoneView(evaluation.integer("step"), evaluation.integer("tokens"), figures, evaluation.text("message"))


def _role(role: StatusReader[RoleStatus]) -> RoleView:
    return RoleView(
        name=role.text("name"),
        ready=role.integer("readyReplicas"),
        replicas=role.integer("replicas"),
        min_ready=role.integer("minReady"),
        restarts=role.integer("restarts"),
        message=role.text("message"),
    )


def _changes(metadata: Mapping[str, Any], status: StatusReader[PublicStatus]) -> tuple[ChangeView, ...] | None:
    """Return the operator's comparison; None for a spec that it has not observed yet."""
    record = status.part("failedSpec")
    is_observed = status.integer("observedGeneration") >= integer(metadata, "generation")
    if not is_observed or not record.has_list("changes"):
        return None
    return tuple(
        ChangeView(change.text("field"), change.text("was"), change.text("now")) for change in record.parts("changes")
    )


def _checkpoints(status: StatusReader[PublicStatus], now: float) -> CheckpointsView:
    part = status.part("checkpoint")
    memory, durable = part.integer("memoryStep", -1), part.integer("durableStep", -1)
    if status.text("phase") in {"Completed", "Failed", "Suspended"}:
        memory = -1  # deleted with the pods
    return CheckpointsView(
        memory_step=None if memory < 0 else memory,
        durable_step=None if durable < 0 else durable,
        durable_age_seconds=_seconds_since(part.text("durableTime"), now) if durable >= 0 else None,
        notice=part.text("notice"),
    )


def _step_seconds(status: StatusReader[PublicStatus]) -> float | None:
    """Return the reference step time of the present size."""
    size = status.integer("replicas")
    accounts = [account for account in status.part("goodput").parts("sizes") if account.integer("size") == size]
    return accounts[-1].number("stepSeconds") if accounts else None


def _eta(status: StatusReader[PublicStatus], goodput: GoodputView, left: int) -> float | None:
    """Estimate the remaining time: remaining steps at the reference step time, with the same share of lost time."""
    reference = _step_seconds(status)
    if reference is None or left <= 0 or status.text("phase") in {"Completed", "Failed", "Suspended"}:
        return None
    spent = goodput.wall_seconds - goodput.lost_by_stage.get("Startup", 0.0)
    factor = max(1.0, spent / goodput.productive_seconds) if goodput.productive_seconds > 0 else 1.0
    return left * reference * factor


def _find_status_time(metadata: Mapping[str, Any], status: StatusReader[PublicStatus]) -> float | None:
    """Return when the status was last written (Unix seconds); None if it never was."""
    if not status:
        return None
    stamps = [
        parse_rfc3339(text(entry, "time"))
        for entry in objects(metadata, "managedFields")
        if entry.get("subresource") == "status"
    ]
    known = [stamp for stamp in stamps if stamp is not None]
    accounted = status.part("goodput").number("accountedUntil")
    return max([*known, *([accounted] if accounted is not None else [])], default=None)
