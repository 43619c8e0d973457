"""`kubectl_complete-trn`: what kubectl (1.26 or newer) asks for when a person presses the tab key after `kubectl trn`.

Invariants: prints candidates, then kubectl's directive; never fails and never writes to standard error.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer

from trainium_client.commands.main import app
from trainium_client.commands.options import open_api
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_FILES = ":4"


def candidates(words: list[str], jobs_of: Callable[[list[str]], list[str]]) -> list[str]:
    """Return the candidates for the last word; `words` are those after `kubectl trn`, the last one incomplete."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = [each for command in commands.values() for each in command.params if each.param_type_name == "option"]
    with_value = {flag for each in options if not each.is_flag for flag in each.opts}
    *before, prefix = words or [""]
    plain = [word for at, word in enumerate(before)
             if not word.startswith("-") and not (at and before[at - 1] in with_value)]  # fmt: skip
    if before and before[-1] in {"-o", "--output"}:
        found = ["text", "json"]
    elif not plain:
        found = list(commands)
    elif len(plain) == 1 and plain[0] in commands and _takes_job(commands[plain[0]]):
        found = jobs_of(before)
    else:
        found = []
    return sorted(each for each in found if each.startswith(prefix))


def _takes_job(command: Any) -> bool:
    return any("NAME" in (each.metavar or "") for each in command.params if each.param_type_name == "argument")


def main() -> None:
    """Print the candidates for the command line."""
    sys.stdout.write("\n".join([*candidates(sys.argv[1:], _jobs), _NO_FILES]) + "\n")


def _jobs(words: list[str]) -> list[str]:
    """Names of jobs in the namespace that is named, or the context's."""
    given = dict(pairwise(words))
    try:
        api = open_api(
            given.get("-n") or given.get("--namespace"), given.get("--context"), given.get("--kubeconfig"), seconds=3.0
        )
        return [str(job["metadata"]["name"]) for job in api.jobs()]
    except (ClientError, OSError):
        return []


if __name__ == "__main__":
    main()
