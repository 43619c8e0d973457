"""One job as typed values: what it does, how far it is, what it costs, what happened last, and what to do now."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.spec.managed_by import is_managed_here
from trainium_contract.views.goodput import CostView, GoodputView, goodput_view
from trainium_contract.views.interruptions import InterruptionView, interruptions
from trainium_contract.views.raw import mapping, objects, plain, seconds_of, text, whole
from trainium_contract.views.status_reader import public_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_contract.status.conditions import Condition
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.status.results import ArtifactReport, EvaluationFigure, MilestoneEvaluation
    from trainium_contract.views.events import EventView
    from trainium_contract.views.status_reader import StatusReader
    from trainium_contract.views.workers import WorkersView

_MOST_CHANGES = 6
_WAITING = {"Unschedulable", "WorkerNotStarting", "NameTaken", "CreationRefused"}
STALE_SECONDS = 120.0
"""Nobody has written of a job that trains for so long: six times the longest interval of the operator."""


@dataclass(frozen=True, slots=True)
class ConditionView:
    """One condition."""

    type: str
    status: str
    reason: str
    message: str
    age_seconds: float | None


@dataclass(frozen=True, slots=True)
class ArtifactView:
    """Something that the run left for others."""

    kind: str
    path: str
    step: int
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class FigureView:
    """A measure of the evaluation, before and after."""

    name: str
    before: float | None
    after: float | None
    standard_error: float | None = None
    """Standard error of `after`."""


@dataclass(frozen=True, slots=True)
class MilestoneView:
    """The figures of a milestone's model, or why there are none."""

    step: int
    tokens: int
    figures: tuple[FigureView, ...]
    message: str


@dataclass(frozen=True, slots=True)
class AlertView:
    """An alert of the trainer's monitors."""

    kind: str
    step: int
    message: str

    @property
    def text(self) -> str:
        """The message with its step, which most begin with themselves."""
        return self.message if self.message.startswith(f"Step {self.step}") else f"step {self.step}: {self.message}"


@dataclass(frozen=True, slots=True)
class ChangeView:
    """A field of a failed job that was changed since; empty for not set."""

    field: str
    was: str
    now: str


@dataclass(frozen=True, slots=True)
class CheckpointsView:
    """Newest steps that a resume could use; None for none."""

    memory_step: int | None
    durable_step: int | None
    durable_age_seconds: float | None
    notice: str


