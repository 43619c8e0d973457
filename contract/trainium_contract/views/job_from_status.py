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
from trainium_contract.views.raw import mapping, objects, plain, seconds_of, text, whole
from trainium_contract.views.status_part import shown_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.status.conditions import Condition
    from trainium_contract.status.results import ArtifactReport
    from trainium_contract.status.shown import ShownStatus
    from trainium_contract.views.events import EventView
    from trainium_contract.views.status_part import StatusPart
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
    metadata, spec, status = mapping(job, "metadata"), mapping(job, "spec"), shown_status(job)
    progress, membership, restarts = status.part("progress"), status.part("membership"), status.part("restarts")
    goodput = goodput_view(status, now)
    step, total = progress.whole("step"), progress.whole("totalSteps")
    entries = interruptions(status)
    view = JobScreen(
        name=text(metadata, "name"),
        namespace=text(metadata, "namespace"),
        uid=text(metadata, "uid"),
        model=_model(spec),
        managed_by=_manager(spec),
        phase=status.text("phase"),
        stage=status.text("stage"),
        stage_share=status.number("stageProgress"),
        age_seconds=_since(text(metadata, "creationTimestamp"), now),
        started_at=seconds_of(status.text("startTime")),
        ended_at=seconds_of(status.text("completionTime")),
        step=step,
        total_steps=total,
        share=min(1.0, step / total) if total > 0 else None,
        eta_seconds=_eta(status, goodput, total - step),
        step_seconds=_step_seconds(status),
        loss=progress.number("loss"),
        tokens_per_second=progress.number("tokensPerSecond"),
        size=status.whole("replicas"),
        training=status.whole("readyReplicas"),
        requested=whole(mapping(spec, "workers"), "replicas", 1),
        desired=status.whole("desired"),
        spares=status.whole("spares"),
        data_parallel=membership.whole("dataParallel"),
        generation=membership.whole("generation"),
        attempt=membership.whole("attempt"),
        checkpoints=_checkpoints(status, now),
        goodput=goodput,
        restarts=restarts.whole("total"),
        restarts_by_cause=restarts.numbers("byCause"),
        verdict=status.text("verdict"),
        changes=_changes(metadata, status),
        conditions=tuple(_condition(each, now) for each in status.parts("conditions")),
        alerts=tuple(
            AlertView(each.text("kind"), each.whole("step"), each.text("message")) for each in status.parts("alerts")
        ),
        artifacts=tuple(_artifact(each) for each in status.parts("artifacts")),
        evaluation=tuple(
            FigureView(each.text("name"), each.number("before"), each.number("after"))
            for each in status.parts("evaluation")
        ),
        workers=workers,
        last=entries[-1] if entries else None,
        events=tuple(events),
        advice=(),
        outdated=status.whole("observedGeneration") < whole(metadata, "generation"),
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


def _condition(one: StatusPart[Condition], now: float) -> ConditionView:
    age = _since(one.text("lastTransitionTime"), now)
    return ConditionView(one.text("type"), one.text("status"), one.text("reason"), one.text("message"), age)


def _artifact(one: StatusPart[ArtifactReport]) -> ArtifactView:
    return ArtifactView(one.text("kind"), one.text("path"), one.whole("step"), one.whole("bytes"), one.text("digest"))


def _changes(metadata: Mapping[str, Any], status: StatusPart[ShownStatus]) -> tuple[ChangeView, ...] | None:
    """As the operator compared them; what it has not seen yet it has not compared."""
    record = status.part("failedSpec")
    seen = status.whole("observedGeneration") >= whole(metadata, "generation")
    if not seen or not record.has_list("changes"):
        return None
    return tuple(ChangeView(each.text("field"), each.text("was"), each.text("now")) for each in record.parts("changes"))


def _checkpoints(status: StatusPart[ShownStatus], now: float) -> CheckpointsView:
    part = status.part("checkpoint")
    memory, durable = part.whole("memoryStep", -1), part.whole("durableStep", -1)
    if status.text("phase") in {"Completed", "Failed", "Suspended"}:
        memory = -1  # it went with the pods
    return CheckpointsView(
        memory_step=None if memory < 0 else memory,
        durable_step=None if durable < 0 else durable,
        durable_age_seconds=_since(part.text("durableTime"), now) if durable >= 0 else None,
        notice=part.text("notice"),
    )


def _step_seconds(status: StatusPart[ShownStatus]) -> float | None:
    """The reference step time of the present size."""
    size = status.whole("replicas")
    here = [each for each in status.part("goodput").parts("sizes") if each.whole("size") == size]
    return here[-1].number("stepSeconds") if here else None


def _eta(status: StatusPart[ShownStatus], goodput: GoodputView, left: int) -> float | None:
    """Steps that are left at the reference step time, and as much lost on the way as until now, the start left out."""
    reference = _step_seconds(status)
    if reference is None or left <= 0 or status.text("phase") in {"Completed", "Failed", "Suspended"}:
        return None
    spent = goodput.wall_seconds - goodput.lost_by_stage.get("Startup", 0.0)
    factor = max(1.0, spent / goodput.productive_seconds) if goodput.productive_seconds > 0 else 1.0
    return left * reference * factor


def _written(metadata: Mapping[str, Any], status: StatusPart[ShownStatus], now: float) -> float | None:
    """How long ago the status was last written, by whoever writes it; None when nobody has."""
    if not status:
        return None
    stamps = [
        seconds_of(text(each, "time"))
        for each in objects(metadata, "managedFields")
        if each.get("subresource") == "status"
    ]
    known = [stamp for stamp in stamps if stamp is not None]
    accounted = status.part("goodput").number("accountedUntil")
    newest = max([*known, *([accounted] if accounted is not None else [])], default=None)
    return None if newest is None else max(0.0, now - newest)
