"""Provide the data of job pages from the caches, so that viewers cost the API server no list.

Invariants:
- This module does not authorize anybody.
- Only events are requested, of one job at most every `EVENTS_SECONDS` and one at a time, however many viewers there
  are.
- Curves are kept of jobs that this process saw training, at most `MAX_CURVES`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainium_contract.api_server.errors import ApiError, ForbiddenError
from trainium_contract.pages.formatting import format_utc
from trainium_contract.pages.job_page import JobReport
from trainium_contract.pages.jobs_page import JobRow
from trainium_contract.rfc3339 import format_rfc3339
from trainium_contract.views.curve import CurvePoint, LiveCurve
from trainium_contract.views.events import EventView, build_event_views
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.job import build_job_view
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workers import PodRow, build_members, count_workers
from trainium_contract.wire.worker_env import KIND
from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.api.resources import EVENTS
from trainium_operator.plan.model import names
from trainium_operator.plan.model.observed import PodPhase, PodView

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.status.public import PublicStatus
    from trainium_operator.cluster.api.client import Api
    from trainium_operator.cluster.cache.caches import Caches
    from trainium_operator.cluster.cache.views import JobRecord

SAMPLE_SECONDS = 5.0
"""About the interval at which progress is written."""
MAX_CURVES = 200
CURVE_POINTS = 400
EVENTS_SECONDS = 15.0
EVENTS_TIMEOUT_SECONDS = 3.0
MAX_EVENTS = 500
"""Events of a job are kept for an hour, and a job creates at most ten a minute."""
REMEMBERED_EVENTS = 64
_STATES = {PodPhase.SUCCEEDED: "Completed", PodPhase.FAILED: "Error"}


@dataclass(frozen=True, slots=True)
class _JobSnapshot:
    """The data of one job, immutable, because a thread renders the page."""

    record: JobRecord
    pods: tuple[PodView, ...] | None
    membership: Callable[[], dict[str, Any] | None] | None
    curve: tuple[CurvePoint, ...]
    watched_since: float


class JobPageData:
    """Provides the methods that `endpoints.pages` calls; `run` collects curves. `clock` in Unix seconds."""

    def __init__(self, api: Api, caches: Caches, clock: Callable[[], float]) -> None:
        self._api = api
        self._caches = caches
        self._clock = clock
        self._curves: OrderedDict[str, tuple[float, LiveCurve]] = OrderedDict()
        """By uid, with the time of the first sample."""
        self._events: BoundedDict[str, tuple[float, tuple[EventView, ...] | str]] = BoundedDict(REMEMBERED_EVENTS)
        self._last_failure = (float("-inf"), "")
        """When the API server last failed to answer; no further request waits for a while."""
        self._events_lock = asyncio.Lock()

    async def run(self) -> None:
        """Sample the progress of all jobs periodically, until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self) -> None:
        """Add the current progress of every job to its curve."""
        records = self._caches.jobs.store.snapshot().values()
        for uid in self._curves.keys() - {record.uid for record in records}:
            del self._curves[uid]
        for record in records:
            view = record.view.view
            if view is None or view.status.progress.loss is None:
                continue
            progress = view.status.progress
            _, curve = self._curves.setdefault(record.uid, (self._clock(), LiveCurve(CURVE_POINTS)))
            if not view.status.completion_time:
                self._curves.move_to_end(record.uid)
            curve.add_current(progress)
        while len(self._curves) > MAX_CURVES:
            self._curves.popitem(last=False)

    def list_rows(self, namespace: str) -> list[JobRow]:
        """Return the jobs of a namespace; of all if it is empty."""
        entries = self._caches.jobs.store.snapshot().items()
        return [
            _build_row(self._apply_refused_status(entry.view)) for key, entry in entries if namespace in ("", key[0])
        ]

    def prepare_report(
        self, namespace: str, name: str, *, pods: bool, members: bool
    ) -> Callable[..., JobReport] | None:
        """Return a function that creates the report of a job in any thread; None without such a job.

        `pods`, `members`: whether the report includes them.
        """
        record = self._caches.jobs.store.get((namespace, name))
        if record is None:
            return None
        owned = self._caches.pods.store.list_owned_by(record.id).values() if pods else None
        since, curve = self._curves.get(record.uid, (0.0, LiveCurve(CURVE_POINTS)))
        snapshot = _JobSnapshot(
            self._apply_refused_status(record),
            tuple(sorted(owned, key=lambda pod: pod.ordinal)) if owned is not None else None,
            self._defer_membership(record) if members else None,
            curve.points,
            since,
        )
        return partial(_build_report, snapshot)

    def _apply_refused_status(self, record: JobRecord) -> JobRecord:
        return record if record.view is None else replace(record, view=self._caches.apply_refused_status(record.view))

    def _defer_membership(self, record: JobRecord) -> Callable[[], dict[str, Any] | None]:
        """Return a function that decompresses the record, because a large one takes a while."""
        key = (record.namespace, names.format_membership_name(record.name))
        child = self._caches.config_maps.store.list_owned_by(record.id).get(key)

        def read() -> dict[str, Any] | None:
            membership = child.membership if child is not None else None
            return membership.to_wire() if membership is not None else None

        return read

    async def list_events(self, namespace: str, name: str) -> tuple[EventView, ...] | str:
        """Return events about a job, the newest first, or the reason why they are not known."""
        record = self._caches.jobs.store.get((namespace, name))
        if record is None:
            return ()
        async with self._events_lock:
            cached = self._events.get(record.uid)
            if self._clock() - self._last_failure[0] < EVENTS_SECONDS:
                return self._last_failure[1]
            if cached is None or self._clock() - cached[0] >= EVENTS_SECONDS:
                events = await self._request_events(namespace, name, record.uid)
                cached = self._events[record.uid] = (self._clock(), events)
        return cached[1]

    async def _request_events(self, namespace: str, name: str, uid: str) -> tuple[EventView, ...] | str:
        fields = f"involvedObject.kind={KIND},involvedObject.name={name}"
        try:
            async with asyncio.timeout(EVENTS_TIMEOUT_SECONDS):
                page = await self._api.list_page(EVENTS, namespace, fields=fields, limit=MAX_EVENTS)
        except (ApiError, TimeoutError) as error:
            forbidden = isinstance(error, ForbiddenError)
            why = "the operator may not list them (docs/install.md, rights)" if forbidden else "no answer"
            if not forbidden:
                self._last_failure = (self._clock(), why)
            return why
        return build_event_views(page.get("items") or (), uid=uid)


