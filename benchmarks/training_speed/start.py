"""Measure the time from start to the end of the first step: cold, and from the agent's standby process.

Tokenised data are there in every case: the peer is given token ids.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ranks import THREADS, RunFailedError, rank_environment, wait_for
from benchmarks.training_speed.runs import Result, result_of, run_ours, run_peer, text_file, write_config
from trainium_agent.linux import kernel
from trainium_agent.ranks.standby import StandbyPlan, StartRequest
from trainium_agent.ranks.standby_keeper import Standby
from trainium_agent.settings import DEFAULT_RANK_ENTRY
from trainium_devcluster.ports import reserved_port
from trainium_trainer.agent_workload import WARM_MODULE

if TYPE_CHECKING:
    from benchmarks.training_speed.runs import Task

_WARM_SECONDS = 120.0
_POLL_SECONDS = 0.05


def measure_start(task: Task, rounds: int, peer_python: str | None) -> dict[str, Any]:
    """Measure the median seconds of each way to start `task.ranks` processes. Raises RunFailedError."""
    short = replace(task, steps=2)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="start-") as scratch:
        text = text_file(Path(scratch))
        run_ours(short, _folder(scratch, "prepare"), text)
        for number in range(rounds):
            results = {
                "cold": run_ours(short, _folder(scratch, f"cold-{number}"), text),
                "standby": _run_from_standby(short, _folder(scratch, f"standby-{number}"), text),
            }
            if peer_python is not None:
                results["peer"] = run_peer(short, _folder(scratch, f"peer-{number}"), peer_python)
            for name, result in results.items():
                seconds.setdefault(name, []).append(result.start_seconds)
    return {"ranks": task.ranks} | {
        name: {"seconds": round(statistics.median(values), 3), "values": [round(value, 3) for value in values]}
        for name, values in seconds.items()
    }


def _folder(scratch: str, name: str) -> Path:
    folder = Path(scratch, name)
    folder.mkdir()
    return folder


def _run_from_standby(task: Task, folder: Path, text: Path) -> Result:
    """Start ranks from a warm standby process, as the agent does; return the seconds until the first step."""
    kernel.adopt_orphans()  # the standby's ranks become children of this process
    file = write_config(task, folder, text)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = theirs.fileno()
    plan = StandbyPlan(("torch",), DEFAULT_RANK_ENTRY, WARM_MODULE, str(file))
    arguments = [str(channel), str(os.getpid()), plan.encode()]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainium_agent.ranks.standby", *arguments],
        pass_fds=[channel],
        env=os.environ | THREADS,
    )
    theirs.close()
    standby = Standby(process.pid, ours)
    try:
        deadline = time.monotonic() + _WARM_SECONDS
        while not standby.warm:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunFailedError("the standby process did not become warm")
            time.sleep(_POLL_SECONDS)
        port, pids = reserved_port(), {}
        began = time.time()
        for rank in range(task.ranks):
            with (folder / f"rank-{rank}.log").open("w") as log:
                request = StartRequest(
                    ("train", "--config", str(file)), rank_environment(rank, task.ranks, port), f"rank {rank}"
                )
                pids[standby.start(request, log.fileno())] = rank
        return result_of(folder, wait_for(pids, folder, began))
    finally:
        standby.kill()
        process.wait()
        ours.close()