@dataclass(frozen=True, slots=True)
class JobView:
    """The screen of `status`."""

    name: str
    namespace: str
    uid: str
    model: str
    managed_by: str
    """Another controller of the job; empty for the operator."""
    phase: str
    """Empty while no operator has answered the job."""
    stage: str
    stage_share: float | None
    age_seconds: float | None
    started_at: float | None
    """Unix seconds of the first step."""
    ended_at: float | None
    """Unix seconds when it completed or failed."""
    step: int
    step_reported_at: float | None
    """Unix seconds; None where that is not known."""
    step_age_seconds: float | None
    total_steps: int
    share: float | None
    """Share of the steps, 0 to 1."""
    eta_seconds: float | None
    """Time until the last step, at the reference step time and with the losses that the run has had."""
    step_seconds: float | None
    loss: float | None
    reward_accuracy: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    size: int
    training: int
    requested: int
    desired: int
    spares: int
    data_parallel: int
    generation: int
    attempt: int
    checkpoints: CheckpointsView
    goodput: GoodputView
    restarts: int
    restarts_by_cause: dict[str, float]
    verdict: str
    changes: tuple[ChangeView, ...] | None
    """Differences from the spec that failed; None where that is not known, and of a job that has not failed."""
    conditions: tuple[ConditionView, ...]
    alerts: tuple[AlertView, ...]
    artifacts: tuple[ArtifactView, ...]
    evaluation: tuple[FigureView, ...]
    evaluations: tuple[MilestoneView, ...]
    workers: WorkersView | None
    last: InterruptionView | None
    events: tuple[EventView, ...]
    """The newest first."""
    advice: tuple[str, ...]
    outdated: bool
    """The operator has not answered the newest spec yet."""
    written_seconds_ago: float | None
    not_shown: tuple[str, ...]
    """Reports of what could not be read, with the reason."""
    status: StatusReader[PublicStatus] = field(repr=False, compare=False, metadata={"json": False})
    """For what has no field here: `pages/facts.py`."""

    @property
    def ended(self) -> bool:
        """Completed or failed."""
        return self.phase in {"Completed", "Failed"}

    @property
    def step_is_old(self) -> bool:
        """Whether a job that should train has reported no step for long, so that a reader needs the step's age."""
        expected = not self.ended and self.phase not in {"", "Suspended"} and not self.managed_by
        return expected and self.step > 0 and (self.step_age_seconds or 0.0) > STALE_SECONDS

    @property
    def stale(self) -> bool:
        """Whether nobody has written for long of a job that trains: progress is written at intervals.

        A job that waits is no such job: an unchanged status is not written again.
        """
        return self.phase == "Running" and self._is_unwritten

    @property
    def waits_unwritten(self) -> bool:
        """Whether a job that waits has an old status: nothing has changed, or no operator writes it."""
        waits = self.phase not in {"", "Running", "Suspended"} and not self.ended
        return waits and self._is_unwritten

    @property
    def _is_unwritten(self) -> bool:
        written = self.written_seconds_ago
        return not self.managed_by and written is not None and written > STALE_SECONDS


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
    goodput = goodput_view(status, now)
    step, total = progress.whole("step"), progress.whole("totalSteps")
    entries = interruptions(status)
    view = JobView(
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
        step_reported_at=seconds_of(progress.text("updated")),
        step_age_seconds=_since(progress.text("updated"), now),
        total_steps=total,
        share=min(1.0, step / total) if total > 0 else None,
        eta_seconds=_eta(status, goodput, total - step),
        step_seconds=_step_seconds(status),
        loss=progress.number("loss"),
        reward_accuracy=progress.number("rewardAccuracy"),
        tokens_per_second=progress.number("tokensPerSecond"),
        samples_per_second=progress.number("samplesPerSecond"),
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
        evaluation=tuple(_figure(each) for each in status.parts("evaluation")),
        evaluations=tuple(_milestone(each) for each in status.parts("evaluations")),
        workers=workers,
        last=entries[-1] if entries else None,
        events=tuple(events),
        advice=(),
        # A deletion raises the generation, and nothing is left to carry out.
        outdated=not metadata.get("deletionTimestamp")
        and status.whole("observedGeneration") < whole(metadata, "generation"),
        written_seconds_ago=_written(metadata, status, now),
        not_shown=not_shown,
        status=status,
    )
    return replace(view, advice=advise(view))


def cost_view(view: JobView, price: float) -> CostView:
    """Return the cost of a job at a price of a node-hour."""
    goodput, hourly = view.goodput, price / 3600
    productive = hourly * goodput.node_seconds * (goodput.fleet_ratio or 0.0)
    rest = hourly * goodput.node_seconds - productive
    # What is held beside the members is held in lost time too, so lost time is charged for all that is held.
    held = goodput.node_seconds / goodput.wall_seconds if goodput.wall_seconds else 0.0
    lost = {cause: hourly * held * seconds for cause, seconds in goodput.lost_seconds.items()}
    share = min(1.0, rest / sum(lost.values())) if any(lost.values()) else 0.0
    lost = {cause: share * cost for cause, cost in lost.items()}
    return CostView(
        price=price,
        so_far=hourly * goodput.node_seconds,
        productive=productive,
        lost=lost,
        idle=rest - sum(lost.values()),
        to_end=None if view.eta_seconds is None else hourly * view.eta_seconds * (view.size + view.spares),
    )


