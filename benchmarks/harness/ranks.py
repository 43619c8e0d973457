"""Run the processes of a training run on this machine, over loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from trainium_devcluster.jobs.metrics import read_steps
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


def build_node_environment(folder: Path, rank: int, attempt: int = 0) -> dict[str, str]:
    """Create the memory folder of a rank's node, and return the environment that an agent gives the rank."""
    memory = (folder / f"node-{rank}").absolute()
    (memory / "progress").mkdir(parents=True, exist_ok=True)
    return {
        "TRAINIUM_RUN_ID": "run",
        "TRAINIUM_ATTEMPT": str(attempt),
        "TRAINIUM_GENERATION": "1",
        "TRAINIUM_MEMORY_DIR": str(memory),
        "TRAINIUM_PROGRESS_FILE": str(memory / "progress" / "g1-r0"),
    }


def start_ranks(
    argv: list[str], ranks: int, logs: Path, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start all ranks, each with a log in the folder."""
    port = reserve_port()
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(ranks):
        # Each run has a separate cache, so Inductor compiles again.
        variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(logs / "inductor")}
        variables |= build_rank_environment(rank, ranks, port) | dict(environment or {})
        with (logs / f"rank-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(argv, env=variables, stdout=log, stderr=subprocess.STDOUT))
    return processes


def run_ranks(argv: list[str], ranks: int, folder: Path, environment: Mapping[str, str] | None = None) -> int:
    """Run all ranks to their end, and return the largest resident set of a rank in bytes.

    Raises RunFailedError as soon as one fails.
    """
    processes = start_ranks(argv, ranks, folder, environment)
    try:
        return wait_for_ranks({process.pid: rank for rank, process in enumerate(processes)}, folder)
    finally:
        for process in processes:
            process.returncode = process.returncode or 0  # reaped by `wait_for_ranks`


def run_trainer(
    config: Path, overrides: Iterable[str], *, ranks: int, folder: Path
) -> tuple[list[dict[str, Any]], int]:
    """Train below `folder` as users do: one process per rank, a YAML file, `--set`.

    Return the records of all steps, and the largest resident set of a rank in bytes. Raises RunFailedError.
    """
    argv = [sys.executable, "-m", "trainium_trainer", "train", "--config", str(config)]
    for override in (*overrides, f"checkpoint.path={folder / 'run'}"):
        argv += ["--set", override]
    host_bytes = run_ranks(argv, ranks, folder)
    records = read_steps(folder / "run" / "metrics.jsonl").values()
    return [record for record in records if "loss" in record], host_bytes


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
