"""From a TrainingJob as the API server holds it to the screen of `job.py`, with what to do now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainium_contract.spec.managed_by import is_ours
from trainium_contract.views.advice import advise
from trainium_contract.views.goodput import GoodputView, goodput_view
from trainium_contract.views.interruptions import interruptions
from trainium_contract.views.job import (
    AlertView,
    ArtifactView,
    ChangeView,
    CheckpointsView,
    ConditionView,
    FigureView,
    JobScreen,
)
from trainium_contract.views.raw import mapping, number, numbers, objects, plain, seconds_of, text, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.views.events import EventView
    from trainium_contract.views.workers import WorkersView


def job_view(
    job: Mapping[str, Any],
    *,
    now: float,
    workers: WorkersView | None = None,
    events: Sequence[EventView] = (),
    not_shown: tuple[str, ...] = (),
) -> JobScreen:
    """The screen of a TrainingJob as the API server holds it."""
    metadata, spec, status = mapping(job, "metadata"), mapping(job, "spec"), mapping(job, "status")
    progress, membership = mapping(status, "progress"), mapping(status, "membership")
    goodput = goodput_view(status, now)
    step, total = whole(progress, "step"), whole(progress, "totalSteps")
    entries = interruptions(status)
    view = JobScreen(
        name=text(metadata, "name"),
        namespace=text(metadata, "namespace"),
        uid=text(metadata, "uid"),
        model=_model(spec),
        managed_by=_manager(spec),
        phase=text(status, "phase"),
        stage=text(status, "stage"),
        stage_share=number(status, "stageProgress"),
        age_seconds=_since(text(metadata, "creationTimestamp"), now),
        started_at=seconds_of(text(status, "startTime")),
        ended_at=seconds_of(text(status, "completionTime")),
        step=step,
        total_steps=total,
        share=min(1.0, step / total) if total > 0 else None,
        eta_seconds=_eta(status, goodput, total - step),
        step_seconds=_step_seconds(status),
        loss=number(progress, "loss"),
        tokens_per_second=number(progress, "tokensPerSecond"),
        size=whole(status, "replicas"),
        training=whole(status, "readyReplicas"),
        requested=whole(mapping(spec, "workers"), "replicas", 1),
        desired=whole(status, "desired"),
        spares=whole(status, "spares"),
        data_parallel=whole(membership, "dataParallel"),
        generation=whole(membership, "generation"),
        attempt=whole(membership, "attempt"),
        checkpoints=_checkpoints(status, now),
        goodput=goodput,
        restarts=whole(mapping(status, "restarts"), "total"),
        restarts_by_cause=numbers(mapping(status, "restarts"), "byCause"),
        verdict=text(status, "verdict"),
        changes=_changes(metadata, status),
        conditions=tuple(_condition(each, now) for each in objects(status, "conditions")),
        alerts=tuple(
            AlertView(text(each, "kind"), whole(each, "step"), text(each, "message"))
            for each in objects(status, "alerts")
        ),
        artifacts=tuple(_artifact(each) for each in objects(status, "artifacts")),
        evaluation=tuple(
            FigureView(text(each, "name"), number(each, "before"), number(each, "after"))
            for each in objects(status, "evaluation")
        ),
        workers=workers,
        last=entries[-1] if entries else None,
        events=tuple(events),
        advice=(),
        outdated=whole(status, "observedGeneration") < whole(metadata, "generation"),
        written_seconds_ago=_written(metadata, status, now),
        not_shown=not_shown,
    )
    return with_advice(view)


def with_advice(view: JobScreen) -> JobScreen:
    """The screen with what to do."""
    return replace(view, advice=advise(view))


def _model(spec: Mapping[str, Any]) -> str:
    model = mapping(mapping(spec, "trainer"), "model")
    return text(model, "preset") or plain(str(mapping(model, "weights").get("path") or "")) or "model of its own shape"


def _manager(spec: Mapping[str, Any]) -> str:
    manager = text(spec, "managedBy")
    return "" if is_ours(manager) else manager


def _since(stamp: str, now: float) -> float | None:
    at = seconds_of(stamp)
    return None if at is None else max(0.0, now - at)


def _condition(raw: Mapping[str, Any], now: float) -> ConditionView:
    age = _since(text(raw, "lastTransitionTime"), now)
    return ConditionView(text(raw, "type"), text(raw, "status"), text(raw, "reason"), text(raw, "message"), age)


def _artifact(raw: Mapping[str, Any]) -> ArtifactView:
    return ArtifactView(
        text(raw, "kind"), text(raw, "path"), whole(raw, "step"), whole(raw, "bytes"), text(raw, "digest")
    )


def _changes(metadata: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[ChangeView, ...] | None:
    """As the operator compared them; what it has not seen yet it has not compared."""
    record = mapping(status, "failedSpec")
    seen = whole(status, "observedGeneration") >= whole(metadata, "generation")
    if not seen or not isinstance(record.get("changes"), list):
        return None
    return tuple(
        ChangeView(text(each, "field"), text(each, "was"), text(each, "now")) for each in objects(record, "changes")
    )


def _checkpoints(status: Mapping[str, Any], now: float) -> CheckpointsView:
    raw = mapping(status, "checkpoint")
    memory, durable = whole(raw, "memoryStep", -1), whole(raw, "durableStep", -1)
    if text(status, "phase") in {"Completed", "Failed"}:
        memory = -1  # it went with the pods
    return CheckpointsView(
        memory_step=None if memory < 0 else memory,
        durable_step=None if durable < 0 else durable,
        durable_age_seconds=_since(text(raw, "durableTime"), now) if durable >= 0 else None,
        notice=text(raw, "notice"),
    )


def _step_seconds(status: Mapping[str, Any]) -> float | None:
    """The reference step time of the present size."""
    size, accounts = whole(status, "replicas"), objects(mapping(status, "goodput"), "sizes")
    here = [each for each in accounts if whole(each, "size") == size]
    return number(here[-1], "stepSeconds") if here else None


def _eta(status: Mapping[str, Any], goodput: GoodputView, left: int) -> float | None:
    """Steps that are left at the reference step time, and as much lost on the way as until now, the start left out."""
    reference = _step_seconds(status)
    if reference is None or left <= 0 or text(status, "phase") in {"Completed", "Failed", "Suspended"}:
        return None
    spent = goodput.wall_seconds - goodput.lost_by_stage.get("Startup", 0.0)
    factor = max(1.0, spent / goodput.productive_seconds) if goodput.productive_seconds > 0 else 1.0
    return left * reference * factor


def _written(metadata: Mapping[str, Any], status: Mapping[str, Any], now: float) -> float | None:
    """How long ago the status was last written, by whoever writes it; None when nobody has."""
    if not status:
        return None
    stamps = [
        seconds_of(text(each, "time"))
        for each in objects(metadata, "managedFields")
        if each.get("subresource") == "status"
    ]
    known = [stamp for stamp in stamps if stamp is not None]
    accounted = number(mapping(status, "goodput"), "accountedUntil")
    newest = max([*known, *([accounted] if accounted is not None else [])], default=None)
    return None if newest is None else max(0.0, now - newest)
