"""`kubectl_complete-trn`: complete the command line for kubectl (1.26 or newer) after `kubectl trn` and the tab key.

Invariants: prints candidates, then kubectl's directive. Never fails and never writes to standard error.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer

from trainium_client.commands.main import app
from trainium_client.commands.options import job_names
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_FILES = ":4"


def candidates(words: list[str], jobs_of: Callable[[list[str]], list[str]]) -> list[str]:
    """Return the candidates for the last word; `words` are those after `kubectl trn`, the last one incomplete."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [param for command in commands.values() for param in command.params if param.param_type_name == "option"]
    with_value = {flag for option in options if not option.is_flag for flag in option.opts}
    *before, prefix = words or [""]
    plain = [word for at, word in enumerate(before)
             if not word.startswith("-") and not (at and before[at - 1] in with_value)]  # fmt: skip
    if before and before[-1] in {"-o", "--output"}:
        completions = ["text", "json"]
    elif not plain:
        completions = list(commands)
    elif len(plain) == 1 and plain[0] in commands and _takes_job(commands[plain[0]]):
        completions = jobs_of(before)
    else:
        completions = []
    return sorted(candidate for candidate in completions if candidate.startswith(prefix))


def _takes_job(command: Any) -> bool:
    return any("NAME" in (param.metavar or "") for param in command.params if param.param_type_name == "argument")


def main() -> None:
    """Print the candidates for the command line."""
    sys.stdout.write("\n".join([*candidates(sys.argv[1:], _job_names), _NO_FILES]) + "\n")


def _job_names(words: list[str]) -> list[str]:
    """Return the names of the jobs in the given namespace, or the context's."""
    given = dict(pairwise(words))
    try:
        return job_names(given.get("-n") or given.get("--namespace"), given.get("--context"), given.get("--kubeconfig"))
    except (ClientError, OSError):
        return []


if __name__ == "__main__":
    main()
