"""The training processes of an attempt on this pod: what each is told, and their start from the standby."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.wire import worker_env
from trainium_trainer.agent.ranks.standby import StartRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from trainium_trainer.agent.ranks.processes import RankProcess
    from trainium_trainer.agent.ranks.standby_keeper import StandbyKeeper
    from trainium_trainer.agent.settings import AgentSettings

_ROLE = "trainer"


def progress_file(settings: AgentSettings, generation: int, local_rank: int) -> Path:
    """Where a local rank writes its progress."""
    return settings.progress_directory / f"g{generation}-r{local_rank}"


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """Who is who in an attempt: all of it follows from the membership, and the port of its store from node 0."""

    generation: int
    attempt: int
    node_rank: int
    nodes: int
    on_a_node: int
    master_ip: str
    master_port: int
    """Of the store that the agent of node rank 0 serves for the ranks."""

    def rank(self, local_rank: int) -> int:
        """Ranks are counted node by node."""
        return self.node_rank * self.on_a_node + local_rank

    @property
    def world(self) -> int:
        """All ranks."""
        return self.nodes * self.on_a_node


def start_ranks(
    settings: AgentSettings,
    keeper: StandbyKeeper,
    layout: AttemptLayout,
    run_id: str,
    on_exit: Callable[[RankProcess], None],
) -> tuple[RankProcess, ...]:
    """Start one attempt's ranks. Raises StandbyLostError; `on_exit` is called from any thread."""
    started = []
    for local_rank in range(layout.on_a_node):
        rank = layout.rank(local_rank)
        request = StartRequest(
            ("train", "--config", str(settings.config_path)),
            _environment(settings, layout, local_rank, run_id),
            f"trainium-rank {rank} of {layout.world}",
        )
        started.append(keeper.start(request, local_rank=local_rank, rank=rank, attempt=layout.attempt, on_exit=on_exit))
    return tuple(started)


def _environment(settings: AgentSettings, layout: AttemptLayout, local_rank: int, run_id: str) -> Mapping[str, str]:
    """What torch's `env://` rendezvous and programs written for its launcher read."""
    rank, world = str(layout.rank(local_rank)), str(layout.world)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(layout.on_a_node),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(layout.nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": _ROLE,
        "MASTER_ADDR": layout.master_ip,
        "MASTER_PORT": str(layout.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(layout.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_in_place_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        worker_env.ENV_GENERATION: str(layout.generation),
        worker_env.ENV_ATTEMPT: str(layout.attempt),
        worker_env.ENV_PROGRESS_FILE: os.fspath(progress_file(settings, layout.generation, local_rank)),
    }
