"""Commands that look at a job: status, why, history, goodput, sizes."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from trainium_client.commands.options import (
    Context,
    Format,
    JobName,
    Kubeconfig,
    Namespace,
    Output,
    emit,
    open_api,
)
from trainium_client.reading import read_screen, read_story
from trainium_contract.views.goodput import goodput_view
from trainium_contract.views.interruptions import interruptions
from trainium_contract.views.status_reader import public_status


def status(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Output = Format.TEXT,
) -> None:
    """One screen: phase, progress, size, workers, checkpoints, goodput, what happened last, what to do."""
    screen = read_screen(open_api(namespace, context, kubeconfig), name, time.time())
    emit(output, screen.view, _status_page)


def why(
    name: JobName,
    entry: Annotated[
        int | None, typer.Option("--entry", min=1, help="Which interruption, as `history` numbers them.")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Output = Format.TEXT,
) -> None:
    """The last interruption, or the verdict, as a story: who, what was seen, the answer, seconds, steps, log lines."""
    api = open_api(namespace, context, kubeconfig)
    emit(output, read_story(api, name, time.time(), entry), _story_page)


def history(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Output = Format.TEXT,
) -> None:
    """The last interruptions, oldest first."""
    job = open_api(namespace, context, kubeconfig).job(name)
    emit(output, interruptions(public_status(job)), _history_page)


def goodput(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Output = Format.TEXT,
) -> None:
    """Where the time of a job went."""
    job = open_api(namespace, context, kubeconfig).job(name)
    emit(output, goodput_view(public_status(job), time.time()), _goodput_page)


def sizes(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Output = Format.TEXT,
) -> None:
    """What each number of nodes is worth: how many of them train, passes of a step, share of full speed."""
    from trainium_client.views.sizes import size_rows  # noqa: PLC0415 - the others need no model of the whole job

    emit(output, size_rows(open_api(namespace, context, kubeconfig).job(name)), _sizes_page)


# The pages are imported late, so that JSON does not pay for rich.


def _status_page(view: Any, now: float, width: int) -> Any:
    from trainium_client.render.status import status_page  # noqa: PLC0415

    return status_page(view, now=now, width=width)


def _story_page(story: Any, _now: float, _width: int) -> Any:
    from trainium_client.render.story import story_page  # noqa: PLC0415

    return story_page(story)


def _history_page(entries: Any, _now: float, width: int) -> Any:
    from trainium_client.render.tables import history_page  # noqa: PLC0415

    return history_page(entries, width)


def _goodput_page(view: Any, _now: float, width: int) -> Any:
    from trainium_client.render.tables import goodput_page  # noqa: PLC0415

    return goodput_page(view, width)


def _sizes_page(rows: Any, _now: float, width: int) -> Any:
    from trainium_client.render.tables import sizes_page  # noqa: PLC0415

    return sizes_page(rows, width)
