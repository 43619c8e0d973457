"""Prometheus metrics of single jobs, by namespace and name; off unless a number of jobs is allowed.

Invariants: at most that many jobs have time series, running jobs before ended ones, and omitted ones are counted. Other
labels of a job are enums, or names of its few figures. Nothing is stored between two scrapes, so a deleted job leaves
no series.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trainium_contract.faults.causes import Cause
from trainium_contract.rfc3339 import parse_rfc3339
from trainium_contract.status.conditions import ConditionStatus, ConditionType, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from trainium_contract.status.public import PublicStatus
    from trainium_operator.plan.model.observed import JobView

MEASURES = {"strict": "ratio", "uptime": "uptime_ratio", "fleet": "fleet_ratio"}
"""Label of a goodput (docs/goodput.md) -> the ledger's field."""
_CAUSES = frozenset(cause.value for cause in Cause)
_OVER = (Phase.COMPLETED, Phase.FAILED)


class NamedJobMetrics(Collector):
    """Figures of at most `max_jobs` jobs, read from their statuses at each scrape."""

    def __init__(
        self,
        prefix: str,
        max_jobs: int,
        jobs: Callable[[], Iterable[tuple[JobView, PublicStatus]]],
        wall_clock: Callable[[], float],
    ) -> None:
        """`jobs()` returns every job with its newest status."""
        self._prefix = prefix
        self._max_jobs = max_jobs
        self._jobs = jobs
        self._wall_clock = wall_clock

    def describe(self) -> Iterable[Metric]:
        """Describe no series, because there are none without jobs."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        jobs = sorted(self._jobs(), key=_build_sort_key)
        left_out = GaugeMetricFamily(self._prefix + "jobs_left_out", "Jobs without figures of their own")
        left_out.add_metric([], max(0, len(jobs) - self._max_jobs))
        yield left_out
        families = Families(self._prefix)
        for job, status in jobs[: self._max_jobs]:
            families.add(job, status, self._wall_clock())
        yield from families.all


class Families:
    """The metrics of single jobs, filled job by job."""

    def __init__(self, prefix: str) -> None:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"{prefix}job_{name}", text, labels=("job_namespace", "job_name", *labels))

        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"{prefix}job_{name}", text, labels=("job_namespace", "job_name", *labels))

        self.phase = gauge("phase", "1 for the phase that the job is in", "phase")
        self.stalled = gauge("stalled", "1 while nothing changes until a person acts")
        self.storage = gauge("checkpoint_healthy", "0 while checkpoints do not come or storage does not work")
        self.age = gauge("checkpoint_durable_age_seconds", "Since the newest durable checkpoint, or the start")
        self.step = gauge("step", "Newest finished step")
        self.loss = gauge("loss", "Loss of that step")
        self.tokens = gauge("tokens_per_second", "Throughput of the whole job")
        self.samples = gauge("samples_per_second", "Throughput of the whole job in samples")
        self.goodput = gauge("goodput_ratio", "Goodput since the job began", "measure")
        self.lost = gauge("lost_seconds", "Time that was lost", "cause")
        self.evaluation = gauge("evaluation", "Newest figure of a milestone's model", "figure")
        self.workers = gauge("workers", "Workers", "state")
        self.roles = gauge("role_pods", "Pods of a role of the job", "role", "state")
        self.role_restarts = counter("role_restarts", "Pods of a role that ended and were replaced", "role")
        self.interruptions = counter("interruptions", "Interruptions by faults", "cause")
        self.all = tuple(vars(self).values())

    def add(self, job: JobView, status: PublicStatus, now: float) -> None:
        """Add one job's figures."""
        name = (job.namespace, job.name)
        holds = {condition.type: condition.status for condition in status.conditions}
        self.phase.add_metric([*name, status.phase.value], 1)
        self.stalled.add_metric(name, holds.get(ConditionType.STALLED) is ConditionStatus.TRUE)
        self.storage.add_metric(name, holds.get(ConditionType.CHECKPOINT_HEALTHY) is not ConditionStatus.FALSE)
        since = parse_rfc3339(status.checkpoint.durable_time or status.start_time)
        if since is not None and status.phase not in _OVER:
            self.age.add_metric(name, max(0.0, now - since))
        progress = status.progress
        self.step.add_metric(name, progress.step)
        if progress.loss is not None:
            self.loss.add_metric(name, progress.loss)
        if status.phase is Phase.RUNNING:
            for family, speed in (
                (self.tokens, progress.tokens_per_second),
                (self.samples, progress.samples_per_second),
            ):
                if speed is not None:
                    family.add_metric(name, speed)
        if status.goodput.wall_seconds > 0:
            for measure, field in MEASURES.items():
                ratio = getattr(status.goodput, field)
                if ratio is not None:
                    self.goodput.add_metric([*name, measure], ratio)
        for cause, seconds in status.goodput.lost_seconds.items():
            self.lost.add_metric([*name, cause], seconds)
        for figure in next(
            (evaluation.figures for evaluation in reversed(status.evaluations) if evaluation.figures), ()
        ):
            if figure.after is not None:
                self.evaluation.add_metric([*name, figure.name], figure.after)
        for state, count in count_by_state(job, status):
            self.workers.add_metric([*name, state], count)
        for role in status.roles:
            self.roles.add_metric([*name, role.name, "desired"], role.replicas)
            self.roles.add_metric([*name, role.name, "ready"], role.ready_replicas)
            self.roles.add_metric([*name, role.name, "needed"], role.min_ready)
            self.role_restarts.add_metric([*name, role.name], role.restarts)
        for cause, count in status.restarts.by_cause.items():
            if cause in _CAUSES:
                self.interruptions.add_metric([*name, cause], count)


def count_by_state(job: JobView, status: PublicStatus) -> tuple[tuple[str, float], ...]:
    """Return how many workers a job has, by state."""
    return (
        ("desired", status.desired),
        ("member", status.replicas),
        ("training", status.ready_replicas),
        ("spare_wanted", 0 if status.completion_time else job.spec.workers.spares),
        ("spare_ready", status.spares),
    )


def _build_sort_key(item: tuple[JobView, PublicStatus]) -> tuple[bool, str, str]:
    job, status = item
    return status.phase in _OVER, job.namespace, job.name
