"""Build one job's typed values: activity, progress, cost, recent events, and advice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.spec.managed_by import is_managed_here
from trainium_contract.views.goodput import CostView, GoodputView, build_goodput_view
from trainium_contract.views.interruptions import InterruptionView, read_interruptions
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

_MAX_CHANGES = 6
_WAITING = {"Unschedulable", "WorkerNotStarting", "NameTaken", "CreationRefused"}
STALE_SECONDS = 15.0
"""Age from which the status of a training job is stale: three intervals of the operator, which grow with the job."""
_EVERY_INTERVAL_WORKERS = 256
_MAX_INTERVAL_FACTOR = 6.0
_UNCHANGED_SECONDS = 120.0
"""Time without a new step, or without a change of a waiting job, that a reader should know of."""


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
    """An artifact of the run."""

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
class RoleView:
    """Pods of a role of the job."""

    name: str
    ready: int
    replicas: int
    min_ready: int
    restarts: int
    message: str
    """Why fewer pods than requested are ready; empty otherwise."""


@dataclass(frozen=True, slots=True)
class AlertView:
    """An alert of the trainer's monitors."""

    kind: str
    step: int
    message: str

    @property
    def text(self) -> str:
        """Return the message with its step, which most messages start with."""
        return self.message if self.message.startswith(f"Step {self.step}") else f"step {self.step}: {self.message}"


@dataclass(frozen=True, slots=True)
class ChangeView:
    """A field of a failed job that was changed since; empty if not set."""

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
    """Another controller of the job; empty for this operator."""
    phase: str
    """Empty until an operator has answered the job."""
    stage: str
    stage_share: float | None
    age_seconds: float | None
    started_at: float | None
    """Unix seconds of the first step."""
    ended_at: float | None
    """Unix seconds when it completed or failed."""
    step: int
    step_reported_at: float | None
    """Unix seconds; None if unknown."""
    step_age_seconds: float | None
    total_steps: int
    share: float | None
    """Share of the steps, 0 to 1."""
    eta_seconds: float | None
    """Time until the last step, at the reference step time and with the lost time so far."""
    step_seconds: float | None
    loss: float | None
    reward_accuracy: float | None
    learning_rate: float | None
    grad_norm: float | None
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
    """Differences from the spec that failed; None if unknown, and for a job that has not failed."""
    conditions: tuple[ConditionView, ...]
    alerts: tuple[AlertView, ...]
    artifacts: tuple[ArtifactView, ...]
    evaluation: tuple[FigureView, ...]
    evaluations: tuple[MilestoneView, ...]
    roles: tuple[RoleView, ...]
    workers: WorkersView | None
    last: InterruptionView | None
    events: tuple[EventView, ...]
    """The newest first."""
    advice: tuple[str, ...]
    outdated: bool
    """Whether the operator has not answered the newest spec yet."""
    written_seconds_ago: float | None
    written_at: float | None
    """Unix seconds; None for a status that was never written."""
    not_shown: tuple[str, ...]
    """Objects that could not be read, with the reasons."""
    status: StatusReader[PublicStatus] = field(repr=False, compare=False, metadata={"json": False})
    """For `pages/facts.py`: fields without one here."""

    @property
    def ended(self) -> bool:
        """Return whether the job has completed or failed."""
        return self.phase in {"Completed", "Failed"}

    @property
    def has_known_checkpoints(self) -> bool:
        """Return whether the checkpoints can be known: not those of a program that does not describe them."""
        return all(condition.reason != "CheckpointsUnknown" for condition in self.conditions)

    @property
    def step_is_old(self) -> bool:
        """Return whether a training job has reported no step for long, so that a reader needs the step's age."""
        expected = not self.ended and self.phase not in {"", "Suspended"} and not self.managed_by
        return expected and self.step > 0 and (self.step_age_seconds or 0.0) > _UNCHANGED_SECONDS

    @property
    def stale(self) -> bool:
        """Return whether a training job's status is old although progress is written at intervals.

        A waiting job does not count, because an unchanged status is not written again.
        """
        intervals = min(_MAX_INTERVAL_FACTOR, max(1.0, self.desired / _EVERY_INTERVAL_WORKERS))
        return self.phase == "Running" and self._is_older_than(STALE_SECONDS * intervals)

    @property
    def is_waiting_stale(self) -> bool:
        """Return whether a waiting job has an old status: nothing has changed, or no operator writes it."""
        waits = self.phase not in {"", "Running", "Suspended"} and not self.ended
        return waits and self._is_older_than(_UNCHANGED_SECONDS)

    def _is_older_than(self, seconds: float) -> bool:
        written = self.written_seconds_ago
        return not self.managed_by and written is not None and written >= seconds


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
        return tuple(
            {_condition_text(condition): None for condition in view.conditions if condition.reason == "Terminating"}
        )
    advice = list(_problems(view))
    if view.phase == "Suspended":
        advice.append(f"It waits for you: kubectl trn resume {view.name}")
    return tuple(advice)


