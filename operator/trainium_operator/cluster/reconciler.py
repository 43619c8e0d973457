"""Run the workers: take a job's key, observe, plan, execute, and requeue.

Guarantees:
- The key means only that something may have changed; everything else is read from the caches.
- A failed write is retried with back-off and shows as an event on the job.
- A defect in a plan is logged, counted and retried with back-off, and never stops the worker.
- No job occupies a worker for longer than `JOB_SECONDS`, and slow jobs share a part of the workers, so a job behind a
  failing webhook delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_contract.api_server.errors import ApiError, UnavailableError
from trainium_operator.cluster.execute.events import EventRecorder, write_failed_event
from trainium_operator.cluster.queue.work_queue import ClosedError, WorkQueue
from trainium_operator.plan.model.actions import Event
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.cluster.cache.caches import Caches
    from trainium_operator.cluster.cache.store import Key
    from trainium_operator.cluster.cache.views import JobRecord
    from trainium_operator.cluster.execute.executor import Executor
    from trainium_operator.cluster.execute.status_writes import StatusWrites
    from trainium_operator.cluster.queue.observe import Observer
    from trainium_operator.cluster.queue.pod_warnings import PodWarnings
    from trainium_operator.cluster.queue.work_queue import PlanRateLimiter
    from trainium_operator.plan.model.actions import Plan
    from trainium_operator.plan.model.observed import JobView, Observed

logger = logging.getLogger(__name__)

UNREADABLE_SECONDS = 300.0
JOB_SECONDS = 60.0
"""A longer reconcile is cancelled and planned again; every write may be repeated."""
TIMEOUT_RETRY_SECONDS = 1.0
SLOW_SECONDS = 2.0
REPORT_FROM_DELAY = 0.8
"""Back-off in seconds from which a repeated failure shows as an event."""


@dataclass(kw_only=True, eq=False)
class Reconciler:
    """Runs plans for the keys of a queue."""

    queue: WorkQueue[Key]
    caches: Caches
    observer: Observer
    plan: Callable[[Observed], Plan]
    executor: Executor
    statuses: StatusWrites
    recorder: EventRecorder
    rate_limiter: PlanRateLimiter
    warnings: PodWarnings
    release: str
    """The name of this release of the operator."""
    find_server: Callable[[str], str]
    """Returns the other release of the operator that serves a namespace; empty if this one does."""
    on_reconciled: Callable[[float, str], None]
    """Called with seconds and error at the end of each reconcile; the error is empty, or its class."""
    on_planned: Callable[[JobView, TrainingJobStatus], None]
    """Called after each executed plan with the job, whose status is the old one, and the new status."""
    _written: dict[Key, float] = field(default_factory=dict, init=False)
    """When this process last wrote each job's status, by the clock of plans."""
    _started: dict[Key, float] = field(default_factory=dict, init=False)
    _reported_unknown: dict[Key, tuple[str, ...]] = field(default_factory=dict, init=False)
    """Unknown places in each job's spec that were reported."""
    _planning: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Plans run one at a time, so that several do not use the processor between two answers to agents."""

    async def work(self) -> None:
        """Run one worker until the queue is closed."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                key = await self.queue.get()
            except ClosedError:
                return
            started, error = loop.time(), ""
            self._started[key] = started
            slow_timer = loop.call_later(SLOW_SECONDS, self.queue.mark_slow, key)
            try:
                async with asyncio.timeout(JOB_SECONDS) as budget:
                    await self._reconcile(key)
            except TimeoutError:
                if not budget.expired():
                    raise
                error = "Timeout"
                logger.warning(
                    "%s/%s: not finished within %.0f s; a new plan follows",
                    *key,
                    JOB_SECONDS,
                    extra=self._log_fields(key),
                )
                self.queue.put_after(key, TIMEOUT_RETRY_SECONDS)
            except ApiError as failure:
                error = type(failure).__name__
                self._handle_api_error(key, failure)
            except Exception:
                error = "Defect"
                logger.exception("reconciling %s/%s failed", *key, extra=self._log_fields(key))
                self.queue.retry(key)
            finally:
                del self._started[key]
                slow_timer.cancel()
                if not error and loop.time() - started < SLOW_SECONDS:
                    self.queue.mark_fast(key)
                self.queue.mark_done(key)
                self.on_reconciled(loop.time() - started, error)

    def measure_busy_seconds(self) -> float:
        """Return how long the longest reconcile in progress has taken."""
        return asyncio.get_running_loop().time() - min(self._started.values()) if self._started else 0.0

    async def resync(self, seconds: float) -> None:
        """Enqueue every job once per period, spread over it, and list the jobs; runs until cancelled."""
        while True:
            await asyncio.sleep(seconds * random.uniform(0.8, 1.2))  # noqa: S311 - spreads load, no secret
            try:
                await self.caches.jobs.refresh()
            except ApiError as error:
                logger.warning("listing the jobs: %s", error)
            for key in self.caches.jobs.store.snapshot():
                self.queue.put_after(key, random.uniform(0.0, min(10.0, seconds)))  # noqa: S311

    async def _reconcile(self, key: Key) -> None:
        record = self.caches.jobs.store.get(key)
        if record is None or record.managed_elsewhere:  # deleted, or managed elsewhere
            self.queue.forget(key)
            self.rate_limiter.forget(key)
            self._written.pop(key, None)
            self._reported_unknown.pop(key, None)
            self.queue.mark_fast(key)
            return
        if not self.caches.namespaces.is_synced(key[0]):
            self.queue.forget(key)  # a job missing from a failed list is not gone; once listed, jobs are planned again
            return
        if server := self.find_server(key[0]):
            self._leave_to(key, record, server)
            return
        if record.view is None:
            message = f"this operator cannot read the job ({record.error}); apply it again with the installed CRD"
            logger.warning("%s/%s: %s", *key, message, extra=self._log_fields(key))
            self._record_warning(record, Reason.UNREADABLE, message)
            self.queue.put_after(key, UNREADABLE_SECONDS)
            return
        self._report_unknown(key, record, record.view.unknown)
        await self.warnings.refresh(record.view)
        loop = asyncio.get_running_loop()
        async with self._planning:
            started = loop.time()
            job = self.caches.apply_refused_status(record.view)
            observed = self.observer.observe(job, status_written=self._written.get(key, 0.0))
            observe_seconds = loop.time() - started
            await asyncio.sleep(0)  # here and below: with a thousand agents each part takes long; answer them between
            started = loop.time()
            plan = self.plan(observed)
            self.rate_limiter.record_plan(key, observe_seconds + loop.time() - started, loop.time())
            await asyncio.sleep(0)
        if plan.status != job.status:
            self._written[key] = observed.now
        await self.executor.execute(record.view, plan)
        self.queue.forget(key)
        if not self._exists(key, record):
            return
        self.on_planned(job, plan.status)
        delays = (
            plan.requeue_after,
            self.warnings.get_refresh_delay(job),
            self.statuses.get_retry_delay(job),
        )
        if (delay := min((seconds for seconds in delays if seconds is not None), default=None)) is not None:
            self.queue.put_after(key, max(0.01, delay))

    def _leave_to(self, key: Key, record: JobRecord, server: str) -> None:
        """Leave the job to the other release that serves it; it is enqueued when that release is gone."""
        self.queue.forget(key)
        self.queue.mark_fast(key)
        self._written.pop(key, None)
        message = (
            f"release {server} of the operator serves namespace {key[0]}, and release {self.release} does not: "
            "uninstall one of the two, or set watchNamespaces so that each namespace is served by one"
        )
        self._record_warning(record, Reason.SERVED_ELSEWHERE, message)

    def _exists(self, key: Key, record: JobRecord) -> bool:
        """Return whether the job still exists; otherwise its state here would never be dropped."""
        current = self.caches.jobs.store.get(key)
        return current is not None and current.uid == record.uid

    def _log_fields(self, key: Key) -> dict[str, object]:
        """Return the fields of a log line about this job, as far as they are known."""
        record = self.caches.jobs.store.get(key)
        view = record.view if record is not None else None
        generation = view.status.membership.generation if view is not None else None
        return {"namespace": key[0], "job": key[1], "generation": generation or None}

    def _handle_api_error(self, key: Key, error: ApiError) -> None:
        delay = self.queue.retry(key)
        logger.warning("%s/%s: %s; again in %.1f s", *key, error, delay, extra=self._log_fields(key))
        # A conflict is the normal response to an old copy, a starting API server refuses everybody for a
        # moment, and one that is away stores no events either: only a lasting failure is reported.
        record = self.caches.jobs.store.get(key)
        if record is None or delay < REPORT_FROM_DELAY or isinstance(error, UnavailableError):
            return
        self.recorder.record(record.id, write_failed_event(str(error)))

    def _report_unknown(self, key: Key, record: JobRecord, unknown: tuple[str, ...]) -> None:
        """Report each set of unknown places once."""
        if self._reported_unknown.get(key, ()) == unknown:
            return
        self._reported_unknown[key] = unknown
        if unknown:
            places = ", ".join(unknown[:5])
            text = f"this operator is older than the job: it does not know {places}, and keeps running pods unchanged"
            logger.warning("%s/%s: %s", *key, text, extra=self._log_fields(key))
            self._record_warning(record, Reason.UNREADABLE, text)

    def _record_warning(self, record: JobRecord, reason: Reason, text: str) -> None:
        self.recorder.record(record.id, Event(reason=reason, note=text, warning=True))
