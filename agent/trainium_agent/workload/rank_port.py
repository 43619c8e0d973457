"""Reserve the port at which the ranks of an attempt meet, and have torch's store served there.

Guarantees:
- A store that the agent serves accepts connections before any rank starts. After a refused connection a client of
  torch 2.13 waits for more than 0.5 s, which a rank that starts before rank 0 would lose.
- A port that rank 0 serves is one that the kernel assigns to no other process.
"""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.ranks import torch_store
from trainium_agent.ranks.standby import StartRequest
from trainium_agent.ranks.standby_manager import ModuleMissingError
from trainium_agent.workload.master_port import MasterPort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.standby_manager import StandbyManager

_BACKLOG = 1024
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_FIRST_NODE_PORT = 30_000
"""Start of the default range of NodePorts, which a node takes from its pods with hostNetwork."""
_PORT_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class RankPort:
    """A port for the ranks of one attempt."""

    master: MasterPort
    server: RankProcess | None = None

    def close(self) -> None:
        """End the process that serves the store, if there is one."""
        if self.server is not None:
            self.server.signal(signal.SIGKILL)


def reserve_port(address: str, standby_manager: StandbyManager | None = None) -> RankPort:
    """Reserve a port, and serve torch's store there if the standby has imported torch.

    Raises OSError, and StandbyLostError.
    """
    if standby_manager is not None:
        with contextlib.suppress(ModuleMissingError):
            return _serve_store(address, standby_manager)
    return RankPort(MasterPort(_find_free_port(address)))


def _serve_store(address: str, standby_manager: StandbyManager) -> RankPort:
    with _open_socket(address, 0) as listener:
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        request = StartRequest((address, str(port)), {}, "trainium-store", torch_store.ENTRY)
        server = standby_manager.start(request, label="store", descriptors=(listener.fileno(),))
    return RankPort(MasterPort(port, is_served=True), server)


def _find_free_port(address: str) -> int:
    """Return a free port that no process gets by chance: outside the range from which the kernel assigns ports.

    It is not held, because rank 0 could bind a port that is bound already only if it sets SO_REUSEADDR.
    """
    for port in (*random.sample(_list_unassigned_ports(), _PORT_CANDIDATES), 0):
        try:
            with _open_socket(address, port) as probe:
                free: int = probe.getsockname()[1]
                return free
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port of {address} is free")


def _open_socket(address: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def _list_unassigned_ports() -> Sequence[int]:
    """Return the ports below the kernel's range, without those of Kubernetes' services."""
    try:
        first_assigned = int(_PORT_RANGE.read_text().split()[0])
    except (OSError, IndexError, ValueError):
        first_assigned = _FIRST_NODE_PORT
    ports = range(_FIRST_PORT, min(first_assigned, _FIRST_NODE_PORT))
    return ports if len(ports) >= _PORT_CANDIDATES else range(_FIRST_PORT, _FIRST_NODE_PORT)
