"""Build the pages of `ui` with the rights of the user who started it.

Invariants: a job is read at most every `FRESH_SECONDS`, however many tabs are open. Results from inside workers arrive
after the page, and rarely: the curve once, then a point at each reading, checkpoints every `STORAGE_SECONDS`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_client.api import Api
from trainium_client.commands.inspect import list_stored_checkpoints
from trainium_client.commands.report import read_curve_of
from trainium_client.read import JobSnapshot, read_job_snapshot
from trainium_contract.api_server.errors import ClientError
from trainium_contract.pages.job_page import JobReport, live_job_html
from trainium_contract.pages.jobs_page import job_row, live_jobs_html
from trainium_contract.views.curve import LiveCurve
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.status_reader import public_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.views.checkpoints import CheckpointRow

FRESH_SECONDS = 2.0
STORAGE_SECONDS = 60.0
LOGIN_SECONDS = 600.0
"""Interval at which the kubeconfig is read again, because tokens of cloud providers last for a quarter of an hour."""
REMEMBERED = 100
"""Most cached pages and results from workers."""


@dataclass(slots=True)
class _WorkerResults:
    """Results from within a job's workers; written by one thread at a time."""

    curve: LiveCurve | None = None
    checkpoints: tuple[CheckpointRow, ...] | None = None
    notes: tuple[str, ...] = ("loss curve and checkpoints: they are being read",)
    asked: float = float("-inf")
    busy: bool = False


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

    def jobs(self, namespace: str) -> str:
        """Render the list of jobs of a namespace; of all if empty. Raises ClientError."""
        return self._cached_page((namespace, ""), lambda: self._jobs(namespace))

    def job(self, namespace: str, name: str) -> str:
        """Render the page of a job. Raises ClientError."""
        return self._cached_page((namespace, name), lambda: self._job(namespace, name))

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            if self._api is not None:
                self._api.connection.close()

    def _cached_page(self, key: tuple[str, str], make: Callable[[], str]) -> str:
        with self._lock:
            if len(self._pages) >= REMEMBERED and key not in self._pages:
                self._pages.clear()
            page = self._pages.setdefault(key, _Page())
        with page.lock:
            if self._monotonic() - page.at >= FRESH_SECONDS:
                page.text = make()
                page.at = self._monotonic()
            return page.text

    def _api_for(self, namespace: str) -> Api:
        with self._lock:
            now = self._monotonic()
            if self._api is None or now - self._opened >= LOGIN_SECONDS:
                if self._api is not None:
                    self._api.connection.close()  # connections in use continue
                self._api, self._opened = self._open_api(), now
            return Api(self._api.connection, namespace)

    def _jobs(self, namespace: str) -> str:
        api = self._api_for(namespace)
        rows = [job_row(job) for job in (api.jobs() if namespace else api.all_jobs())]
        where = f"namespace {namespace}" if namespace else "all namespaces"
        return live_jobs_html(rows, time.time(), where=where, root=self._root)

    def _job(self, namespace: str, name: str) -> str:
        now, api = time.time(), self._api_for(namespace)
        snapshot = read_job_snapshot(api, name, now)
        results = self._worker_results(api, snapshot)
        if results.curve is not None:
            results.curve.add(snapshot.view.step, snapshot.view.loss, snapshot.view.tokens_per_second)
        report = JobReport(
            snapshot.view,
            read_interruptions(public_status(snapshot.job)),
            snapshot.members,
            results.checkpoints,
            results.curve.points if results.curve is not None else (),
            results.notes,
            snapshot.pods,
        )
        return live_job_html(report, now, jobs=f"{self._root}/{namespace}")

    def _worker_results(self, api: Api, snapshot: JobSnapshot) -> _WorkerResults:
        with self._lock:
            if len(self._results) >= REMEMBERED and snapshot.view.uid not in self._results:
                self._results.clear()
            results = self._results.setdefault(snapshot.view.uid, _WorkerResults())
            if not results.busy and self._monotonic() - results.asked >= STORAGE_SECONDS:
                results.busy, results.asked = True, self._monotonic()
                threading.Thread(target=_read_worker_results, args=(api, snapshot, results), daemon=True).start()
        return results


def _read_worker_results(api: Api, snapshot: JobSnapshot, results: _WorkerResults) -> None:
    notes: list[str] = []
    try:
        if results.curve is None:
            points = read_curve_of(api, snapshot, None, notes)
            results.curve = LiveCurve(points=points) if points else None
        rows, why_not = list_stored_checkpoints(api, snapshot.job, verify=False)
        if rows is None:
            notes.append(f"checkpoints on storage: {why_not}")
        else:
            results.checkpoints = rows
    except ClientError as error:
        notes.append(f"inside of workers: {error}")
    finally:
        results.notes, results.busy = tuple(notes), False
