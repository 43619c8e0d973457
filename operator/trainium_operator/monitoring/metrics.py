"""Prometheus metrics in base units with few labels, none of them a pod, a node or a rank.

Guarantee: enums and the number of jobs with separate figures limit the number of time series, not names that users
choose. Figures of jobs are in `job_metrics`.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from trainium_contract.wire.messages import HeartbeatRequest, TrainerPhase
from trainium_operator.monitoring.job_metrics import JobMetrics
from trainium_operator.plan.faults.node_signals import find_node_problems
from trainium_operator.plan.fleet.memory import Machine, MachineState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from trainium_contract.faults.node_polarity import Severity
    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.plan.model.observed import JobView, NodeView

PREFIX = "trainingjob_operator_"
READ = ("metrics", "ui")
"""Pages served over HTTPS, by the first part of their path."""
_CHECK_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class Metrics:
    """All metrics of one process, in a separate registry."""

    def __init__(self, wall_clock: Callable[[], float] = time.time, *, named_jobs: int = 0) -> None:
        """`named_jobs` limits the jobs with separate figures."""
        # Otherwise each series has a second one with its creation time, which nothing reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._reported: set[tuple[str, Severity]] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=self.registry)

        self.leader = gauge("leader", "1 while this replica acts")
        self.queue_depth = gauge("queue_depth", "Jobs that wait for a worker")
        self.agents = gauge("agents", "Agents that are registered")
        self.events_dropped = gauge("events_dropped", "Events that were not written because there were too many")
        self.refused_statuses = counter("refused_statuses_total", "Writes of a job's status that were refused")
        self._served = gauge("namespaces", "Served namespaces by what can be read there; all as one count 1", "state")
        self._machines = gauge("machines", "Machines that faults were attributed to", "state")
        self._frozen = gauge("node_actions_frozen", "1 while too many nodes look bad at once to act on any")
        self._reconcile = Histogram(
            PREFIX + "reconcile_seconds", "Duration of a reconcile", buckets=_SECONDS, registry=self.registry
        )
        self._reconcile_errors = counter("reconcile_errors_total", "Reconciles that failed", "error")
        self._requests = counter("api_requests_total", "Requests to the API server", "verb", "code")
        self._request_seconds = Histogram(
            PREFIX + "api_request_seconds", "Until the answer", ("verb",), buckets=_SECONDS, registry=self.registry
        )
        self._problems = gauge("node_problems", "What nodes report of themselves", "source", "severity")
        self._messages = counter("agent_messages_total", "Messages from agents", "kind", "code")
        self._reads = counter("https_requests_total", "Requests at the HTTPS port for readers", "page", "code")
        self._of_jobs = JobMetrics(self.registry, PREFIX, wall_clock, most_named=named_jobs)
        self._checks = Histogram(
            PREFIX + "preflight_seconds",
            "A worker's checks",
            ("check",),
            buckets=_CHECK_SECONDS,
            registry=self.registry,
        )
        self._refused = counter("preflight_failed_total", "Checks that failed", "check")
        self._hangs = counter("hangs_total", "Ranks that hung longer than allowed", "phase")
        for phase in TrainerPhase:
            self._hangs.labels(phase.value)

    def record_request(self, verb: str, status: int, seconds: float) -> None:
        """Count a request to the API server that took `seconds`; status 0 means no response."""
        self._requests.labels(verb, str(status)).inc()
        self._request_seconds.labels(verb).observe(seconds)

    def record_message(self, kind: str, status: int) -> None:
        """Count an answered message of an agent."""
        label = kind if kind in ("register", "heartbeat", "membership", "stream") else "other"
        self._messages.labels(label, str(status)).inc()

    def record_read(self, path: str, status: int) -> None:
        """Count an answered request of a reader."""
        page = path.split("/")[1] if path.startswith("/") else ""
        self._reads.labels(page if page in READ else "other", str(status)).inc()

    def set_served_namespaces(self, counts: Mapping[str, int]) -> None:
        """Set the number of served namespaces in each state."""
        for state, count in counts.items():
            self._served.labels(state).set(count)

    def set_fleet(self, machines: Iterable[Machine], *, frozen: bool) -> None:
        """Set the states of machines, and whether node actions are frozen."""
        states = Counts(machine.state for machine in machines)
        for state in MachineState:
            self._machines.labels(state.value).set(states[state])
        self._frozen.set(frozen)

    def set_nodes(self, nodes: Iterable[NodeView]) -> None:
        """Set the problems that nodes report, by kind of source (condition, taint, ...), not by its name."""
        counts = Counts(
            (problem.source.partition(" ")[0], problem.severity)
            for node in nodes
            for problem in find_node_problems(node)
        )
        self._reported |= counts.keys()
        for source, severity in self._reported:
            self._problems.labels(source, severity.name.capitalize()).set(counts[source, severity])

    def record_heartbeat_change(self, before: HeartbeatRequest, now: HeartbeatRequest) -> None:
        """Count the checks and the hangs that are new in a heartbeat, each once.

        The first heartbeat of an agent in this process is not counted, so a change of the leader counts nothing twice.
        """
        checked = {check.check for check in before.checks}
        for check in now.checks:
            if check.check not in checked:
                self._checks.labels(check.check.value).observe(max(0.0, check.seconds))
                if not check.passed:
                    self._refused.labels(check.check.value).inc()
        still = {stuck_rank.rank for stuck_rank in before.stuck}
        for rank in now.stuck:
            if rank.rank not in still:
                self._hangs.labels(rank.phase.value).inc()

    def record_reconcile(self, seconds: float, error: str) -> None:
        """Count a finished reconcile; `error` is empty, or the class of the error."""
        self._reconcile.observe(seconds)
        if error:
            self._reconcile_errors.labels(error).inc()

    def record_plan(self, job: JobView, status: TrainingJobStatus) -> None:
        """Count an executed plan for `job`, whose observed status is the old one."""
        self._of_jobs.record_plan(job, status)

    def forget(self, job_uid: str) -> None:
        """Forget a deleted job."""
        self._of_jobs.forget(job_uid)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        self._of_jobs.refresh()
        return generate_latest(self.registry)