_LONGEST_COMMAND = 60


def _model(spec: Mapping[str, Any]) -> str:
    """Return the trainer's model, or what the program runs."""
    program = mapping(spec, "program")
    if program:
        # A script in it has lines, which are no lines of the page.
        given = (program.get("command"), program.get("args"))
        words = " ".join(str(word) for part in given if isinstance(part, list) for word in part).split()
        command = plain(" ".join(words))
        return command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}..."
    model = mapping(mapping(spec, "trainer"), "model")
    return text(model, "preset") or plain(str(mapping(model, "weights").get("path") or "")) or "model of its own shape"


def _manager(spec: Mapping[str, Any]) -> str:
    manager = text(spec, "managedBy")
    return "" if is_managed_here(manager) else manager


def _since(stamp: str, now: float) -> float | None:
    at = seconds_of(stamp)
    return None if at is None else max(0.0, now - at)


def _condition(one: StatusReader[Condition], now: float) -> ConditionView:
    age = _since(one.text("lastTransitionTime"), now)
    return ConditionView(one.text("type"), one.text("status"), one.text("reason"), one.text("message"), age)


def _artifact(one: StatusReader[ArtifactReport]) -> ArtifactView:
    return ArtifactView(one.text("kind"), one.text("path"), one.whole("step"), one.whole("bytes"), one.text("digest"))


def _figure(one: StatusReader[EvaluationFigure]) -> FigureView:
    return FigureView(one.text("name"), one.number("before"), one.number("after"), one.number("standardError"))


def _milestone(one: StatusReader[MilestoneEvaluation]) -> MilestoneView:
    figures = tuple(_figure(each) for each in one.parts("figures"))
    return MilestoneView(one.whole("step"), one.whole("tokens"), figures, one.text("message"))


def _changes(metadata: Mapping[str, Any], status: StatusReader[PublicStatus]) -> tuple[ChangeView, ...] | None:
    """Return the operator's comparison; None for a spec that it has not observed yet."""
    record = status.part("failedSpec")
    seen = status.whole("observedGeneration") >= whole(metadata, "generation")
    if not seen or not record.has_list("changes"):
        return None
    return tuple(ChangeView(each.text("field"), each.text("was"), each.text("now")) for each in record.parts("changes"))


def _checkpoints(status: StatusReader[PublicStatus], now: float) -> CheckpointsView:
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


def _step_seconds(status: StatusReader[PublicStatus]) -> float | None:
    """Return the reference step time of the present size."""
    size = status.whole("replicas")
    here = [each for each in status.part("goodput").parts("sizes") if each.whole("size") == size]
    return here[-1].number("stepSeconds") if here else None


def _eta(status: StatusReader[PublicStatus], goodput: GoodputView, left: int) -> float | None:
    """Estimate the time left: remaining steps at the reference step time, with as large a loss as so far."""
    reference = _step_seconds(status)
    if reference is None or left <= 0 or status.text("phase") in {"Completed", "Failed", "Suspended"}:
        return None
    spent = goodput.wall_seconds - goodput.lost_by_stage.get("Startup", 0.0)
    factor = max(1.0, spent / goodput.productive_seconds) if goodput.productive_seconds > 0 else 1.0
    return left * reference * factor


def _written(metadata: Mapping[str, Any], status: StatusReader[PublicStatus], now: float) -> float | None:
    """Return the age of the status in seconds; None when it was never written."""
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


