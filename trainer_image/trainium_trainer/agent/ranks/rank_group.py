"""The training processes of this pod within one generation: started together, ended together.

Invariants: each attempt starts a full set; `kill` returns only when none of them is left.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from trainium_contract.wire import worker_env
from trainium_trainer.agent.ranks.standby import StartRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

    from trainium_trainer.agent.ranks.processes import RankProcess
    from trainium_trainer.agent.ranks.standby_keeper import StandbyKeeper
    from trainium_trainer.agent.settings import AgentSettings

_KILL_SECONDS = 30.0
_POLL_SECONDS = 0.002


class LocalRanks:
    """This pod's ranks; `on_exit` is called from the reaper's thread for each that ends."""

    def __init__(
        self,
        settings: AgentSettings,
        keeper: StandbyKeeper,
        *,
        generation: int,
        run_id: str,
        on_exit: Callable[[RankProcess], None],
    ) -> None:
        self._settings = settings
        self._keeper = keeper
        self._generation = generation
        self._run_id = run_id
        self._on_exit = on_exit
        self._ranks: tuple[RankProcess, ...] = ()

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._ranks)

    @property
    def alive(self) -> bool:
        """Whether any rank has not ended."""
        return any(process.alive for process in self._ranks)

    def all_ended_with(self, code: int) -> bool:
        """Whether there were ranks and each of them ended with this code."""
        return bool(self._ranks) and all(process.exit_code == code for process in self._ranks)

    def start(self, group: WorkerGroup, attempt: int) -> None:
        """Start one attempt's ranks as the rendezvous laid them out."""
        self._ranks = ()
        for worker in group.workers:
            process = self._keeper.start(
                StartRequest(
                    ("train", "--config", str(self._settings.config_path)),
                    self._environment(group, worker, attempt),
                    f"trainium-rank {worker.global_rank} of {worker.world_size}",
                ),
                local_rank=worker.local_rank,
                rank=worker.global_rank,
                attempt=attempt,
                on_exit=self._on_exit,
            )
            self._ranks = (*self._ranks, process)

    def progress_file(self, local_rank: int) -> Path:
        """Where a local rank writes its progress."""
        return self._settings.progress_directory / f"g{self._generation}-r{local_rank}"

    def ask_to_leave(self, *, memory_ends: bool) -> None:
        """Finish the step, agree, save, leave with 75; `memory_ends`: this pod's memory goes with it (see `stop`)."""
        for process in self._ranks:
            process.signal(signal.SIGUSR1 if memory_ends else signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL and wait.

        Raises RuntimeError when one does not end: it is stuck in the kernel and holds its device, so that nothing can
        be started beside it.
        """
        for process in self._ranks:
            process.signal(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_SECONDS
        while self.alive:
            if time.monotonic() > deadline:
                raise RuntimeError(f"a training process did not end within {_KILL_SECONDS:.0f} s of SIGKILL")
            time.sleep(_POLL_SECONDS)

    def _environment(self, group: WorkerGroup, worker: Worker, attempt: int) -> Mapping[str, str]:
        progress = self.progress_file(worker.local_rank)
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "ROLE_NAME": group.spec.role,
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": self._run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            worker_env.ENV_GENERATION: str(self._generation),
            worker_env.ENV_ATTEMPT: str(attempt),
            worker_env.ENV_PROGRESS_FILE: os.fspath(progress),
        }
