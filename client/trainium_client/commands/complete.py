"""`kubectl_complete-trn`: what kubectl (1.26 or newer) asks for when a person presses the tab key after `kubectl trn`.

Invariants: prints candidates, then kubectl's directive; never fails and never writes to standard error.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainium_client.commands.main import app
from trainium_client.commands.options import open_api
from trainium_contract.api_server.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_FILES = ":4"
_OF_A_JOB = frozenset({
    "status", "watch", "why", "logs", "ranks", "stacks", "profile", "checkpoints", "goodput", "history", "suspend",
    "resume", "scale", "sizes", "retry", "report", "simulate", "support-bundle",
})  # fmt: skip
_WITH_VALUE = frozenset(
    {
        "-n",
        "--namespace",
        "--context",
        "--kubeconfig",
        "-o",
        "--output",
        "--rank",
        "--ranks",
        "--steps",
        "--file",
        "--tail",
        "--entry",
    }
)


def candidates(words: list[str], jobs_of: Callable[[list[str]], list[str]]) -> list[str]:
    """Return the candidates for the last word; `words` are those after `kubectl trn`, the last one incomplete."""
    *before, prefix = words or [""]
    plain = [word for at, word in enumerate(before)
             if not word.startswith("-") and not (at and before[at - 1] in _WITH_VALUE)]  # fmt: skip
    if before and before[-1] in {"-o", "--output"}:
        found = ["text", "json"]
    elif not plain:
        found = [str(command.name or getattr(command.callback, "__name__", "")) for command in app.registered_commands]
    elif len(plain) == 1 and plain[0] in _OF_A_JOB:
        found = jobs_of(before)
    else:
        found = []
    return sorted(each for each in found if each.startswith(prefix))


def main() -> None:
    """Print the candidates for the command line."""
    sys.stdout.write("\n".join([*candidates(sys.argv[1:], _jobs), _NO_FILES]) + "\n")


def _jobs(words: list[str]) -> list[str]:
    """Names of jobs in the namespace that is named, or the context's."""
    given = {word: words[at + 1] for at, word in enumerate(words[:-1]) if word in _WITH_VALUE}
    try:
        api = open_api(
            given.get("-n") or given.get("--namespace"), given.get("--context"), given.get("--kubeconfig"), seconds=3.0
        )
        return [str(job["metadata"]["name"]) for job in api.jobs()]
    except (ClientError, OSError):
        return []


if __name__ == "__main__":
    main()