def advise(view: JobView) -> tuple[str, ...]:
    """Return sentences, each with an action for the reader."""
    if view.managed_by:
        return (f"{view.managed_by} controls this job (spec.managedBy), and the operator leaves it alone: look there.",)
    if not view.phase:
        return (
            (
                "No operator has answered this job yet. If that lasts for more than a minute, it does not run, or does "
                f"not watch namespace {view.namespace} (its setting watchNamespaces): "
                "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator"
            ),
        )
    if view.phase == "Failed":
        return (
            f"{view.verdict or 'The job failed; it gave no verdict.'}",
            f"What led to it: kubectl trn why {view.name}",
            advise_retry(view),
        )
    if view.phase == "Terminating":
        return tuple({_condition_text(each): None for each in view.conditions if each.reason == "Terminating"})
    found = list(_problems(view))
    if view.phase == "Suspended":
        found.append(f"It waits for you: kubectl trn resume {view.name}")
    return tuple(found)


def advise_retry(view: JobView) -> str:
    """Explain how to run a failed job again, unchanged or corrected, and what was changed already."""
    saved = view.checkpoints.durable_step
    start = "from the beginning, no checkpoint is on storage" if saved is None else f"from step {saved}"
    file = f"kubectl trn retry {view.name} -f FILE"
    if view.changes:
        return (
            f"Changed since it failed: {_changed(view.changes)}. That counts when it runs again, {start}: "
            f"kubectl trn retry {view.name}. To change more: correct its file, {file}"
        )
    same = "" if view.changes is None else "Nothing in it has changed since it failed. "
    return (
        f"{same}Run it again as it is, {start}: kubectl trn retry {view.name}. To change the job itself: "
        f"correct its file, {file}"
    )


def _changed(changes: tuple[ChangeView, ...]) -> str:
    shown = [f"{each.field} ({_from_to(each)})" if _from_to(each) else each.field for each in changes[:_MOST_CHANGES]]
    more = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _from_to(change: ChangeView) -> str:
    """Describe the change of a field; a digest alone means nothing to a person."""
    was, now = (value.partition("#")[0] if value.startswith("#") else value for value in (change.was, change.now))
    if not was and not now:
        return ""
    return f"was {was or 'not set'}, is {now or 'not set'}"


def _problems(view: JobView) -> list[str]:
    found: list[str] = []
    conditions = {each.type: each for each in view.conditions}
    target = conditions.get("FailureTarget")
    if view.phase == "Stopping" and target is not None:
        found.append(f"{target.message} Its workers save and leave, then it fails.")
    if view.stale and view.written_seconds_ago is not None:
        found.append(
            f"What is shown is {view.written_seconds_ago:.0f} s old: the operator does not write. Check that it runs, "
            f"and that its setting watchNamespaces includes {view.namespace}: "
            "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator (training goes on without it)"
        )
    pods = conditions.get("PodsReady")
    if not view.ended and pods is not None and pods.status == "False" and pods.reason in _WAITING:
        found.append(pods.message)
    admitted = conditions.get("Admitted")
    if not view.ended and admitted is not None and admitted.status == "False" and view.phase == "Pending":
        # One refusal is the reason of both conditions.
        found += [] if any(admitted.message in each for each in found) else [admitted.message]
    for kind in ("SizeLegal", "ProgressReported", "CheckpointHealthy", "NodesHealthy"):
        if kind in conditions and conditions[kind].status == "False":
            # The store's own error is more specific than "nothing was committed in time".
            notice = view.checkpoints.notice if kind == "CheckpointHealthy" else ""
            found.append(notice or _condition_text(conditions[kind]))
    resizing = conditions.get("Resizing")
    if not view.ended and resizing is not None and resizing.reason == "CapacityMissing":
        found.append(f"It grows back by itself; to stop waiting: kubectl trn scale {view.name} {view.size}")
    if not found and view.waits_unwritten and view.written_seconds_ago is not None:
        found.append(
            f"Its status has not changed for {view.written_seconds_ago:.0f} s. If it should have, check that the "
            f"operator runs, and that its setting watchNamespaces includes {view.namespace}: "
            "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator"
        )
    return [sentence for sentence in found if sentence]


def _condition_text(condition: ConditionView) -> str:
    return condition.message or f"{condition.type} is {condition.status}: {condition.reason}"
