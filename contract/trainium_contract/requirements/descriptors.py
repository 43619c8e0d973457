"""PURE. How many files and sockets a process of a job holds open, from the sizes of its world.

Connections between ranks are made when they are first used, so most ranks hold a number that grows with the logarithm
of the world. One process is the hub: the agent of the first node serves the store that all ranks and agents connect to,
or rank 0 where no agent does; what ranks gather climbs a tree. Any node may become the first, so every worker needs
what the hub does.

Measured on real processes (docs/scale.md, "Real worlds"); the bases leave room for what was not there:
device files, object storage, TensorBoard.
"""

from __future__ import annotations

from math import ceil, log2

_RANK_BASE = 64
"""Standard streams, data, records, snapshots, device files and the listeners of the groups; 20 were found on a CPU."""
_GROUPS = 3
"""Process groups of all ranks, over gloo: the trainer's own, that of saves, and that of the stages after training."""
_PER_HOP = 2
"""A collective in a tree talks to this many ranks per level."""
_PER_PEER_OF_THE_FIRST = 1
"""To rank 0, without an agent: the store's."""
_AGENT_BASE = 96
_PER_AGENT = 4
"""Connections of one agent to the first: rendezvous, watcher, the pairwise test, and one that is being replaced."""


def needed_by_most_ranks(world_size: int) -> int:
    """Descriptors of a rank other than 0: sockets of trees and rings, and what does not depend on the size."""
    return _RANK_BASE + _GROUPS * (2 + _PER_HOP * ceil(log2(max(2, world_size))))


def needed_by_first_rank(world_size: int) -> int:
    """Descriptors of rank 0, which serves the store where no agent does."""
    return needed_by_most_ranks(world_size) + _PER_PEER_OF_THE_FIRST * (world_size - 1)


def needed(world_size: int, nodes: int = 1) -> int:
    """Return the limit of open files that every process of the job needs: that of the hub."""
    by_first_agent = _AGENT_BASE + world_size + _PER_AGENT * nodes  # which serves the store
    return max(needed_by_first_rank(world_size), by_first_agent)


def explain_shortage(limit: int, world_size: int, nodes: int = 1) -> str:
    """Return a sentence when a hard limit (negative: none) is too low for the world; empty when it is not."""
    least = needed(world_size, nodes)
    if limit < 0 or limit >= least:
        return ""
    return (
        f"a process may open {limit:,} files at most (ulimit -Hn), but {least:,} are needed with {world_size:,} "
        "training processes: raise LimitNOFILE of the nodes' container runtime, or the hard limit where you start it"
    )
