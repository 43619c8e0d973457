"""Show a job: status, why, history, goodput, sizes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from trainium_client import render
from trainium_client.commands.options import JobName, OptionalJobName, Session
from trainium_client.read import read_interruption, read_job_snapshot
from trainium_contract.api_server.errors import ClientError
from trainium_contract.views.goodput import build_goodput_view
from trainium_contract.views.interruptions import read_interruptions
from trainium_contract.views.job import build_job_view, compute_cost
from trainium_contract.views.status_reader import read_public_status

AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="The jobs of all namespaces.")]


def list_(session: Session, all_namespaces: AllNamespaces = False) -> None:
    """List the jobs of a namespace: phase, step, loss, nodes, goodput, interruptions."""
    from trainium_contract.pages.jobs_page import build_job_row, sort_rows  # noqa: PLC0415 - the others need no list

    api = session.open()
    rows = sort_rows(build_job_row(job) for job in (api.list_all_jobs() if all_namespaces else api.list_jobs()))
    where = "all namespaces" if all_namespaces else f"namespace {api.namespace}"

    def page(value: Any, _now: float, width: int) -> Any:
        return render.tables.render_jobs(value, width, where=where, with_namespace=all_namespaces)

    session.print_result(rows, page)


def status(session: Session, name: OptionalJobName = None, all_namespaces: AllNamespaces = False) -> None:
    """Show one screen: phase, progress, size, workers, checkpoints, events, what to do. Without NAME: `list`."""
    if name is None:
        return list_(session, all_namespaces)
    if all_namespaces:
        raise ClientError(f"-A lists the jobs of all namespaces: leave out {name}, or give its namespace with -n")

    def page(view: Any, now: float, width: int) -> Any:
        from trainium_client.render.status import render_status  # noqa: PLC0415 - JSON does not pay for rich

        return render_status(view, now=now, width=width)

    return session.print_result(read_job_snapshot(session.open(), name, time.time()).view, page)


def why(
    session: Session,
    name: JobName,
    entry: Annotated[
        int | None, typer.Option("--entry", min=1, help="Which interruption, as `history` numbers them.")
    ] = None,
) -> None:
    """Explain the last interruption, or why the job failed: worker, signs, response, seconds, steps, log lines."""

    def page(report: Any, _now: float, _width: int) -> Any:
        from trainium_client.render.interruption import render_interruption  # noqa: PLC0415 - as above

        return render_interruption(report)

    session.print_result(read_interruption(session.open(), name, time.time(), entry), page)


def history(session: Session, name: JobName) -> None:
    """List the last interruptions, oldest first."""
    entries = read_interruptions(read_public_status(session.open().read_job(name)))
    session.print_result(entries, lambda value, _now, width: render.tables.render_history(value, width))


def goodput(
    session: Session,
    name: JobName,
    price: Annotated[
        float | None, typer.Option("--price-per-node-hour", min=0.0, help="Also what it cost, in your currency.")
    ] = None,
) -> None:
    """Show where the time of a job went, and what that cost."""
    job, now = session.open().read_job(name), time.time()
    if price is None:
        view = build_goodput_view(read_public_status(job), now)
    else:
        job_view = build_job_view(job, now=now)
        view = replace(job_view.goodput, cost=compute_cost(job_view, price))
    session.print_result(view, lambda value, _now, width: render.tables.render_goodput(value, width))


def scaling(session: Session, name: JobName) -> None:
    """Compare the speed at each number of nodes that a job has trained on."""
    from trainium_client.views.sizes import list_scaling_rows  # noqa: PLC0415 - as in `sizes`

    rows = list_scaling_rows(session.open().read_job(name))
    session.print_result(rows, lambda value, _now, width: render.tables.render_scaling(value, width))


def sizes(session: Session, name: JobName) -> None:
    """Compare numbers of nodes: how many of them train, passes of a step, share of full speed."""
    from trainium_client.views.sizes import list_size_rows  # noqa: PLC0415 - the others need no model of the whole job

    rows = list_size_rows(session.open().read_job(name))
    session.print_result(rows, lambda value, _now, width: render.tables.render_sizes(value, width))
