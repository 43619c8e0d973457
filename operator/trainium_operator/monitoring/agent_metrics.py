"""Prometheus metrics of what agents report: preflight checks and hung ranks.

Guarantee: each check and each hang counts once, with its heartbeat. The first heartbeat of an agent in this process
counts nothing, so a change of the leader increments no counter twice.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from trainium_contract.wire.messages import HeartbeatRequest, TrainerPhase

_CHECK_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100)


class AgentMetrics:
    """Totals of the heartbeats of all agents."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._checks = Histogram(
            f"{prefix}preflight_seconds", "A worker's checks", ("check",), buckets=_CHECK_SECONDS, registry=registry
        )
        self._refused = Counter(f"{prefix}preflight_failed_total", "Checks that failed", ("check",), registry=registry)
        self._hangs = Counter(
            f"{prefix}hangs_total", "Ranks that hung longer than allowed", ("phase",), registry=registry
        )
        for phase in TrainerPhase:
            self._hangs.labels(phase.value)

    def heartbeat_changed(self, before: HeartbeatRequest, now: HeartbeatRequest) -> None:
        """Count the difference of an agent's heartbeat to the one before it."""
        known = {each.check for each in before.checks}
        for each in now.checks:
            if each.check not in known:
                self._checks.labels(each.check.value).observe(max(0.0, each.seconds))
                if not each.passed:
                    self._refused.labels(each.check.value).inc()
        still = {each.rank for each in before.stuck}
        for rank in now.stuck:
            if rank.rank not in still:
                self._hangs.labels(rank.phase.value).inc()
