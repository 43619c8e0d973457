"""Run any other program as a workload: ranks are commands, or forks of a standby in their image's interpreter.

Guarantees:
- No variable that the image or the job sets is replaced; the agent's interpreter does not affect the program.
- The port of an attempt is one that the kernel assigns to no other process.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.ranks.python_command import SHELLS, find_python
from trainium_agent.ranks.standby import StandbyPlan, StartRequest
from trainium_agent.workload.base import rank_environment
from trainium_agent.workload.posted_progress import ENV_URL
from trainium_agent.workload.program_progress import ProgramMonitor
from trainium_contract.exit_codes import ExitCode
from trainium_contract.program_output import find_error, strip_margin
from trainium_contract.redaction import redact_secrets
from trainium_contract.spec.program import ProgramWarm
from trainium_contract.wire import worker_env

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.base import AttemptLayout

_RECORD = "imports"
"""File in the memory directory: the modules that the ranks of this pod have imported."""
_LIBRARY = Path(worker_env.AGENT_MOUNT) / "site"
"""Directory that contains only `trainium_worker`."""
_SHORT_SECONDS = 3.0
"""A program that trains runs longer or reports a step."""
_END_LINES = 4
_END_CHARACTERS = 4096
_INFINIBAND = Path("/dev/infiniband")
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_FIRST_NODE_PORT = 30_000
"""Start of the default range of NodePorts, which a node takes from its pods with hostNetwork."""
_PORT_CANDIDATES = 64


class FreePort:
    """A free port that no process gets by chance: outside the range from which the kernel assigns ports.

    It is not held, because rank 0 could bind a port that is bound already only if it sets SO_REUSEADDR.
    """

    def __init__(self, address: str) -> None:
        """Choose a port of an address. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        candidates = random.sample(_list_unassigned_ports(), _PORT_CANDIDATES)
        for port in (*candidates, 0):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind((address, port))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    continue
                self.port: int = probe.getsockname()[1]
                return


def _list_unassigned_ports() -> Sequence[int]:
    """Return the ports below the kernel's range, without those of Kubernetes' services."""
    try:
        first_assigned = int(_PORT_RANGE.read_text().split()[0])
    except (OSError, IndexError, ValueError):
        first_assigned = _FIRST_NODE_PORT
    ports = range(_FIRST_PORT, min(first_assigned, _FIRST_NODE_PORT))
    return ports if len(ports) >= _PORT_CANDIDATES else range(_FIRST_PORT, _FIRST_NODE_PORT)


class Program(ProgramMonitor):
    """The workload of a job with `spec.program`."""

    def __init__(self, settings: AgentSettings, environment: Mapping[str, str] = os.environ) -> None:
        """`environment` is that of the container."""
        program = settings.program
        assert program is not None
        super().__init__(settings, program)
        self._program = program
        self._environment = dict(environment)
        self._command = (*program.command, *program.args)
        python = find_python(self._command) if program.warm is ProgramWarm.AUTO else None
        self.plan = StandbyPlan()
        if python is not None:
            self.plan = StandbyPlan(
                python=python.interpreter,
                command=self._command,
                directory=program.working_directory or "",
                record=str(settings.memory_directory / _RECORD),
                environment=self._common_environment(settings.processes_per_node),
            )
        self.agrees_on_stop = True
        self._started_at = 0.0

    def reserve_port(self, address: str) -> FreePort:
        """Return a port at which rank 0 serves the ranks' store."""
        return FreePort(address)

    def request(self, layout: AttemptLayout, local_rank: int) -> StartRequest:
        """Return the request that starts a rank."""
        self._started_at, self.end_problem = time.monotonic(), ""
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

    def record_success(self, process: RankProcess) -> None:
        """Record the error at the end of a shell's output: the code of a pipe or script is that of its last command."""
        lines = process.output.text(_END_CHARACTERS).split("\n")
        position = find_error(lines)
        error = "" if position is None or position < len(lines) - _END_LINES else strip_margin(lines[position])
        if error and Path(self._command[0]).name in SHELLS:
            self.end_problem = (
                f"a shell ended with code 0 although its output ends with {redact_secrets(error)!r}: start the program "
                "with exec, or set -e and -o pipefail, so that its own code counts"
            )

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
        environment = rank_environment(self._settings, layout, local_rank, agent_serves=False)
        if layout.rank(local_rank) == 0 and ENV_URL not in self._environment:
            environment |= self.accept_posts(layout, local_rank)
        environment[worker_env.ENV_WORLD_SIZE] = str(layout.world_size)
        if layout.accumulation:
            environment[worker_env.ENV_ACCUMULATION] = str(layout.accumulation)
        if self._program.batch is not None:
            environment[worker_env.ENV_GLOBAL_BATCH] = str(self._program.batch.global_size)
        if layout.requested_nodes:
            environment[worker_env.ENV_REQUESTED_WORLD_SIZE] = str(layout.requested_nodes * layout.ranks_per_node)
        return {**self._common_environment(layout.ranks_per_node), **environment}

    def _common_environment(self, ranks_per_node: int) -> dict[str, str]:
        """Return the variables that all ranks of this node have in common."""
        container = self._environment
        defaults = network_environment(self._settings.neuron_devices)
        if ranks_per_node > 1:
            defaults["OMP_NUM_THREADS"] = "1"  # as torchrun does
        defaults["PYTHONUNBUFFERED"] = "1"  # else Python buffers its output to a pipe, and steps are found late
        defaults["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun does
        environment = {name: value for name, value in defaults.items() if name not in container}
        if _LIBRARY.is_dir():
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (container.get("PYTHONPATH", ""), str(_LIBRARY))))
        return environment


def network_environment(devices: int) -> dict[str, str]:
    """Return libfabric's variables for EFA (from AWS's launch scripts); empty on a node without Neuron devices or EFA.

    The agent sets no variable of the Neuron runtime or of its PJRT plugin, as torchrun does not: libraries derive
    cores, process index and root communicator from the variables of the rank. A launcher would pass the values of one
    rank to all of its ranks (torch_xla/_internal/neuron.py, `configure_pjrt_environment`).
    """
    if not devices or not _INFINIBAND.is_dir():
        return {}
    return {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
