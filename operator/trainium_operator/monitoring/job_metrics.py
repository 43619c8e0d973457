"""Prometheus metrics about jobs, computed from the statuses that plans wrote.

Invariants: counters increase once per transition, so a repeated plan or a restart of the operator increases none. Sums
of seconds are read from the ledgers, which outlive the operator. No label is a job (`named_job_metrics` has those), a
pod or a node.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trainium_contract.faults.causes import Cause
from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.status.conditions import ConditionType, Phase
from trainium_operator.monitoring.named_job_metrics import MEASURES, NamedJobMetrics, count_by_state
from trainium_operator.plan.history.interruptions import get_identity
from trainium_operator.plan.model.conditions import is_true

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_contract.job import TrainingJobStatus
    from trainium_contract.status.interruptions import Interruption
    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.observed import JobView

_FAULT_SECONDS = (0.1, 0.3, 1, 2, 4, 8, 15, 30, 60, 120, 300, 900)
_STEPS = (0, 1, 2, 5, 10, 30, 100, 300, 1000)
_ENDS = (ConditionType.COMPLETE, ConditionType.FAILED)


class JobMetrics:
    """Totals over the statuses of all jobs."""

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str,
        wall_clock: Callable[[], float] = time.time,
        *,
        most_named: int = 0,
    ) -> None:
        """`most_named` limits the jobs with separate figures."""
        self._wall_clock = wall_clock
        self._seen: dict[str, tuple[JobView, PublicStatus]] = {}
        self._labels: dict[Gauge, set[str]] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(prefix + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(prefix + name, text, labels, buckets=buckets, registry=registry)

        self._jobs = gauge("jobs", "TrainingJobs by phase", "phase")
        self._finished = counter("jobs_finished_total", "TrainingJobs that ended", "result")
        self._interruptions = counter("interruptions_total", "Interruptions of training", "cause")
        self._restarts = counter("restarts_total", "Interruptions that were answered", "response", "cause")
        self._detection = histogram("fault_detection_seconds", "From a failure to its detection", _FAULT_SECONDS)
        self._recovery = histogram(
            "recovery_seconds", "From a failure to the first new step", _FAULT_SECONDS, "response"
        )
        self._stages = histogram("recovery_stage_seconds", "Parts of a recovery", _FAULT_SECONDS, "stage")
        self._steps = histogram("recovery_steps", "Steps that a recovery did again", _STEPS, "response")
        self._lost_steps = counter("lost_steps_total", "Steps that were done again")
        self._resizes = counter("resizes_total", "Changes of the number of members", "direction")
        self._pods = counter("worker_pods_total", "Requested worker pods")
        self._gang_releases = counter("gangs_released_total", "Partial gangs that released their nodes")
        self._goodput = gauge("goodput_ratio", "Lowest goodput of the running jobs; 1 when none runs", "measure")
        self._wall = gauge("wall_seconds", "Wall time of the jobs that exist")
        self._productive = gauge("productive_seconds", "Productive time of the jobs that exist")
        self._lost = gauge("lost_seconds", "Lost time of the jobs that exist", "cause")
        self._lost_stage = gauge("lost_stage_seconds", "Lost time of the jobs that exist, by stage", "stage")
        self._stage = gauge("stage_seconds", "Time of the jobs that exist in the stages after the last step", "stage")
        self._nodes = gauge("node_seconds", "Node time that the jobs that exist have held")
        self._durable_age = gauge("checkpoint_durable_age_seconds", "Oldest newest checkpoint of the running jobs")
        self._workers = gauge("workers", "Workers of the jobs that exist", "state")
        for phase in Phase:
            self._jobs.labels(phase.value).set(0)
        # A counter that starts at 1 shows no increase.
        for kind in _ENDS:
            self._finished.labels(kind.value)
        for cause in Cause:
            self._interruptions.labels(cause.value)
        if most_named:
            registry.register(NamedJobMetrics(prefix, most_named, self._seen.values, wall_clock))

    def record_plan(self, job: JobView, status: TrainingJobStatus) -> None:
        """Count an executed plan for `job`, whose observed status is the old one."""
        old = job.status
        self._seen[job.uid] = (job, status)
        before = {get_identity(interruption): interruption for interruption in old.history}
        for interruption in status.history:
            self._record_interruption(before.get(get_identity(interruption)), interruption)
        for kind in _ENDS:
            if is_true(status, kind) and not is_true(old, kind):
                self._finished.labels(kind.value).inc()
        self._pods.inc(max(0, status.next_pod_ordinal - old.next_pod_ordinal))
        self._gang_releases.inc(max(0, status.gang.releases - old.gang.releases))
        sizes = (old.membership.size, status.membership.size)
        if all(sizes) and sizes[0] != sizes[1]:
            self._resizes.labels("grow" if sizes[1] > sizes[0] else "shrink").inc()

    def forget(self, job_uid: str) -> None:
        """Forget a deleted job."""
        self._seen.pop(job_uid, None)

    def refresh(self) -> None:
        """Update the gauges; call before they are read."""
        statuses = [status for _, status in self._seen.values()]
        self._set_gauge(self._jobs, [(status.phase.value, 1) for status in statuses])
        ledgers = [status.goodput for status in statuses]
        self._wall.set(sum(ledger.wall_seconds for ledger in ledgers))
        self._productive.set(sum(ledger.productive_seconds for ledger in ledgers))
        self._nodes.set(sum(ledger.node_seconds for ledger in ledgers))
        self._set_gauge(self._lost, [item for ledger in ledgers for item in ledger.lost_seconds.items()])
        self._set_gauge(self._stage, [item for ledger in ledgers for item in ledger.stage_seconds.items()])
        self._set_gauge(self._lost_stage, [item for ledger in ledgers for item in ledger.lost_by_stage.items()])
        running = [
            job_status
            for job_status in statuses
            if job_status.phase is Phase.RUNNING and job_status.goodput.wall_seconds > 0
        ]
        for measure, name in MEASURES.items():
            ratios = (getattr(job_status.goodput, name) for job_status in running)
            self._goodput.labels(measure).set(min((ratio for ratio in ratios if ratio is not None), default=1.0))
        self._durable_age.set(max(self._set_ages(running), default=0.0))
        self._set_gauge(
            self._workers, [item for job, status in self._seen.values() for item in count_by_state(job, status)]
        )

    def _set_ages(self, running: list[PublicStatus]) -> Iterator[float]:
        """Return the age of each newest durable checkpoint; the time since the first step where there is none."""
        for status in running:
            since = parse_rfc3339(status.checkpoint.durable_time or status.start_time)
            if since is not None:
                yield max(0.0, self._wall_clock() - since)

    def _set_gauge(self, gauge: Gauge, items: list[tuple[str, float]]) -> None:
        """Set sums by label; a label without jobs stays, as 0."""
        sums: dict[str, float] = dict.fromkeys(self._labels.get(gauge, ()), 0.0)
        for label, value in items:
            sums[label] = sums.get(label, 0.0) + value
        self._labels[gauge] = set(sums)
        for label, value in sums.items():
            gauge.labels(label).set(value)

    def _record_interruption(self, old: Interruption | None, new: Interruption) -> None:
        if old is None:
            self._interruptions.labels(new.cause.value).inc()
        if not new.is_open and (old is None or old.is_open):
            # Not before: until then the ladder may still choose another response.
            self._restarts.labels(new.response.value, new.cause.value).inc()
        if new.detected_seconds is not None and (old is None or old.detected_seconds is None):
            self._detection.observe(new.detected_seconds)
        if new.recovered_seconds is not None and (old is None or old.recovered_seconds is None):
            self._recovery.labels(new.response.value).observe(new.recovered_seconds)
            self._steps.labels(new.response.value).observe(max(0, new.steps_lost or 0))
            self._lost_steps.inc(max(0, new.steps_lost or 0))
            for stage, seconds in new.stages.model_dump().items() if new.stages is not None else ():
                self._stages.labels(stage.capitalize()).observe(max(0.0, seconds))
