"""Provide the options that every command takes, and the ways to print a result."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import typer

from trainium_client.api import Api

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.api_server.connection import Connection

_FILE_WIDTH = 400
"""Width of output to a file or a pipe, which is not truncated."""
_connections: list[Connection] = []
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Format(StrEnum):
    """The form of a command's output."""

    TEXT = "text"
    JSON = "json"


def complete_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of jobs for the shell; none where they cannot be read."""
    options = ctx.params
    try:
        names = list_job_names(options.get("namespace"), options.get("context"), options.get("kubeconfig"))
    except Exception:  # noqa: BLE001 - a shell's completion never fails
        return []
    return [name for name in sorted(names) if name.startswith(incomplete)]


def list_job_names(namespace: str | None, context: str | None, kubeconfig: str | None) -> list[str]:
    """Return the names of the jobs for a completion, which must be fast."""
    jobs = open_api(namespace, context, kubeconfig, timeout_seconds=3.0).list_jobs()
    return [str(job["metadata"]["name"]) for job in jobs]


_JOB_NAME = typer.Argument(metavar="NAME", help="The TrainingJob.", autocompletion=complete_jobs)
JobName = Annotated[str, _JOB_NAME]
OptionalJobName = Annotated[str | None, _JOB_NAME]
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "namespace": (
        Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace; default: that of the context.")],
        None,
    ),
    "context": (Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")], None),
    "kubeconfig": (Annotated[str | None, typer.Option("--kubeconfig", help="Kubeconfig file.")], None),
    "output": (Annotated[Format, typer.Option("--output", "-o", help="text or json.")], Format.TEXT),
}


@dataclass(frozen=True, slots=True)
class Session:
    """The cluster and the output format of a command."""

    namespace: str | None
    context: str | None
    kubeconfig: str | None
    output: Format = Format.TEXT

    def open(self, namespace: str | None = None) -> Api:
        """Connect to the API server, by default in the namespace of the command."""
        return open_api(namespace or self.namespace, self.context, self.kubeconfig)

    def print_result(self, value: Any, page: Callable[[Any, float, int], Any]) -> None:
        """Print a value: as JSON, or as the page that `page` renders with the time and the width."""
        if self.output is Format.JSON:
            from trainium_client.render.json_output import format_json  # noqa: PLC0415 - each form loads what it needs

            sys.stdout.write(format_json(value))
        else:
            from trainium_client.render.page import render_text  # noqa: PLC0415 - rich takes a fifth of a command's time

            output = inspect_terminal()
            sys.stdout.write(
                render_text(page(value, time.time(), output.width), width=output.width, colour=output.colour)
            )
        sys.stdout.flush()

    def print_message(self, sentence: str, **facts: Any) -> None:
        """Print the result of a change: a sentence for a person, or the sentence and facts as JSON."""
        if self.output is Format.TEXT:
            notify(sentence)
            return
        from trainium_client.render.json_output import format_json, to_camel_case  # noqa: PLC0415 - each form loads what it needs

        sys.stdout.write(
            format_json({"message": sentence, **{to_camel_case(name): fact for name, fact in facts.items()}})
        )
        sys.stdout.flush()


def add_session_options(
    command: Callable[Concatenate[Session, _Params], _Result], *, output: bool = True
) -> Callable[..., _Result]:
    """Replace the first parameter of a command by the options of `Session`, with or without `--output`."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    names = [name for name in _OPTIONS if output or name != "output"]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    common = [inspect.Parameter(name, kind, default=_OPTIONS[name][1], annotation=_OPTIONS[name][0]) for name in names]
    command_parameters = [
        parameter.replace(annotation=hints[parameter.name]) for parameter in list(signature.parameters.values())[1:]
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> _Result:
        session = Session(**{name: arguments.pop(name) for name in names})
        return command(session, **arguments)  # type: ignore[call-arg]

    parameters = [*command_parameters, *common]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # typer would read the hints of the command itself
    return run


def open_api(
    namespace: str | None, context: str | None, kubeconfig: str | None, *, timeout_seconds: float = 30.0
) -> Api:
    """Connect to the API server that the options name."""
    # Imported here: the Kubernetes library takes longer than to complete or explain a command.
    from trainium_contract.api_server.connection import Connection  # noqa: PLC0415 - as above
    from trainium_contract.api_server.kubeconfig import find_access  # noqa: PLC0415 - as above

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would print a warning before it repeats a read
    access = find_access(kubeconfig, context, os.environ)
    connection = Connection(access, timeout=timeout_seconds)
    _connections.append(connection)
    return Api(connection, namespace or access.namespace)


def close_connections() -> None:
    """Close all connections of this process."""
    while _connections:
        _connections.pop().close()


@dataclass(frozen=True, slots=True)
class Terminal:
    """The properties of standard output."""

    width: int
    colour: bool
    interactive: bool


def inspect_terminal() -> Terminal:
    """Inspect standard output."""
    interactive = sys.stdout.isatty()
    colour = interactive and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return Terminal(int(columns), colour, interactive)
    width = shutil.get_terminal_size((100, 40)).columns if interactive else _FILE_WIDTH
    return Terminal(width, colour, interactive)


def notify(sentence: str) -> None:
    """Print a sentence on standard error."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
