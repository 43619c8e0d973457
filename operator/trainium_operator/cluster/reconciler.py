"""The workers: take a job's key, observe, plan, execute, and requeue.

Guarantees:
- The key means only that something may have changed; everything else is read from the caches.
- A failed write is repeated with back-off and shows as an event on the job. A defect in a plan is logged, counted and
  repeated with back-off, and never stops the worker.
- No job occupies a worker for longer than `JOB_SECONDS`, and slow jobs share a part of the workers, so a job behind a
  failing webhook delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.errors import ApiError, UnavailableError
from trainium_operator.cluster.execute.events import EventRecorder, Note, reference_to, write_failed
from trainium_operator.cluster.queue.work_queue import ClosedError, WorkQueue
from trainium_operator.plan.model.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.job import TrainingJobStatus
    from trainium_operator.cluster.cache.store import Key
    from trainium_operator.cluster.cache.views import JobRecord
    from trainium_operator.cluster.execute.executor import Executor
    from trainium_operator.cluster.queue.observe import Caches, Observer
    from trainium_operator.cluster.queue.pace import Pace
    from trainium_operator.cluster.queue.pod_warnings import PodWarnings
    from trainium_operator.plan.model.actions import Plan
    from trainium_operator.plan.model.observed import JobView, Observed

logger = logging.getLogger(__name__)

UNREADABLE_SECONDS = 300.0
JOB_SECONDS = 60.0
"""A reconcile that takes longer is cut and planned again; every write may be repeated."""
CUT_PAUSE = 1.0
SLOW_SECONDS = 2.0
REPORT_FROM_DELAY = 0.8
"""Back-off in seconds from which on a failure that repeats shows as an event."""


@dataclass(kw_only=True, eq=False)
class Reconciler:
    """Runs plans for the keys of a queue."""

    queue: WorkQueue[Key]
    caches: Caches
    observer: Observer
    plan: Callable[[Observed], Plan]
    executor: Executor
    recorder: EventRecorder
    pace: Pace
    warnings: PodWarnings
    on_reconciled: Callable[[float, str], None]
    """Called with seconds and error at the end of each reconcile; the error is empty, or its class."""
    on_planned: Callable[[JobView, TrainingJobStatus], None]
    """Called after each executed plan with the job, whose status is the old one, and the new status."""
    _written: dict[Key, float] = field(default_factory=dict, init=False)
    """When this process last wrote a job's status, by the clock of plans."""
    _started: dict[Key, float] = field(default_factory=dict, init=False)
    _unknown: dict[Key, tuple[str, ...]] = field(default_factory=dict, init=False)
    """Unknown places of each job's spec that were reported."""
    _planning: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """One at a time: what takes the processor must not come in many pieces between two answers to agents."""

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
            slow = loop.call_later(SLOW_SECONDS, self.queue.slow, key)
            try:
                async with asyncio.timeout(JOB_SECONDS) as budget:
                    await self._reconcile(key)
            except TimeoutError:
                if not budget.expired():
                    raise
                error = "Timeout"
                logger.warning(
                    "%s/%s: not done within %.0f s; it goes on with a new plan",
                    *key,
                    JOB_SECONDS,
                    extra=self._about(key),
                )
                self.queue.put_after(key, CUT_PAUSE)
            except ApiError as failure:
                error = type(failure).__name__
                self._failed(key, failure)
            except Exception:
                error = "Defect"
                logger.exception("reconciling %s/%s failed", *key, extra=self._about(key))
                self.queue.retry(key)
            finally:
                del self._started[key]
                slow.cancel()
                if not error and loop.time() - started < SLOW_SECONDS:
                    self.queue.quick(key)
                self.queue.done(key)
                self.on_reconciled(loop.time() - started, error)

    def busy_seconds(self) -> float:
        """Return how long the longest reconcile in hand has taken so far."""
        return asyncio.get_running_loop().time() - min(self._started.values()) if self._started else 0.0

    async def resync(self, seconds: float) -> None:
        """Put every job once per period, spread over it, and list the jobs authoritatively; runs until cancelled."""
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
        if record is None or record.elsewhere:  # deleted: what it owned is the garbage collector's; or not ours
            self.queue.forget(key)
            self.pace.forget(key)
            self._written.pop(key, None)
            self._unknown.pop(key, None)
            self.queue.quick(key)
            return
        if not self.caches.namespaces.is_open(key[0]):
            self.queue.forget(key)  # what is not listed is not gone; when it is, the jobs are planned again
            return
        if record.view is None:
            sentence = f"this operator cannot read the job ({record.error}); apply it again with the installed CRD"
            logger.warning("%s/%s: %s", *key, sentence, extra=self._about(key))
            self._notify_listeners(record, Reason.UNREADABLE, sentence)
            self.queue.put_after(key, UNREADABLE_SECONDS)
            return
        self._report_unknown(key, record, record.view.unknown)
        await self.warnings.refresh(record.view)
        loop = asyncio.get_running_loop()
        async with self._planning:
            began = loop.time()
            observed = self.observer.observe(record.view, status_written=self._written.get(key, 0.0))
            spent = loop.time() - began
            await asyncio.sleep(0)  # here and below: a thousand agents make each part long, and they wait for answers
            began = loop.time()
            plan = self.plan(observed)
            self.pace.planned(key, spent + loop.time() - began, loop.time())
            await asyncio.sleep(0)
        if plan.status != record.view.status:
            self._written[key] = observed.now
        await self.executor.execute(record.view, plan)
        self.queue.forget(key)
        if not self._exists(key, record):
            return
        self.on_planned(record.view, plan.status)
        pauses = (plan.requeue_after, self.warnings.next_in(record.view))
        if (pause := min((each for each in pauses if each is not None), default=None)) is not None:
            self.queue.put_after(key, max(0.01, pause))

    def _exists(self, key: Key, record: JobRecord) -> bool:
        """Return whether the job was not deleted meanwhile: what is kept of it would never be forgotten."""
        now = self.caches.jobs.store.get(key)
        return now is not None and now.uid == record.uid

    def _about(self, key: Key) -> dict[str, object]:
        """Return the fields of a log line about this job, as far as they are known."""
        record = self.caches.jobs.store.get(key)
        view = record.view if record is not None else None
        generation = view.status.membership.generation if view is not None else None
        return {"namespace": key[0], "job": key[1], "generation": generation or None}

    def _failed(self, key: Key, error: ApiError) -> None:
        delay = self.queue.retry(key)
        logger.warning("%s/%s: %s; again in %.1f s", *key, error, delay, extra=self._about(key))
        # A conflict is the normal answer to an old copy, an API server that has just started refuses everybody for a
        # moment, and one that is away stores no events either: only a lasting failure is reported.
        record = self.caches.jobs.store.get(key)
        if record is None or delay < REPORT_FROM_DELAY or isinstance(error, UnavailableError):
            return
        self.recorder.record(write_failed(record, str(error)))

    def _report_unknown(self, key: Key, record: JobRecord, unknown: tuple[str, ...]) -> None:
        """Report each set of places that were left out once."""
        if self._unknown.get(key, ()) == unknown:
            return
        self._unknown[key] = unknown
        if unknown:
            places = ", ".join(unknown[:5])
            text = (
                f"this operator is older than the job: it does not know {places}, and goes on with what runs as it is"
            )
            logger.warning("%s/%s: %s", *key, text, extra=self._about(key))
            self._notify_listeners(record, Reason.UNREADABLE, text)

    def _notify_listeners(self, record: JobRecord, reason: Reason, text: str) -> None:
        self.recorder.record(
            Note(
                namespace=record.namespace,
                regarding=reference_to(record.namespace, record.name, record.uid),
                reason=reason.value,
                text=text,
                warning=True,
            )
        )
