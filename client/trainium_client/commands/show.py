"""Show a job: status, why, history, goodput, sizes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from trainium_client.commands.options import JobName, Session
from trainium_client.read import read_interruption, read_screen
from trainium_contract.views.goodput import goodput_view
from trainium_contract.views.interruptions import interruptions
from trainium_contract.views.job import build_job_view, cost_view
from trainium_contract.views.status_reader import public_status


def status(session: Session, name: JobName) -> None:
    """One screen: phase, progress, size, workers, checkpoints, goodput, the last events, what to do."""

    def page(view: Any, now: float, width: int) -> Any:
        from trainium_client.render.status import status_page  # noqa: PLC0415 - JSON does not pay for rich

        return status_page(view, now=now, width=width)

    session.emit(read_screen(session.open(), name, time.time()).view, page)


def why(
    session: Session,
    name: JobName,
    entry: Annotated[
        int | None, typer.Option("--entry", min=1, help="Which interruption, as `history` numbers them.")
    ] = None,
) -> None:
    """Explain the last interruption, or why the job failed: worker, signs, answer, seconds, steps, log lines."""

    def page(report: Any, _now: float, _width: int) -> Any:
        from trainium_client.render.interruption import interruption_page  # noqa: PLC0415 - as above

        return interruption_page(report)

    session.emit(read_interruption(session.open(), name, time.time(), entry), page)


def history(session: Session, name: JobName) -> None:
    """List the last interruptions, oldest first."""
    session.emit(interruptions(public_status(session.open().job(name))), _table("history_page"))


def goodput(
    session: Session,
    name: JobName,
    price: Annotated[
        float | None, typer.Option("--price-per-node-hour", min=0.0, help="Also what it cost, in your currency.")
    ] = None,
) -> None:
    """Show where the time of a job went, and what that cost."""
    job, now = session.open().job(name), time.time()
    if price is None:
        view = goodput_view(public_status(job), now)
    else:
        whole = build_job_view(job, now=now)
        view = replace(whole.goodput, cost=cost_view(whole, price))
    session.emit(view, _table("goodput_page"))


def scaling(session: Session, name: JobName) -> None:
    """Compare the speed at each number of nodes that a job has trained on."""
    from trainium_client.views.sizes import scaling_rows  # noqa: PLC0415 - as in `sizes`

    session.emit(scaling_rows(session.open().job(name)), _table("scaling_page"))


def sizes(session: Session, name: JobName) -> None:
    """Compare numbers of nodes: how many of them train, passes of a step, share of full speed."""
    from trainium_client.views.sizes import size_rows  # noqa: PLC0415 - the others need no model of the whole job

    session.emit(size_rows(session.open().job(name)), _table("sizes_page"))


def _table(renderer: str) -> Any:
    """Return a page of `render.tables` by its name."""

    def page(value: Any, _now: float, width: int) -> Any:
        from trainium_client.render import tables  # noqa: PLC0415 - JSON does not pay for rich

        return getattr(tables, renderer)(value, width)

    return page
