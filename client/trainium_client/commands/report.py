"""`report`: write a job as a page for other people."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainium_client.commands.inspect import list_stored_checkpoints
from trainium_client.commands.options import Format, JobName, Session, notify
from trainium_client.pod_exec import read_curve_in_pod
from trainium_client.read import JobSnapshot, read_job_snapshot
from trainium_contract.api_server.errors import ClientError
from trainium_contract.pages.formatting import format_bytes
from trainium_contract.pages.job_page import JobReport, report_html
from trainium_contract.views.checkpoints import describe_location, get_metrics_path
from trainium_contract.views.curve import CurvePoint, read_curve
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.status_reader import read_public_status
from trainium_contract.views.workload import read_workload

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
    """Write one self-contained page: loss, interruptions, where the time went, workers, checkpoints, artifacts."""
    api, now = session.open(), time.time()
    snapshot = read_job_snapshot(api, name, now)
    curve, curve_note = read_run_curve(api, snapshot, metrics)
    rows, checkpoint_note = list_stored_checkpoints(api, snapshot.job, verify=False)
    notes = [curve_note] if curve_note else []
    if rows is None:
        notes.append(f"checkpoints on storage: {checkpoint_note}")
    entries = read_interruptions(read_public_status(snapshot.job))
    contents = JobReport(snapshot.view, entries, snapshot.members, rows, curve, tuple(notes), snapshot.pods)
    if output == Path(Format.JSON):
        replace(session, output=Format.JSON).print_result(contents, lambda *_: None)
        return
    page = report_html(contents, now)
    path = output or Path(f"{name}.html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror or error}") from error
    notify(f"{path}: {format_bytes(len(page.encode()))}" + "".join(f"\nnot in it: {note}" for note in notes))


def read_run_curve(api: Api, snapshot: JobSnapshot, metrics: Path | None = None) -> tuple[tuple[CurvePoint, ...], str]:
    """Read the curve from a file, or from the worker of rank 0; return it, and a reason if it cannot be read."""
    if metrics is not None:
        try:
            with metrics.open(encoding="utf-8", errors="replace") as lines:
                return read_curve(lines), ""
        except OSError as error:
            raise ClientError(f"cannot read {metrics}: {error.strerror or error}") from error
    if not read_workload(snapshot.job).checkpoint_root:
        return (), "loss curve: its folder is spec.program.checkpoints.path; set that, or give --metrics FILE"
    if snapshot.view.ended or snapshot.members is None or not snapshot.members.rows:
        location = describe_location(snapshot.job, "metrics.jsonl")
        if location:
            return (), f"loss curve: no worker runs that could read it; give --metrics FILE with {location}"
        return (), "loss curve: no worker runs that could read it, and it went with the pods: the job has no storage"
    try:
        return read_curve_in_pod(api, snapshot.members.rows[0].pod, get_metrics_path(snapshot.job)), ""
    except ClientError as error:
        return (), f"loss curve: {error}; give --metrics FILE"
