"""Record a trace of steps in a rank of this pod: `python -m trainium_agent.request_profile RANK FIRST STEPS`.

`kubectl trn profile` runs it. It writes the request beside the progress record of the local rank, sends
`PROFILE_SIGNAL`, waits until the trace is written, and prints the answer as one JSON object. A process without a
handler never gets the signal, which would end it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from typing import Any

from trainium_agent.linux import kernel
from trainium_agent.show_ranks import select_newest_records
from trainium_worker.progress_record import PROFILE_SIGNAL, profile_request_path, replace_text

_POLL_SECONDS = 0.05
_SLACK_SECONDS = 120.0
"""Time beyond the steps: the first trace of a process loads a library, and a trace is compressed."""
_STEP_FACTOR = 4.0
"""Longest duration of a recorded step, as a multiple of the newest step."""


def request_profile(local_rank: int, first: int, steps: int) -> dict[str, Any]:
    """Request the trace and return the rank's answer, or the problem."""
    newest = select_newest_records(found_in_output=False).get(local_rank)
    if newest is None:
        return {"problem": "the rank does not run"}
    record, progress = newest
    if not kernel.has_signal_handler(record.pid, PROFILE_SIGNAL):
        return {"problem": f"the rank makes no steps now ({record.phase.name.lower()}, stage {record.stage})"}
    path = profile_request_path(progress)
    answer = path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}")
    replace_text(path, json.dumps({"first": first, "steps": steps, "answer": answer.name}))
    os.kill(record.pid, PROFILE_SIGNAL)
    until_last = max(0, first - record.step) + steps
    deadline = time.monotonic() + _SLACK_SECONDS + _STEP_FACTOR * until_last * record.step_seconds
    while not answer.exists():
        if not kernel.has_signal_handler(record.pid, PROFILE_SIGNAL) and not answer.exists():
            return {"problem": "the rank ended before the steps were recorded"}
        if time.monotonic() > deadline:
            return {"problem": "the rank has not recorded the steps in time"}
        time.sleep(_POLL_SECONDS)
    response: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink(missing_ok=True)
    return response


def main() -> None:
    """Print the answer for the command line's local rank, first step and number of steps."""
    local_rank, first, steps = (int(word) for word in sys.argv[1:])
    sys.stdout.write(json.dumps(request_profile(local_rank, first, steps)) + "\n")


if __name__ == "__main__":
    main()
