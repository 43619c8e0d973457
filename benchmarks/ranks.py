"""Run the processes of a training run on this machine, over loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from trainium_devcluster.ports import reserve_port

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

THREAD_VARIABLES = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every rank."""
_POLL_SECONDS = 0.02


class RunFailedError(Exception):
    """A rank failed; the message has the end of its log."""


def build_rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment of a rank, over loopback."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    } | THREAD_VARIABLES


def run_ranks(argv: list[str], ranks: int, folder: Path, environment: Mapping[str, str] | None = None) -> int:
    """Run all ranks to their end, and return the largest resident set of a rank in bytes.

    Raises RunFailedError as soon as one fails.
    """
    port = reserve_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            # Each run has a separate cache, so Inductor compiles again.
            variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
            variables |= build_rank_environment(rank, ranks, port) | dict(environment or {})
            with (folder / f"rank-{rank}.log").open("w") as log:
                processes.append(subprocess.Popen(argv, env=variables, stdout=log, stderr=subprocess.STDOUT))
        return wait_for_ranks({process.pid: rank for rank, process in enumerate(processes)}, folder)
    finally:
        for process in processes:
            process.returncode = process.returncode or 0  # reaped by `wait_for_ranks`


def wait_for_ranks(pids: dict[int, int], folder: Path) -> int:
    """Wait for child processes (pid to rank), and return the largest resident set of a rank in bytes.

    If one fails, kill the others and raise RunFailedError.
    """
    running, largest = dict(pids), 0
    failed: tuple[int, int] | None = None
    try:
        while running:
            for pid in list(running):
                ended, status, usage = os.wait4(pid, os.WNOHANG)
                if not ended:
                    continue
                rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
                largest = max(largest, usage.ru_maxrss * 1024)
                if code and failed is None:
                    failed = (rank, code)
                    _kill(running)
            time.sleep(_POLL_SECONDS)
    finally:
        _kill(running)
        for pid in running:
            os.waitpid(pid, 0)
    if failed is not None:
        end = (folder / f"rank-{failed[0]}.log").read_text().splitlines()[-4:]
        raise RunFailedError(f"rank {failed[0]} ended with {failed[1]}: {' / '.join(end)}")
    return largest


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
