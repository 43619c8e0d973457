"""Define the interface between the agent and a workload, and the environment and files of a rank.

Guarantees:
- The agent imports no library of the ranks; a workload that needs one imports it at its use.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainium_contract.wire import worker_env
from trainium_worker.progress_record import read_with_pulse

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.standby import StandbyPlan, StartRequest
    from trainium_agent.settings import AgentSettings
    from trainium_contract.wire.messages import HangDetection
    from trainium_worker.progress_record import ProgressReading, ProgressRecord

_ROLE = "trainer"


class RankPort(Protocol):
    """The port at which the ranks of one attempt connect; reserved for the life of this object."""

    @property
    def port(self) -> int:
        """Its number."""


class Workload(ABC):
    """The interface of a workload: everything in which its ranks differ from those of other workloads."""

    plan: StandbyPlan
    """The preparation of the process that starts ranks."""
    agrees_on_stop: bool = False
    """Whether ranks may ask if they should stop, through the library `trainium_worker`."""

    @abstractmethod
    def reserve_port(self, address: str) -> RankPort:
        """Reserve a port for the ranks, at node rank 0. Raises OSError."""

    @abstractmethod
    def request(self, layout: AttemptLayout, local_rank: int) -> StartRequest:
        """Return the request that starts one rank."""

    @abstractmethod
    def exit_signal(self, *, memory_ends: bool) -> signal.Signals:
        """Return the signal that asks a rank to save and exit."""

    def exit_code_after_request(self, code: int) -> int:
        """Return the exit code to record for a rank that ended with `code` after its agent had asked it to stop."""
        return code

    def read(self, path: Path) -> ProgressReading | None:
        """Return the progress of a rank, from any thread; `path` is its progress file."""
        return read_with_pulse(path)

    @abstractmethod
    def newest(self, files: Sequence[Path]) -> tuple[ProgressRecord, Path] | None:
        """Return the progress of the pod and the file that it is from; called in the event loop."""

    @property
    def hang_detection(self) -> HangDetection | None:
        """The signal that detects hangs; None for the trainer, which always reports steps."""
        return None

    @property
    def problem(self) -> str:
        """The reason why progress or checkpoints cannot be read; empty while they can."""
        return ""

    @property
    def durable_step(self) -> int:
        """Step of the newest checkpoint that was observed in storage, not reported; -1 for none."""
        return -1

    def on_output(self, layout: AttemptLayout, local_rank: int) -> Callable[[bytes], None] | None:  # noqa: ARG002
        """Return a callback for each line of a rank's output, called in the output thread; None if not needed."""
        return None

    def on_finish(self, processes: Sequence[RankProcess]) -> str:  # noqa: ARG002
        """Check the ranks after all ended with code 0; return why training is not complete, else nothing.

        Called in the worker thread.
        """
        return ""

    def list_checkpoints(self, seconds: float) -> None:  # noqa: B027
        """List the checkpoints in storage again, for at most so many seconds because storage may hang; blocks."""

    def record_success(self, process: RankProcess) -> None:  # noqa: B027
        """Record that a rank has ended with code 0, in the event loop, before the agent reports it."""

    def observe(self, *, fresh: bool = False) -> None:  # noqa: B027
        """Read the ranks' progress, in the event loop; `fresh`: also progress that was read a moment ago."""

    def activity_counter(self, process: RankProcess, now: float) -> int | None:  # noqa: ARG002
        """Return a number that changes while a rank without steps is active; None if its activity is unknown."""
        return -1

    def step_limit(self, path: Path, limit: float) -> float:  # noqa: ARG002
        """Return the limit of a step in seconds, given the limit for steps that are reported exactly."""
        return limit


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """The layout of an attempt, from the membership and the port of node 0."""

    generation: int
    attempt: int
    node_rank: int
    nodes: int
    ranks_per_node: int
    master_ip: str
    master_port: int
    accumulation: int = 0
    requested_nodes: int = 0
    cause: str = ""
    """Cause of the interruption before the attempt, or Resize; empty for the first attempt of a job."""

    def rank(self, local_rank: int) -> int:
        """Return the global rank; ranks are numbered node by node."""
        return self.node_rank * self.ranks_per_node + local_rank

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.ranks_per_node


def progress_file(settings: AgentSettings, generation: int, local_rank: int) -> Path:
    """Return the file to which a local rank writes its progress."""
    return settings.progress_directory / f"g{generation}-r{local_rank}"


def rank_environment(
    settings: AgentSettings, layout: AttemptLayout, local_rank: int, *, agent_serves: bool
) -> dict[str, str]:
    """Return the environment that torch's `env://` rendezvous and programs written for torchrun read.

    Names and values are those of torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py).
    `agent_serves`: the agent serves the store at the port; otherwise rank 0 does.
    """
    rank, world = str(layout.rank(local_rank)), str(layout.world_size)
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
        "MASTER_PORT": str(layout.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(layout.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_in_place_restarts),
        "TORCHELASTIC_RUN_ID": f"{settings.run_id}.g{layout.generation}",
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_serves),
        worker_env.ENV_GENERATION: str(layout.generation),
        worker_env.ENV_ATTEMPT: str(layout.attempt),
        **({worker_env.ENV_CAUSE: layout.cause} if layout.cause else {}),
        worker_env.ENV_PROGRESS_FILE: os.fspath(progress_file(settings, layout.generation, local_rank)),
    }
