"""Prometheus metrics: base units, few labels, none of them a pod, a node or a rank.

Invariant: every time series is bounded by enums, not by what users name things. Figures of a job are taken from the
status that a plan wrote, each transition once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from trainium_contract.job import ConditionStatus, ConditionType, Phase, Rung

if TYPE_CHECKING:
    from trainium_contract.job import Interruption, TrainingJobStatus
    from trainium_operator.plan.model import JobView

_PREFIX = "trainingjob_operator_"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_FAULT_SECONDS = (0.1, 0.3, 1, 2, 4, 8, 15, 30, 60, 120, 300)


class Metrics:
    """All metrics of one process, in a registry of its own."""

    def __init__(self) -> None:
        # A time series per time series, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._jobs_seen: dict[str, Phase] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(_PREFIX + name, text, labels, buckets=buckets, registry=self.registry)

        self.leader = gauge("leader", "1 while this replica acts")
        self.queue_depth = gauge("queue_depth", "Jobs that wait for a worker")
        self.agents = gauge("agents", "Agents that are registered")
        self.events_dropped = gauge("events_dropped", "Events that were not written because there were too many")
        self._jobs = gauge("jobs", "TrainingJobs by phase", "phase")
        self._finished = counter("jobs_finished_total", "TrainingJobs that ended", "result")
        self._interruptions = counter("interruptions_total", "Interruptions of training", "cause")
        self._restarts = counter("restarts_total", "Interruptions that were answered", "rung", "cause")
        self._detection = histogram("fault_detection_seconds", "From a failure to its detection", _FAULT_SECONDS)
        self._recovery = histogram("recovery_seconds", "From a failure to the first new step", _FAULT_SECONDS, "rung")
        self._lost_steps = counter("lost_steps_total", "Steps that were done twice")
        self._goodput = gauge("goodput_ratio", "Lowest goodput of the running jobs")
        self._reconcile = histogram("reconcile_seconds", "Duration of a reconcile", _SECONDS)
        self._reconcile_errors = counter("reconcile_errors_total", "Reconciles that failed", "error")
        self._requests = counter("api_requests_total", "Requests to the API server", "verb", "code")
        self._messages = counter("agent_messages_total", "Messages from agents", "kind", "code")
        self._goodputs: dict[str, float] = {}
        for phase in Phase:
            self._jobs.labels(phase.value).set(0)

    def request(self, verb: str, status: int) -> None:
        """One request to the API server was answered (0: it was not)."""
        self._requests.labels(verb, str(status)).inc()

    def message(self, kind: str, status: int) -> None:
        """One message of an agent was answered."""
        known = kind if kind in ("register", "heartbeat", "membership") else "other"
        self._messages.labels(known, str(status)).inc()

    def reconciled(self, seconds: float, error: str) -> None:
        """One reconcile ended; `error` is empty, or the class of the error."""
        self._reconcile.observe(seconds)
        if error:
            self._reconcile_errors.labels(error).inc()

    def planned(self, job: JobView, status: TrainingJobStatus) -> None:
        """A plan for `job`, whose observed status is the old one, was carried out."""
        self._phase(job.uid, status)
        before = {(each.generation, each.attempt, each.time): each for each in job.status.history}
        for each in status.history:
            self._interruption(before.get((each.generation, each.attempt, each.time)), each)
        for kind in (ConditionType.COMPLETE, ConditionType.FAILED):
            if _holds(status, kind) and not _holds(job.status, kind):
                self._finished.labels(kind.value).inc()

    def forget(self, job_uid: str) -> None:
        """The job is gone."""
        phase = self._jobs_seen.pop(job_uid, None)
        if phase is not None:
            self._jobs.labels(phase.value).dec()
        self._goodputs.pop(job_uid, None)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        self._goodput.set(min(self._goodputs.values(), default=1.0))
        return generate_latest(self.registry)

    def _phase(self, uid: str, status: TrainingJobStatus) -> None:
        old = self._jobs_seen.get(uid)
        if old is not status.phase:
            if old is not None:
                self._jobs.labels(old.value).dec()
            self._jobs.labels(status.phase.value).inc()
            self._jobs_seen[uid] = status.phase
        if status.phase is Phase.RUNNING and status.goodput.wall_seconds > 0:
            self._goodputs[uid] = status.goodput.ratio
        else:
            self._goodputs.pop(uid, None)

    def _interruption(self, old: Interruption | None, new: Interruption) -> None:
        if old is None:
            self._interruptions.labels(new.cause.value).inc()
        if _answered(new) and not (old is not None and _answered(old)):
            # Not before: until then the ladder may still choose another rung.
            self._restarts.labels(new.rung.value, new.cause.value).inc()
        if new.detected_seconds is not None and (old is None or old.detected_seconds is None):
            self._detection.observe(new.detected_seconds)
        if new.recovered_seconds is not None and (old is None or old.recovered_seconds is None):
            self._recovery.labels(new.rung.value).observe(new.recovered_seconds)
            self._lost_steps.inc(max(0, new.steps_lost or 0))


def _answered(interruption: Interruption) -> bool:
    return interruption.recovered_seconds is not None or interruption.rung is Rung.STOP


def _holds(status: TrainingJobStatus, kind: ConditionType) -> bool:
    return any(each.type is kind and each.status is ConditionStatus.TRUE for each in status.conditions)
