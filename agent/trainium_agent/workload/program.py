"""Run any other program as a workload: ranks are commands, or forks of a standby in their image's interpreter.

Guarantees:
- No variable that the image or the job sets is replaced; the agent's interpreter does not affect the program.
- The port of an attempt stays reserved until its rank 0 listens there.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.ranks.standby import StandbyPlan, StartRequest
from trainium_agent.workload.base import rank_environment
from trainium_agent.workload.program_progress import ProgramMonitor
from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire import worker_env

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.base import AttemptLayout
    from trainium_contract.spec.program import ProgramSpec

_LIBRARY = Path(worker_env.AGENT_MOUNT) / "site"
"""Directory that contains only `trainium_worker`."""
_SHORT_SECONDS = 3.0
"""A program that trains runs longer or reports a step."""
_INFINIBAND = Path("/dev/infiniband")


class ReservedPort:
    """A free port: bound, so that no other process gets it, but not listening, so that rank 0 can bind it too.

    Linux allows that while both sockets have SO_REUSEADDR, as torch's store and most servers set.
    """

    def __init__(self, address: str) -> None:
        """Bind a free port of an address. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.port: int = self._socket.getsockname()[1]

    def __del__(self) -> None:
        self._socket.close()


class Program(ProgramMonitor):
    """The workload of a job with `spec.program`."""

    def __init__(self, settings: AgentSettings, program: ProgramSpec, environment: dict[str, str]) -> None:
        """`environment` is that of the container."""
        super().__init__(settings, program)
        self._program = program
        self._environment = environment
        self._command = (*program.command, *program.args)
        python = (shutil.which(program.command[0]) or program.command[0]) if program.warm else ""
        self.plan = StandbyPlan(modules=program.warm, python=python)
        self.agrees_on_stop = True
        self._started_at = 0.0

    def reserve_port(self, address: str) -> ReservedPort:
        """Reserve a port at which rank 0 serves the ranks' store."""
        return ReservedPort(address)

    def request(self, layout: AttemptLayout, local_rank: int) -> StartRequest:
        """Return the request that starts a rank."""
        self._started_at = time.monotonic()
        return StartRequest(
            self._command,
            self._rank_environment(layout, local_rank),
            f"rank {layout.rank(local_rank)} of {layout.world_size}",
            directory=self._program.working_directory or "",
            image=self._program.image,
        )

    def exit_signal(self, *, memory_ends: bool) -> signal.Signals:  # noqa: ARG002 - what others need
        """Return SIGTERM, which every program handles."""
        return signal.SIGTERM

    def exit_code_after_request(self, code: int) -> int:
        """Return the code for "saved and stopped" on success, unless the program has reported its last step.

        A complete program ends at once when it starts again; an incomplete one counted as finished would lose training.
        """
        return ExitCode.YIELDING if code == ExitCode.FINISHED and not self.has_all_steps else code

    def on_finish(self, processes: Sequence[RankProcess]) -> str:
        """Return an error if the program ended at once and left processes running, in the background."""
        super().on_finish(processes)
        seconds = time.monotonic() - self._started_at
        leftovers = sorted({name for process in processes for name in process.leftover_processes})
        if seconds > _SHORT_SECONDS or not leftovers or self.has_steps:
            return ""
        return (
            f"the program ended with code 0 after {seconds:.1f} s and left {', '.join(leftovers)} running: "
            "have it stay in the foreground, because its end is taken for the end of training"
        )

    def _rank_environment(self, layout: AttemptLayout, local_rank: int) -> dict[str, str]:
        container = self._environment
        environment = rank_environment(self._settings, layout, local_rank, agent_serves=False)
        defaults = network_environment(self._settings.neuron_devices)
        if layout.ranks_per_node > 1:
            defaults["OMP_NUM_THREADS"] = "1"  # as torchrun does
        defaults["PYTHONUNBUFFERED"] = "1"  # else Python buffers its output to a pipe, and steps are found late
        defaults["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun does
        if layout.accumulation:
            environment[worker_env.ENV_ACCUMULATION] = str(layout.accumulation)
        if _LIBRARY.is_dir():
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (container.get("PYTHONPATH", ""), str(_LIBRARY))))
        return {**{name: value for name, value in defaults.items() if name not in container}, **environment}


def network_environment(devices: int) -> dict[str, str]:
    """Return libfabric's variables for EFA (from AWS's launch scripts); empty on a node without Neuron devices or EFA.

    The agent sets no variable of the Neuron runtime or of its PJRT plugin, as torchrun does not: libraries derive
    cores, process index and root communicator from the variables of the rank. A launcher would pass the values of one
    rank to all of its ranks (torch_xla/_internal/neuron.py, `configure_pjrt_environment`).
    """
    if not devices or not _INFINIBAND.is_dir():
        return {}
    return {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
