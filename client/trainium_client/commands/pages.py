"""Build the pages of `ui` with the rights of the user that started it.

Invariants: however many tabs look, a job is read at most every `FRESH_SECONDS`; what is read inside of workers comes
later than the page, and seldom: the curve once, then a point for each look, checkpoints every `STORAGE_SECONDS`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_client.api import Api
from trainium_client.commands.inspect import on_storage
from trainium_client.commands.report import read_curve_of
from trainium_client.read import Screen, read_screen
from trainium_contract.api_server.errors import ClientError
from trainium_contract.pages.job_page import JobReport, live_job_html
from trainium_contract.pages.jobs_page import job_row, live_jobs_html
from trainium_contract.views.curve import LiveCurve
from trainium_contract.views.interruptions import interruptions
from trainium_contract.views.status_reader import public_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.views.checkpoints import CheckpointRow

FRESH_SECONDS = 2.0
STORAGE_SECONDS = 60.0
LOGIN_SECONDS = 600.0
"""The kubeconfig is read again this often: tokens of cloud providers last for a quarter of an hour."""
REMEMBERED = 100
"""Pages, and jobs that were looked into."""


@dataclass(slots=True)
class _Inside:
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
    """Pages by namespace and name, for several threads; `open_api` connects as the person."""

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
        self._inside: dict[str, _Inside] = {}
        """By uid."""

    def jobs(self, namespace: str) -> str:
        """Render the list of jobs of a namespace; empty: of all. Raises ClientError."""
        return self._page((namespace, ""), lambda: self._jobs(namespace))

    def job(self, namespace: str, name: str) -> str:
        """Render the page of a job. Raises ClientError."""
        return self._page((namespace, name), lambda: self._job(namespace, name))

    def close(self) -> None:
        """Close what is idle."""
        with self._lock:
            if self._api is not None:
                self._api.connection.close()

    def _page(self, key: tuple[str, str], make: Callable[[], str]) -> str:
        with self._lock:
            if len(self._pages) >= REMEMBERED and key not in self._pages:
                self._pages.clear()
            page = self._pages.setdefault(key, _Page())
        with page.lock:
            if self._monotonic() - page.at >= FRESH_SECONDS:
                page.text = make()
                page.at = self._monotonic()
            return page.text

    def _connected(self, namespace: str) -> Api:
        with self._lock:
            now = self._monotonic()
            if self._api is None or now - self._opened >= LOGIN_SECONDS:
                if self._api is not None:
                    self._api.connection.close()  # what is in use goes on
                self._api, self._opened = self._open_api(), now
            return Api(self._api.connection, namespace)

    def _jobs(self, namespace: str) -> str:
        api = self._connected(namespace)
        rows = [job_row(each) for each in (api.jobs() if namespace else api.all_jobs())]
        where = f"namespace {namespace}" if namespace else "all namespaces"
        return live_jobs_html(rows, time.time(), where=where, root=self._root)

    def _job(self, namespace: str, name: str) -> str:
        now, api = time.time(), self._connected(namespace)
        screen = read_screen(api, name, now)
        inside = self._results_inside(api, screen)
        if inside.curve is not None:
            inside.curve.add(screen.view.step, screen.view.loss, screen.view.tokens_per_second)
        report = JobReport(
            screen.view,
            interruptions(public_status(screen.job)),
            screen.members,
            inside.checkpoints,
            inside.curve.points if inside.curve is not None else (),
            inside.notes,
            screen.pods,
        )
        return live_job_html(report, now, jobs=f"{self._root}/{namespace}")

    def _results_inside(self, api: Api, screen: Screen) -> _Inside:
        with self._lock:
            if len(self._inside) >= REMEMBERED and screen.view.uid not in self._inside:
                self._inside.clear()
            inside = self._inside.setdefault(screen.view.uid, _Inside())
            if not inside.busy and self._monotonic() - inside.asked >= STORAGE_SECONDS:
                inside.busy, inside.asked = True, self._monotonic()
                threading.Thread(target=_read_inside, args=(api, screen, inside), daemon=True).start()
        return inside


def _read_inside(api: Api, screen: Screen, inside: _Inside) -> None:
    notes: list[str] = []
    try:
        if inside.curve is None:
            points = read_curve_of(api, screen, None, notes)
            inside.curve = LiveCurve(points=points) if points else None
        rows, why_not = on_storage(api, screen.job, verify=False)
        if rows is None:
            notes.append(f"checkpoints on storage: {why_not}")
        else:
            inside.checkpoints = rows
    except ClientError as error:
        notes.append(f"inside of workers: {error}")
    finally:
        inside.notes, inside.busy = tuple(notes), False
