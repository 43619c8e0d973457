"""Any other program as a workload: ranks are commands, or forks of a standby in the interpreter of their image.

Guarantees:
- Nothing is set that the image or the job has set; of the agent's interpreter nothing reaches the program.
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
"""Holds `trainium_worker` alone."""
_SHORT_SECONDS = 3.0
"""A program that trains takes longer, and reports a step."""
_NEURON = Path("/sys/devices/virtual/neuron_device")
_INFINIBAND = Path("/dev/infiniband")
_NEURON_PORT = 62182
"""torch_neuronx/xla_impl uses it for the root communicator."""


class ReservedPort:
    """A free port: bound, so that nobody is given it, and not listened at, so that rank 0 can bind it too.

    Linux allows that while both sockets have SO_REUSEADDR, as those of torch's store and of most servers have.
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
    """The ranks of a job with `spec.program`."""

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
        """Reserve a port at which rank 0 serves its own store."""
        return ReservedPort(address)

    def request(self, layout: AttemptLayout, local_rank: int) -> StartRequest:
        """Return the start of a rank."""
        self._started_at = time.monotonic()
        return StartRequest(
            self._command,
            self._rank_environment(layout, local_rank),
            f"rank {layout.rank(local_rank)} of {layout.world}",
            directory=self._program.working_directory or "",
            image=self._program.image,
        )

    def exit_signal(self, *, memory_ends: bool) -> signal.Signals:  # noqa: ARG002 - what others need
        """Return SIGTERM: every program knows it, and few know another one."""
        return signal.SIGTERM

    def code_after_request(self, code: int) -> int:
        """Take success for "saved and stopped", unless the program has reported its last step.

        A program that was complete ends at once when it starts again; one that was not would have lost its training.
        """
        return ExitCode.YIELDING if code == ExitCode.FINISHED and not self.has_all_steps else code

    def on_finish(self, processes: Sequence[RankProcess]) -> str:
        """Explain what a program that ended at once left running: it put itself into the background."""
        super().on_finish(processes)
        seconds = time.monotonic() - self._started_at
        left = [name for process in processes for name in process.left]
        if seconds > _SHORT_SECONDS or not left or self.has_steps:
            return ""
        return (
            f"the program ended with code 0 after {seconds:.1f} s and left {', '.join(sorted(set(left)))} running: "
            "have it stay in the foreground, because its end is taken for the end of training"
        )

    def _rank_environment(self, layout: AttemptLayout, local_rank: int) -> dict[str, str]:
        given = self._environment
        found = rank_environment(self._settings, layout, local_rank, agent_serves=False)
        defaults = neuron_environment(layout, local_rank, self._settings.neuron_devices)
        if layout.on_a_node > 1:
            defaults["OMP_NUM_THREADS"] = "1"  # as torchrun does
        defaults["PYTHONUNBUFFERED"] = "1"  # else Python keeps back what it prints to a pipe, and steps are seen late
        defaults["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun does
        if layout.accumulation:
            found[worker_env.ENV_ACCUMULATION] = str(layout.accumulation)
        if _LIBRARY.is_dir():
            found["PYTHONPATH"] = os.pathsep.join(filter(None, (given.get("PYTHONPATH", ""), str(_LIBRARY))))
        return {**{name: value for name, value in defaults.items() if name not in given}, **found}


def neuron_environment(layout: AttemptLayout, local_rank: int, devices: int) -> dict[str, str]:
    """Return what Neuron's runtime and its PJRT plugin read; nothing without devices.

    Sources: the Neuron runtime's configuration (NEURON_RT_*), the PJRT plugin for multi-process runs (NEURON_PJRT_*),
    and AWS's launch scripts for EFA (FI_*).
    """
    if not devices:
        return {}
    # The driver lets only root read `core_count` (neuron_cdev.c), and programs run without root.
    cores = devices * len([*_NEURON.glob("neuron0/neuron_core*")]) // max(1, _logical())
    each = cores // layout.on_a_node
    found = {"NEURON_RT_ROOT_COMM_ID": f"{layout.master_ip}:{_NEURON_PORT}"}
    if each:
        first = local_rank * each
        found["NEURON_RT_VISIBLE_CORES"] = str(first) if each == 1 else f"{first}-{first + each - 1}"
        found["NEURON_PJRT_PROCESSES_NUM_DEVICES"] = ",".join([str(each)] * layout.world)
        found["NEURON_PJRT_PROCESS_INDEX"] = str(layout.rank(local_rank))
    if _INFINIBAND.is_dir():
        found |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    return found


def _logical() -> int:
    text = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "")
    return int(text) if text.isdigit() else 1
