"""Compute how many files and sockets a process of a job opens, from the size of its world.

Connections between ranks are opened at their first use, so most ranks hold a number that grows with the logarithm of
the world. One process is the hub: the agent of the first node serves the store that all ranks and agents connect to, or
rank 0 without an agent. Gathers use a tree. Any node may become the first, so every worker needs the hub's number.

Measured with real processes (docs/measurements.md, "Real worlds"); the bases include what was absent there:
device files, object storage, TensorBoard.
"""

from __future__ import annotations

from math import ceil, log2

_RANK_BASE = 64
"""Standard streams, data, records, snapshots, device files and the listeners of the groups; 20 were measured on a
CPU."""
_PROCESS_GROUPS = 3
"""Process groups of all ranks, over gloo: the trainer's own, that of saves, and that of the stages after training."""
_PEERS_PER_LEVEL = 2
"""A collective in a tree talks to this many ranks per level."""
_PER_PEER_OF_THE_FIRST = 1
"""Connections to rank 0 without an agent: the store's."""
_AGENT_BASE = 96
_PER_AGENT = 4
"""Connections of one agent to the first: rendezvous, watcher, the pairwise test, and a replaced one."""


def count_files_of_rank(world_size: int) -> int:
    """Return the descriptors of a rank other than 0: sockets of trees and rings, and a constant part."""
    return _RANK_BASE + _PROCESS_GROUPS * (2 + _PEERS_PER_LEVEL * ceil(log2(max(2, world_size))))


def count_files_of_first_rank(world_size: int) -> int:
    """Return the descriptors of rank 0, which serves the store without an agent."""
    return count_files_of_rank(world_size) + _PER_PEER_OF_THE_FIRST * (world_size - 1)


def count_required_files(world_size: int, nodes: int = 1) -> int:
    """Return the limit of open files that every process of the job needs: the largest number of any process."""
    by_first_agent = _AGENT_BASE + world_size + _PER_AGENT * nodes  # it serves the store
    return max(count_files_of_first_rank(world_size), by_first_agent)


def explain_file_limit(limit: int, world_size: int, nodes: int = 1) -> str:
    """Return a sentence if a hard limit (negative: none) is too low for the world; else empty."""
    least = count_required_files(world_size, nodes)
    if limit < 0 or limit >= least:
        return ""
    return (
        f"a process may open {limit:,} files at most (ulimit -Hn), but {least:,} are needed with {world_size:,} "
        "training processes: raise LimitNOFILE of the nodes' container runtime, or the hard limit where you start it"
    )
