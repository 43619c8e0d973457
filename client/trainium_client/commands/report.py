"""`report`: a job as a page that can be sent to others."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_client.commands.inspect import on_storage
from trainium_client.commands.options import Format, JobName, Session, notify
from trainium_client.pod_exec import read_curve_in_pod
from trainium_client.read import Screen, read_screen
from trainium_contract.api_server.errors import ClientError
from trainium_contract.pages.formatting import size
from trainium_contract.pages.job_page import JobReport, report_html
from trainium_contract.views.checkpoints import checkpoint_root, metrics_path, where_kept
from trainium_contract.views.curve import CurvePoint, read_curve
from trainium_contract.views.interruptions import interruptions
from trainium_contract.views.status_reader import public_status

if TYPE_CHECKING:
    from trainium_client.api import Api


def report(
    session: Session,
    name: JobName,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File; default: NAME.html. json: the same for programs, on standard output."
        ),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option("--metrics", help="metrics.jsonl of the run; default: read in the worker of rank 0.")
    ] = None,
) -> None:
    """One self-contained page: loss, interruptions, where the time went, workers, checkpoints, artifacts."""
    api, now = session.open(), time.time()
    screen = read_screen(api, name, now)
    notes: list[str] = []
    curve = read_curve_of(api, screen, metrics, notes)
    rows, why_not = on_storage(api, screen.job, verify=False)
    if rows is None:
        notes.append(f"checkpoints on storage: {why_not}")
    entries = interruptions(public_status(screen.job))
    found = JobReport(screen.view, entries, screen.members, rows, curve, tuple(notes), screen.pods)
    if output == Path(Format.JSON):
        replace(session, output=Format.JSON).emit(found, lambda *_: None)
        return
    page = report_html(found, now)
    path = output or Path(f"{name}.html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror or error}") from error
    notify(f"{path}: {size(len(page.encode()))}" + "".join(f"\nnot in it: {each}" for each in notes))


def read_curve_of(api: Api, screen: Screen, metrics: Path | None, notes: list[str]) -> tuple[CurvePoint, ...]:
    """Read the curve from a file, or from the worker of rank 0; a reason for none goes to the notes."""
    if metrics is not None:
        try:
            with metrics.open(encoding="utf-8", errors="replace") as lines:
                return read_curve(lines)
        except OSError as error:
            raise ClientError(f"cannot read {metrics}: {error.strerror or error}") from error
    if not checkpoint_root(screen.job):
        notes.append("loss curve: it is looked for in spec.program.checkpoints.path; set that, or give --metrics FILE")
        return ()
    if screen.view.ended or screen.members is None or not screen.members.rows:
        place = where_kept(screen.job, "metrics.jsonl")
        notes.append(
            f"loss curve: no worker runs that could read it; give --metrics FILE with {place}"
            if place
            else "loss curve: no worker runs that could read it, and it went with the pods: the job has no storage"
        )
        return ()
    try:
        return read_curve_in_pod(api, screen.members.rows[0].pod, metrics_path(screen.job))
    except ClientError as error:
        notes.append(f"loss curve: {error}; give --metrics FILE")
        return ()
