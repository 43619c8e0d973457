"""Report a wrong command line in the same words in every program: `error: SENTENCE; see COMMAND --help`."""

from __future__ import annotations

from typing import Any

_SHOWS_HELP = "NoArgsIsHelpError"
"""Class of the error of a command line without a command, which has printed the help."""


def describe_usage_error(error: Any, program: str) -> str | None:
    """Return the sentence for a wrong command line, empty if the parser has printed the help; None for another error.

    By names, because typer has its own copy of click or uses the installed one.
    """
    if not hasattr(error, "format_message"):
        return None
    if type(error).__name__ == _SHOWS_HELP:
        return ""
    context = getattr(error, "ctx", None)
    place = context.command_path if context is not None else program
    return f"{error.format_message().strip().rstrip('.')}; see {place} --help"
