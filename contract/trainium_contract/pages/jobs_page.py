"""Render the list of jobs, with a link to each."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import format_number, format_percent, format_utc
from trainium_contract.pages.html import Link, render_document, render_section, render_table
from trainium_contract.pages.live import LIVE_SCRIPT
from trainium_contract.views.goodput import build_goodput_view
from trainium_contract.views.raw import read_mapping, read_text
from trainium_contract.views.status_reader import read_public_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

MAX_JOBS = 1_000
"""On one page; those that have not ended come first."""
_ENDED = {"Completed", "Failed"}


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job in the list."""

    namespace: str
    name: str
    phase: str = ""
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    training: int = 0
    desired: int = 0
    goodput: float | None = None
    restarts: int = 0
    note: str = ""
    """Why nothing else is known about it."""

    @property
    def progress(self) -> str:
        """Return the newest step, and that of the end if it is known."""
        return f"{self.step} of {self.total_steps}" if self.total_steps else str(self.step or "-")


def build_job_row(job: Mapping[str, Any]) -> JobRow:
    """Return the row of a TrainingJob as the API server holds it."""
    metadata, status = read_mapping(job, "metadata"), read_public_status(job)
    progress = status.read_part("progress")
    return JobRow(
        namespace=read_text(metadata, "namespace"),
        name=read_text(metadata, "name"),
        phase=status.read_text("phase"),
        step=progress.read_integer("step"),
        total_steps=progress.read_integer("totalSteps"),
        loss=progress.read_number("loss"),
        training=status.read_integer("readyReplicas"),
        desired=status.read_integer("desired"),
        goodput=build_goodput_view(status, 0.0).ratio,
        restarts=status.read_part("restarts").read_integer("total"),
    )


def sort_rows(rows: Iterable[JobRow]) -> list[JobRow]:
    """Return rows by namespace and name, those of ended jobs last."""
    return sorted(rows, key=lambda row: (row.phase in _ENDED, row.namespace, row.name))


def render_live_jobs(rows: Sequence[JobRow], now: float, *, where: str, root: str) -> str:
    """Render the page for a server that sends `live.HEADERS`; jobs have their pages below `root`."""
    ordered = sort_rows(rows)
    head = ("Namespace", "Job", "Phase", "Step", "Loss", "Nodes", "Goodput", "Interrupted", "")
    cells = [
        (
            job.namespace,
            Link(job.name, f"{root}/{job.namespace}/{job.name}"),
            job.phase or "no status yet",
            job.progress,
            format_number(job.loss),
            f"{job.training} of {job.desired}",
            format_percent(job.goodput),
            str(job.restarts),
            job.note,
        )
        for job in ordered[:MAX_JOBS]
    ]
    omitted = len(ordered) - len(cells)
    title = f"TrainingJobs in {where}"
    sections = (
        render_section("title", f"<h1>{escape(title)}</h1>"),
        render_section("as-of", f"<p class=soft>as of {format_utc(now)} UTC</p>"),
        render_section("jobs", render_table(head, cells) if cells else "<p>There are none.</p>"),
        render_section("left", f"<p class=soft>… and {omitted} more: look at one namespace.</p>" if omitted else ""),
    )
    body = f"<p class=bad id=quiet hidden></p><main>{''.join(sections)}</main>"
    return render_document(title, body, script=LIVE_SCRIPT)


def render_namespace_form(sentence: str, root: str) -> str:
    """Render a form for one namespace, for users who may not list all jobs."""
    form = (
        f'<form action="{escape(root)}" method=get><label>Namespace <input name=namespace required '
        f'maxlength=63 pattern="[a-z0-9-]+"></label> <button>Show its jobs</button></form>'
    )
    return render_document("TrainingJobs", f"<h1>TrainingJobs</h1><p>{escape(sentence)}</p>{form}")
