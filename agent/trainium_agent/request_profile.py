"""`python -m trainium_agent.request_profile RANK FIRST STEPS`: have a rank of this pod record a trace of some steps.

For `kubectl trn profile`. Leaves the request beside the progress record of the local rank, sends it `PROFILE_SIGNAL`,
waits until the trace is written, and prints the answer as one JSON object.

Guarantee: a process without a handler is never sent the signal, which would end it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any

from trainium_agent.linux import kernel
from trainium_agent.show_ranks import newest_records
from trainium_worker import replace_text

if TYPE_CHECKING:
    from pathlib import Path

PROFILE_SIGNAL = signal.SIGRTMIN + 5
_POLL_SECONDS = 0.05
_SLACK_SECONDS = 120.0
"""Waited beside the steps: the first trace of a process loads a library, and a trace is compressed."""
_STEP_FACTOR = 4.0
"""A recorded step may take so many times as long as the newest one."""


def profile_request_path(progress: Path) -> Path:
    """Return where a request is left: beside the progress record."""
    return progress.with_name(f"{progress.name}.profile")


def request(local_rank: int, first: int, steps: int) -> dict[str, Any]:
    """Return the answer of the rank, or the problem that keeps it from answering."""
    found = newest_records(found_in_output=False).get(local_rank)
    if found is None:
        return {"problem": "the rank does not run"}
    record, progress = found
    if not kernel.handles(record.pid, PROFILE_SIGNAL):
        return {"problem": f"the rank makes no steps now ({record.phase.name.lower()}, stage {record.stage})"}
    path = profile_request_path(progress)
    answer = path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}")
    replace_text(path, json.dumps({"first": first, "steps": steps, "answer": answer.name}))
    os.kill(record.pid, PROFILE_SIGNAL)
    until_last = max(0, first - record.step) + steps
    deadline = time.monotonic() + _SLACK_SECONDS + _STEP_FACTOR * until_last * record.step_seconds
    while not answer.exists():
        if not kernel.handles(record.pid, PROFILE_SIGNAL) and not answer.exists():
            return {"problem": "the rank ended before the steps were recorded"}
        if time.monotonic() > deadline:
            return {"problem": "the rank has not recorded the steps in time"}
        time.sleep(_POLL_SECONDS)
    answered: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink(missing_ok=True)
    return answered


def main() -> None:
    """Print the answer for the command line's local rank, first step and number of steps."""
    local_rank, first, steps = (int(word) for word in sys.argv[1:])
    sys.stdout.write(json.dumps(request(local_rank, first, steps)) + "\n")


if __name__ == "__main__":
    main()
