"""Define an attempt of the ranks: their layout, and the environment and files of each of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.wire import worker_env

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.master_port import MasterPort

_ROLE = "trainer"


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """The layout of an attempt, from the membership and the port of node 0."""

    generation: int
    attempt: int
    node_rank: int
    nodes: int
    ranks_per_node: int
    master_ip: str
    master_port: MasterPort
    accumulation: int = 0
    requested_nodes: int = 0
    cause: str = ""
    """Cause of the interruption before the attempt, or Resize; empty for the first attempt of a job."""

    def compute_rank(self, local_rank: int) -> int:
        """Return the global rank; ranks are numbered node by node."""
        return self.node_rank * self.ranks_per_node + local_rank

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.ranks_per_node


def find_progress_file(settings: AgentSettings, generation: int, local_rank: int) -> Path:
    """Return the file to which a local rank writes its progress."""
    return settings.progress_directory / f"g{generation}-r{local_rank}"


def build_rank_environment(settings: AgentSettings, layout: AttemptLayout, local_rank: int) -> dict[str, str]:
    """Return the environment that torch's `env://` rendezvous and programs written for torchrun read.

    Names and values are those of torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py).
    """
    rank, world = str(layout.compute_rank(local_rank)), str(layout.world_size)
    requested = layout.requested_nodes * layout.ranks_per_node
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(layout.ranks_per_node),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(layout.nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": _ROLE,
        "MASTER_ADDR": layout.master_ip,
        "MASTER_PORT": str(layout.master_port.port),
        "TORCHELASTIC_RESTART_COUNT": str(layout.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_in_place_restarts),
        "TORCHELASTIC_RUN_ID": f"{settings.run_id}.g{layout.generation}",
        "TORCHELASTIC_USE_AGENT_STORE": str(layout.master_port.is_served),
        worker_env.ENV_GENERATION: str(layout.generation),
        worker_env.ENV_ATTEMPT: str(layout.attempt),
        worker_env.ENV_WORLD_SIZE: world,
        **({worker_env.ENV_CAUSE: layout.cause} if layout.cause else {}),
        **({worker_env.ENV_ACCUMULATION: str(layout.accumulation)} if layout.accumulation else {}),
        **({worker_env.ENV_REQUESTED_WORLD_SIZE: str(requested)} if requested else {}),
        worker_env.ENV_PROGRESS_FILE: os.fspath(find_progress_file(settings, layout.generation, local_rank)),
    }
