"""Build the pages of `ui` with the rights of the user who started it.

Invariants: a job is read at most every `PAGE_CACHE_SECONDS`, however many tabs are open. Workers are queried in the
background, at most every `WORKER_QUERY_SECONDS`: for the checkpoints, and once for the curve, whose later points are
from the status.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_client.api import Api
from trainium_client.commands.inspect import list_stored_checkpoints
from trainium_client.commands.report import read_run_curve
from trainium_client.read import JobSnapshot, read_job_snapshot
from trainium_contract.api_server.errors import ClientError
from trainium_contract.pages.job_page import JobReport, render_live_job
from trainium_contract.pages.jobs_page import build_job_row, render_live_jobs
from trainium_contract.views.curve import LiveCurve
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.status_reader import read_public_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.views.checkpoints import CheckpointRow

PAGE_CACHE_SECONDS = 2.0
WORKER_QUERY_SECONDS = 60.0
CREDENTIAL_SECONDS = 600.0
"""Interval at which the kubeconfig is read again, because tokens of cloud providers last for a quarter of an hour."""
CACHE_SIZE = 100
"""Limit of cached pages, and of cached results from workers."""


@dataclass(slots=True)
class _WorkerResults:
    """Results from within a job's workers; written by one thread at a time."""

    curve: LiveCurve | None = None
    checkpoints: tuple[CheckpointRow, ...] | None = None
    notes: tuple[str, ...] = ("loss curve and checkpoints: they are being read",)
    queried_at: float = float("-inf")
    is_querying: bool = False


@dataclass(slots=True)
class _Page:
    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")
    text: str = ""


class LocalPages:
    """Pages by namespace and name, for several threads; `open_api` connects as the user."""

    def __init__(
        self, open_api: Callable[[], Api], root: str, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`root`: the path below which pages link to each other."""
        self._open_api = open_api
        self._root = root
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._api: Api | None = None
        self._opened = 0.0
        self._pages: dict[tuple[str, str], _Page] = {}
        self._results: dict[str, _WorkerResults] = {}
        """By uid."""

    def render_jobs(self, namespace: str) -> str:
        """Render the list of jobs of a namespace; of all if empty. Raises ClientError."""
        return self._render_cached((namespace, ""), lambda: self._render_jobs(namespace))

    def render_job(self, namespace: str, name: str) -> str:
        """Render the page of a job. Raises ClientError."""
        return self._render_cached((namespace, name), lambda: self._render_job(namespace, name))

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            if self._api is not None:
                self._api.connection.close()

    def _render_cached(self, key: tuple[str, str], make: Callable[[], str]) -> str:
        with self._lock:
            if len(self._pages) >= CACHE_SIZE and key not in self._pages:
                self._pages.clear()
            page = self._pages.setdefault(key, _Page())
        with page.lock:
            if self._monotonic() - page.at >= PAGE_CACHE_SECONDS:
                page.text = make()
                page.at = self._monotonic()
            return page.text

    def _connect(self, namespace: str) -> Api:
        with self._lock:
            now = self._monotonic()
            if self._api is None or now - self._opened >= CREDENTIAL_SECONDS:
                if self._api is not None:
                    self._api.connection.close()  # connections in use continue
                self._api, self._opened = self._open_api(), now
            return Api(self._api.connection, namespace)

    def _render_jobs(self, namespace: str) -> str:
        api = self._connect(namespace)
        rows = [build_job_row(job) for job in (api.list_jobs() if namespace else api.list_all_jobs())]
        where = f"namespace {namespace}" if namespace else "all namespaces"
        return render_live_jobs(rows, time.time(), where=where, root=self._root)

    def _render_job(self, namespace: str, name: str) -> str:
        now, api = time.time(), self._connect(namespace)
        snapshot = read_job_snapshot(api, name, now)
        results = self._get_worker_results(api, snapshot)
        if results.curve is not None:
            results.curve.add_current(snapshot.view)
        report = JobReport(
            snapshot.view,
            read_interruptions(read_public_status(snapshot.job)),
            snapshot.members,
            results.checkpoints,
            results.curve.points if results.curve is not None else (),
            results.notes,
            snapshot.pods,
        )
        return render_live_job(report, now, jobs=f"{self._root}/{namespace}")

    def _get_worker_results(self, api: Api, snapshot: JobSnapshot) -> _WorkerResults:
        with self._lock:
            if len(self._results) >= CACHE_SIZE and snapshot.view.uid not in self._results:
                self._results.clear()
            results = self._results.setdefault(snapshot.view.uid, _WorkerResults())
            if not results.is_querying and self._monotonic() - results.queried_at >= WORKER_QUERY_SECONDS:
                results.is_querying, results.queried_at = True, self._monotonic()
                threading.Thread(target=_read_worker_results, args=(api, snapshot, results), daemon=True).start()
        return results


def _read_worker_results(api: Api, snapshot: JobSnapshot, results: _WorkerResults) -> None:
    notes: list[str] = []
    try:
        if results.curve is None:
            points, curve_note = read_run_curve(api, snapshot)
            results.curve = LiveCurve(points=points) if points else None
            notes += [curve_note] if curve_note else []
        rows, checkpoint_note = list_stored_checkpoints(api, snapshot.job, verify=False)
        if rows is None:
            notes.append(f"checkpoints on storage: {checkpoint_note}")
        else:
            results.checkpoints = rows
    except ClientError as error:
        notes.append(f"data from workers: {error}")
    finally:
        results.notes, results.is_querying = tuple(notes), False
