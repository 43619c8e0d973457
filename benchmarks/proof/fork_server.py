# ruff: noqa: PLC0415 - the trainer is imported by the forked rank; the responses are printed
"""Fork ranks on request from a process that has imported the trainer, as a worker's agent does.

Reads one JSON object per line from stdin: {"ranks": [{"environment", "log"}, ...], "argv"} starts a rank for each entry
and returns {"pids"}; {"wait": pids, "seconds"} returns {"codes"}, with null for a rank that had to be killed. Once a
rank has failed, the others have a minute to end. Its arguments are additional modules to import.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 60.0
_MIN_FILE_BYTES = 1 << 14
"""Minimum size of a file of a model, so small that each rank writes a file of the small model."""


def start(request: dict[str, Any]) -> list[int]:
    """Fork the ranks and return their pids."""
    pids = []
    for entry in request["ranks"]:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives an aborted proof
            log = os.open(entry["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(entry["environment"])
            from benchmarks.proof import kill_points
            from trainium_trainer.cli import main

            if text := os.environ.get(kill_points.VARIABLE):
                kill_points.install_kill(text)
            main(request["argv"])
        pids.append(pid)
    return pids


def wait(pids: list[int], seconds: float) -> list[int | None]:
    """Return the exit codes; after the first one that is not 0, the other ranks have a minute."""
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid]:
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.005)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def serve() -> None:
    """Serve requests until stdin ends."""
    from trainium_trainer.artifacts import data_files
    from trainium_trainer.warm import warm

    warm()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    data_files.SMALLEST = _MIN_FILE_BYTES
    for line in sys.stdin:
        request = json.loads(line)
        response = (
            {"codes": wait(request["wait"], request["seconds"])} if "wait" in request else {"pids": start(request)}
        )
        print(json.dumps(response), flush=True)


if __name__ == "__main__":
    serve()
