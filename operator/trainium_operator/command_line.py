"""Run a command line of the operator: errors are one sentence and exit code 2, as of Kubernetes' own programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from trainium_contract.command_line import describe_usage_error

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "trainium-operator"
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
_WRONG_USAGE = 2


def run_command(app: typer.Typer, arguments: Sequence[str], name: str) -> Any:
    """Return the result of the command, or the exit code if it printed its help or raised `typer.Exit`.

    Ends the process with a sentence if the command line is wrong.
    """
    try:
        return app(args=list(arguments), prog_name=name, standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        sentence = describe_usage_error(error, name)
        if sentence is None:
            raise
        fail(sentence)


def fail(sentence: str) -> NoReturn:
    """Report a wrong command line and end the process."""
    typer.echo(f"error: {sentence}", err=True)
    sys.exit(_WRONG_USAGE)
