# ruff: noqa: PLC0415 - the trainer is imported by the forked rank; the answers are printed
"""A process with the trainer already imported that forks ranks on request, as a worker's agent does.

Reads one JSON object per line from stdin: {"ranks": [{"environment", "log"}, ...], "argv"} starts a rank for each entry
and answers {"pids"}; {"wait": pids, "seconds"} answers {"codes"}, where a rank that had to be killed has null. Once one
rank has died, the others are given `seconds` to notice. Its arguments are modules to import, too.
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
_SMALLEST = 1 << 14
"""Bytes of a model's file below which it is not divided: so that each rank has a file of the small model to write."""


def start(order: dict[str, Any]) -> list[int]:
    """Fork the ranks."""
    pids = []
    for entry in order["ranks"]:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives an aborted proof
            log = os.open(entry["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(entry["environment"])
            from benchmarks.proof import strike
            from trainium_trainer.cli import main

            if text := os.environ.get(strike.VARIABLE):
                strike.arm(text)
            main(order["argv"])
        pids.append(pid)
    return pids


def wait(pids: list[int], seconds: float) -> list[int | None]:
    """Exit codes; after the first that is not 0 the others have a few seconds left."""
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
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
    """Answer until stdin ends."""
    from trainium_trainer.artifacts import layout
    from trainium_trainer.warm import warm

    warm()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    layout.SMALLEST = _SMALLEST
    for line in sys.stdin:
        order = json.loads(line)
        answer = {"codes": wait(order["wait"], order["seconds"])} if "wait" in order else {"pids": start(order)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
