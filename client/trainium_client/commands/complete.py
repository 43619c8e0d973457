"""`kubectl_complete-trn`: complete the command line for kubectl (1.26 or newer) after `kubectl trn` and the tab key.

Invariants: prints candidates, then kubectl's directive. Never fails and never writes to standard error.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer

from trainium_client.commands.main import app
from trainium_client.commands.options import list_job_names
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_FILES = ":4"


def list_candidates(words: list[str], list_jobs: Callable[[list[str]], list[str]]) -> list[str]:
    """Return the candidates for the last word; `words` are those after `kubectl trn`, the last one incomplete."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [param for command in commands.values() for param in command.params if param.param_type_name == "option"]
    value_flags = {flag for option in options if not option.is_flag for flag in option.opts}
    *before, prefix = words or [""]
    arguments = [
        word
        for index, word in enumerate(before)
        if not word.startswith("-") and not (index and before[index - 1] in value_flags)
    ]
    if before and before[-1] in {"-o", "--output"}:
        completions = ["text", "json"]
    elif not arguments:
        completions = list(commands)
    elif len(arguments) == 1 and arguments[0] in commands and _takes_job(commands[arguments[0]]):
        completions = list_jobs(before)
    else:
        completions = []
    return sorted(candidate for candidate in completions if candidate.startswith(prefix))


def _takes_job(command: Any) -> bool:
    return any("NAME" in (param.metavar or "") for param in command.params if param.param_type_name == "argument")


def main() -> None:
    """Print the candidates for the command line."""
    sys.stdout.write("\n".join([*list_candidates(sys.argv[1:], _list_job_names), _NO_FILES]) + "\n")


def _list_job_names(words: list[str]) -> list[str]:
    """Return the names of the jobs in the given namespace, or the context's."""
    given = dict(pairwise(words))
    try:
        return list_job_names(
            given.get("-n") or given.get("--namespace"), given.get("--context"), given.get("--kubeconfig")
        )
    except (ClientError, OSError):
        return []


if __name__ == "__main__":
    main()
