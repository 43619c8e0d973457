"""What every command takes, and how it prints."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_client.api import Api
from trainium_client.connection import Connection
from trainium_client.kubeconfig import find_access

if TYPE_CHECKING:
    from collections.abc import Callable

_UNBOUNDED = 400
"""Width of what goes into a file or a pipe: nothing is cut there."""
_opened: list[Connection] = []


class Format(StrEnum):
    """How a command prints."""

    TEXT = "text"
    JSON = "json"


def complete_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs, for the shell; nothing where they cannot be read."""
    try:
        given = ctx.params
        api = open_api(given.get("namespace"), given.get("context"), given.get("kubeconfig"), seconds=3.0)
        names = [str(job["metadata"]["name"]) for job in api.jobs()]
    except Exception:  # noqa: BLE001 - a shell's completion never fails
        return []
    return [name for name in sorted(names) if name.startswith(incomplete)]


JobName = Annotated[str, typer.Argument(metavar="NAME", help="The TrainingJob.", autocompletion=complete_jobs)]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace; default: that of the context.")]
Context = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")]
Kubeconfig = Annotated[str | None, typer.Option("--kubeconfig", help="Kubeconfig file.")]
Output = Annotated[Format, typer.Option("--output", "-o", help="text or json.")]


def open_api(namespace: str | None, context: str | None, kubeconfig: str | None, *, seconds: float = 30.0) -> Api:
    """The API server that the options name."""
    access = find_access(kubeconfig, context, os.environ)
    connection = Connection(access, seconds=seconds)
    _opened.append(connection)
    return Api(connection, namespace or access.namespace)


def close_connections() -> None:
    """At the end of a command."""
    while _opened:
        _opened.pop().close()


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where the output goes."""

    width: int
    colour: bool
    interactive: bool


def terminal() -> Terminal:
    """What standard output is."""
    interactive = sys.stdout.isatty()
    colour = interactive and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return Terminal(int(columns), colour, interactive)
    width = shutil.get_terminal_size((100, 40)).columns if interactive else _UNBOUNDED
    return Terminal(width, colour, interactive)


def emit(output: Format, value: Any, page: Callable[[Any, float, int], Any]) -> None:
    """Print a value: as JSON, or as the page that `page` makes of it with the time and the width."""
    if output is Format.JSON:
        from trainium_client.render.machine import as_json  # noqa: PLC0415 - each form loads what it needs

        sys.stdout.write(as_json(value))
    else:
        from trainium_client.render.page import show  # noqa: PLC0415 - rich takes a fifth of a command's time

        here = terminal()
        sys.stdout.write(show(page(value, time.time(), here.width), width=here.width, colour=here.colour))
    sys.stdout.flush()


def told(output: Format, sentence: str, **facts: Any) -> None:
    """What a command did: a sentence to the person, or the same with facts of snake_case names as JSON."""
    if output is Format.TEXT:
        say(sentence)
        return
    from trainium_client.render.machine import as_json, camel  # noqa: PLC0415 - each form loads what it needs

    sys.stdout.write(as_json({"message": sentence, **{camel(name): fact for name, fact in facts.items()}}))
    sys.stdout.flush()


def say(sentence: str) -> None:
    """A sentence to the person, beside the output."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
