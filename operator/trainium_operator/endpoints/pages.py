"""Serve `/ui`: jobs as pages for a browser; each user sees what the API server lets them read.

Guarantees:
- A list needs the right to list TrainingJobs there, a page the right to get the job.
- Of pods, membership and events a page shows what its reader may list or get, and names what it leaves out.
- Nothing is changed.
- Readers with the same rights share a page, which is rendered at most every `FRESH_SECONDS`, one at a time and in a
  thread.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from trainium_contract.pages.job_page import JobReport, render_live_job
from trainium_contract.pages.jobs_page import JobRow, render_live_jobs, render_namespace_form
from trainium_contract.pages.live import HEADERS
from trainium_contract.wire.worker_env import GROUP, PLURAL
from trainium_operator.endpoints.access import ObjectAttributes, ResourceAttributes
from trainium_operator.http.errors import ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trainium_contract.views.events import EventView

    Admit = Callable[[web.Request, ResourceAttributes], Awaitable["Ask"]]
    Ask = Callable[[ResourceAttributes], Awaitable[bool]]

ROOT = "/ui"
FRESH_SECONDS = 2.0
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_PACKING = 1
"""gzip level: the fastest; a page of 1,000 workers shrinks to a tenth."""


class Jobs(Protocol):
    """The data of pages, before authorization (`cluster/job_pages.py`)."""

    def list_rows(self, namespace: str) -> list[JobRow]:
        """Return the jobs of a namespace; of all if it is empty."""
        ...

    def prepare_report(
        self, namespace: str, name: str, *, pods: bool, members: bool
    ) -> Callable[..., JobReport] | None:
        """Return a function that creates a report from `now`, `events` and `notes`; None without the job."""
        ...

    async def list_events(self, namespace: str, name: str) -> tuple[EventView, ...] | str:
        """Return events about a job, or why they are not known."""
        ...


@dataclass(frozen=True, slots=True)
class _RenderedPage:
    at: float
    packed: bytes


class Pages:
    """Handlers; `admit(request, attributes)` raises, or returns a check of the user's other rights.

    `clock` in Unix seconds.
    """

    def __init__(self, jobs: Jobs, admit: Admit, clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._admit = admit
        self._clock = clock
        self._created: dict[tuple[object, ...], _RenderedPage] = {}
        """Rendered pages, none older than `FRESH_SECONDS`."""
        self._render_lock = asyncio.Lock()

    def list_routes(self) -> list[web.RouteDef]:
        """Return the routes; GET only."""
        return [
            web.get(ROOT, self._serve_all),
            web.get(f"{ROOT}/{{namespace}}", self._serve_namespace),
            web.get(f"{ROOT}/{{namespace}}/{{name}}", self._serve_job),
        ]

    async def _serve_all(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("namespace"):
            return await self._list(request, _validate_name(request.query["namespace"]))
        try:
            return await self._list(request, "")
        except ForbiddenError as error:
            sentence = f"{error}. Name a namespace whose TrainingJobs you may list:"
            page = render_namespace_form(sentence, ROOT)
            return web.Response(status=403, text=page, content_type="text/html", headers=HEADERS)

    async def _serve_namespace(self, request: web.Request) -> web.StreamResponse:
        return await self._list(request, _validate_name(request.match_info["namespace"]))

    async def _list(self, request: web.Request, namespace: str) -> web.StreamResponse:
        await self._admit(request, ObjectAttributes(PLURAL, namespace, group=GROUP))
        where = f"namespace {namespace}" if namespace else "all namespaces"
        rows, now = self._jobs.list_rows(namespace), self._clock()
        return await self._answer(request, (namespace,), partial(render_live_jobs, rows, now, where=where, root=ROOT))

    async def _serve_job(self, request: web.Request) -> web.StreamResponse:
        namespace, name = (_validate_name(request.match_info[variable]) for variable in ("namespace", "name"))
        may = await self._admit(request, ObjectAttributes(PLURAL, namespace, name, group=GROUP))
        needs = {
            "workers": ObjectAttributes("pods", namespace),
            "who trains": ObjectAttributes("configmaps", namespace, f"{name}-membership"),
            "events": ObjectAttributes("events", namespace),
        }
        given = dict(zip(needs, await asyncio.gather(*(may(attributes) for attributes in needs.values())), strict=True))
        notes = [f"{part}: you may not {needs[part]}" for part, allowed in given.items() if not allowed]
        report = self._jobs.prepare_report(namespace, name, pods=given["workers"], members=given["who trains"])
        if report is None:
            raise web.HTTPNotFound(reason=f"there is no TrainingJob {name} in namespace {namespace}")
        events = await self._jobs.list_events(namespace, name) if given["events"] else ()
        if isinstance(events, str):
            notes, events = [*notes, f"events: {events}"], ()
        now, jobs = self._clock(), f"{ROOT}/{namespace}"

        def make() -> str:
            return render_live_job(report(now=now, events=events, notes=tuple(notes)), now, jobs=jobs)

        return await self._answer(request, (namespace, name, tuple(given.values())), make)

    async def _answer(
        self, request: web.Request, what: tuple[object, ...], make: Callable[[], str]
    ) -> web.StreamResponse:
        """Return the page; `what` identifies it and the parts that the user may see."""
        async with self._render_lock:
            now = self._clock()
            self._created = {key: made for key, made in self._created.items() if 0 <= now - made.at < FRESH_SECONDS}
            if what not in self._created:
                packed = await asyncio.to_thread(lambda: gzip.compress(make().encode(), _PACKING))
                self._created[what] = _RenderedPage(now, packed)
            body = self._created[what].packed
        headers = {**HEADERS, "Content-Type": "text/html; charset=utf-8", "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=body, headers={**headers, "Content-Encoding": "gzip"})
        return web.Response(body=gzip.decompress(body), headers=headers)


def _validate_name(name: str) -> str:
    """Return the name if Kubernetes allows it. Raises HTTPNotFound."""
    if not _NAME.fullmatch(name):
        raise web.HTTPNotFound(reason="there is no such page: /ui, /ui/NAMESPACE and /ui/NAMESPACE/NAME are there")
    return name