def advise_retry(view: JobView) -> str:
    """Explain how to run a failed job again, unchanged or corrected, and what was already changed."""
    saved = view.checkpoints.durable_step
    start = "from the beginning (storage has no checkpoint)" if saved is None else f"from step {saved}"
    if not view.has_known_checkpoints:
        start = "from where its program begins (spec.program.checkpoints is not given)"
    file = f"kubectl trn retry {view.name} -f FILE"
    if view.changes:
        return (
            f"Changed since the failure: {_format_changes(view.changes)}. The change applies at the next run. To run "
            f"it again {start}: kubectl trn retry {view.name}. To change more, correct its file: {file}"
        )
    same = "" if view.changes is None else "Nothing has changed since the failure. "
    return f"{same}To run it again {start}: kubectl trn retry {view.name}. To change the job, correct its file: {file}"


def _format_changes(changes: tuple[ChangeView, ...]) -> str:
    shown = [
        f"{change.field} ({_format_change(change)})" if _format_change(change) else change.field
        for change in changes[:_MAX_CHANGES]
    ]
    more = len(changes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _format_change(change: ChangeView) -> str:
    """Describe the change of a field; a digest alone is meaningless to a person."""
    was, now = (value.partition("#")[0] if value.startswith("#") else value for value in (change.was, change.now))
    if not was and not now:
        return ""
    return f"was {was or 'not set'}, is {now or 'not set'}"


def _problems(view: JobView) -> list[str]:
    problems: list[str] = []
    conditions = {condition.type: condition for condition in view.conditions}
    target = conditions.get("FailureTarget")
    if view.phase == "Stopping" and target is not None:
        problems.append(f"{target.message} Its workers save and leave, then it fails.")
    if view.stale and view.written_seconds_ago is not None:
        problems.append(
            "The operator does not write: what is shown is old, and the job may have stopped. Check that it runs, "
            f"and that its setting watchNamespaces includes {view.namespace}: "
            "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator (healthy workers train on without it)"
        )
    pods = conditions.get("PodsReady")
    if not view.ended and pods is not None and pods.status == "False" and pods.reason in _WAITING:
        problems.append(pods.message)
    admitted = conditions.get("Admitted")
    if not view.ended and admitted is not None and admitted.status == "False" and view.phase == "Pending":
        # One refusal is the reason of both conditions.
        problems += [] if any(admitted.message in problem for problem in problems) else [admitted.message]
    for kind in (
        "SizeLegal",
        "ProgressReported",
        "CheckpointHealthy",
        "NodesHealthy",
        "RolesReady",
        "Reconciled",
        "NetworkPolicyApplied",
    ):
        is_held = kind == "RolesReady" and conditions.get(kind) and not conditions[kind].message
        if kind in conditions and conditions[kind].status == "False" and not is_held:
            # The store's own error is more specific than "nothing was committed in time".
            notice = view.checkpoints.notice if kind == "CheckpointHealthy" else ""
            problems.append(notice or _condition_text(conditions[kind]))
    resizing = conditions.get("Resizing")
    if not view.ended and resizing is not None and resizing.reason == "CapacityMissing":
        problems.append(f"It grows back by itself; to stop waiting: kubectl trn scale {view.name} {view.size}")
    if not problems and view.is_waiting_stale and view.written_seconds_ago is not None:
        problems.append(
            f"Its status has not changed for {view.written_seconds_ago:.0f} s. If it should have, check that the "
            f"operator runs, and that its setting watchNamespaces includes {view.namespace}: "
            "kubectl get pods -A -l app.kubernetes.io/name=trainium-operator"
        )
    return [sentence for sentence in problems if sentence]


def _condition_text(condition: ConditionView) -> str:
    return condition.message or f"{condition.type} is {condition.status}: {condition.reason}"