def _build_report(
    snapshot: _JobSnapshot, *, now: float, events: tuple[EventView, ...], notes: tuple[str, ...]
) -> JobReport:
    job = _rebuild_job(snapshot.record)
    record = snapshot.membership() if snapshot.membership is not None else None
    members = build_members(record) if record is not None else None
    pods = tuple(map(_build_pod_row, snapshot.pods)) if snapshot.pods is not None else ()
    workers = count_workers(pods, members) if snapshot.pods is not None else None
    if snapshot.record.error:
        notes = (*notes, f"the job cannot be read: {snapshot.record.error}")
    return JobReport(
        view=build_job_view(job, now=now, workers=workers, events=events),
        entries=read_interruptions(read_public_status(job)),
        members=members,
        checkpoints=None,
        curve=snapshot.curve,
        notes=notes,
        pods=pods,
        curve_note=f"as this operator has seen it since {format_utc(snapshot.watched_since)} UTC",
    )


def _rebuild_job(record: JobRecord) -> dict[str, Any]:
    """Return the job as the API server stores it, as far as it is cached."""
    metadata: dict[str, Any] = {"namespace": record.namespace, "name": record.name, "uid": record.uid}
    view = record.view
    if view is None:
        spec = {"managedBy": record.managed_elsewhere} if record.managed_elsewhere else {}
        return {"metadata": metadata, "spec": spec}
    metadata |= {"creationTimestamp": format_rfc3339(view.created), "generation": view.generation}
    return {"metadata": metadata, "spec": view.spec.to_wire(), "status": view.status.to_wire()}


def _build_pod_row(pod: PodView) -> PodRow:
    """Return the pod with its state as kubectl shows it."""
    state = "Terminating" if pod.deleting else pod.reason or _STATES.get(pod.phase, pod.phase.value)
    return PodRow(pod.name, state, pod.node, pod.created or None)


def _build_row(record: JobRecord) -> JobRow:
    view = record.view
    if view is None:
        note = f"{record.managed_elsewhere} controls it" if record.managed_elsewhere else record.error
        return JobRow(record.namespace, record.name, note=note)
    status: PublicStatus = view.status
    return JobRow(
        namespace=record.namespace,
        name=record.name,
        phase=status.phase.value,
        step=status.progress.step,
        total_steps=status.progress.total_steps,
        loss=status.progress.loss,
        training=status.ready_replicas,
        desired=status.desired,
        goodput=status.goodput.ratio if status.goodput.wall_seconds else None,
        restarts=status.restarts.total,
        note=status.verdict,
    )
