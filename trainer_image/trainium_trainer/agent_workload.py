"""The built-in trainer as a workload of the agent: ranks are forked from a standby that has imported it.

They connect through torch's store. The agent, which needs no torch, imports this module by its name, and only for a job
with the trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from trainium_agent.ranks.standby import StandbyPlan, StartRequest
from trainium_agent.settings import DEFAULT_RANK_ENTRY
from trainium_agent.workload.base import Workload, rank_environment
from trainium_worker.progress_record import read_progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch.distributed import TCPStore

    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.base import AttemptLayout
    from trainium_worker.progress_record import ProgressRecord

WARM_MODULE = "trainium_trainer.warm"
"""Its `warm(config_path)` prepares the standby for the trainer's ranks."""
_STORE_SECONDS = 300.0
_BACKLOG = 1024


class Trainer(Workload):
    """The ranks of a job with `spec.trainer`."""

    def __init__(self, settings: AgentSettings) -> None:
        """Import torch, which the standby shares; call it before any thread exists."""
        self._settings = settings
        warm = WARM_MODULE if settings.rank_entry == DEFAULT_RANK_ENTRY else ""
        self.plan = StandbyPlan(("torch",), settings.rank_entry, warm, str(settings.config_path))
        # torch reads both at its import, which the ranks share. Without the second one its C++ code would print a
        # warning about the failed reverse look-up in another format than the log's.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        importlib.import_module("torch.distributed")
        stop_reverse_lookups()  # the standby and all ranks inherit it

    def reserve_port(self, address: str) -> TCPStore:
        """Start a store for the ranks of one attempt."""
        return serve_store(address)

    def request(self, layout: AttemptLayout, local_rank: int) -> StartRequest:
        """Return the request to start a rank."""
        return StartRequest(
            ("train", "--config", str(self._settings.config_path)),
            rank_environment(self._settings, layout, local_rank, agent_serves=True),
            f"trainium-rank {layout.rank(local_rank)} of {layout.world_size}",
        )

    def exit_signal(self, *, memory_ends: bool) -> signal.Signals:
        """Return the signal of a stop: SIGUSR1 saves to storage, when the node's memory ends; SIGTERM to memory."""
        return signal.SIGUSR1 if memory_ends else signal.SIGTERM

    def newest(self, files: Sequence[Path]) -> tuple[ProgressRecord, Path] | None:
        """Return the progress of the first rank, because all ranks are in the same step."""
        record = read_progress(files[0]) if files else None
        return None if record is None else (record, files[0])


def serve_store(address: str) -> TCPStore:
    """Serve one of torch's stores on one address only, at a free port. Raises OSError."""
    from torch.distributed import TCPStore  # noqa: PLC0415 - for a job with the trainer

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
        chosen = listener.getsockname()[1]
        return TCPStore(
            address,
            chosen,
            None,
            True,
            timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


_NSCOUNT_OFFSET = 16
"""Offset in `struct __res_state` (resolv.h): two ints and an unsigned long are before it, on every 64-bit Linux."""
NAMELESS = "127.83.82.81"
"""An address of this host that is in no hosts file."""


def stop_reverse_lookups() -> None:
    """Open a store whose address has no name, while this thread has no name server.

    torch looks up the name of each address once per process, which takes seconds if DNS does not answer.
    """
    with contextlib.suppress(OSError, AttributeError, RuntimeError), _no_name_server():
        serve_store(NAMELESS)


@contextlib.contextmanager
def _no_name_server() -> Iterator[None]:
    """Remove the name servers of this thread. Raises AttributeError without glibc's resolver."""
    libc = ctypes.CDLL(None)
    state, read_configuration = libc["__res_state"], libc["__res_init"]
    state.restype = ctypes.c_void_p
    read_configuration()
    count = ctypes.c_int.from_address(state() + _NSCOUNT_OFFSET)
    count.value = 0
    try:
        yield
    finally:
        read_configuration()
