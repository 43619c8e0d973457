"""Describe the ranks of a job: what they run, and what the agent may expect of them.

Only this file knows which of the two a job has: the built-in trainer is a preset of what a program states.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_agent.ranks.python_command import find_python, is_launcher
from trainium_agent.ranks.standby import StandbyPlan
from trainium_agent.settings import DEFAULT_RANK_ENTRY, QUICK_CHECKS
from trainium_agent.workload.posted_progress import ENV_URL
from trainium_contract.accelerators import EFA_ENVIRONMENT
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.spec.program import ProgramWarm
from trainium_contract.wire import worker_env

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainium_agent.settings import AgentSettings
    from trainium_contract.spec.program import ProgramCheckpoints, ProgramSpec

_LIBRARY = Path(worker_env.AGENT_MOUNT) / "site"
"""Directory that contains only `trainium_worker`."""
_RECORD = "imports"
"""File in the memory directory: the modules that the ranks of this pod have imported."""
_INFINIBAND = Path("/dev/infiniband")
_TRAINER_WARM = "trainium_trainer.warm"
"""Module whose `warm(config_path)` prepares the standby for the trainer's ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """The ranks of a job."""

    command: tuple[str, ...]
    """Command, or arguments of the entry point of `plan`."""
    plan: StandbyPlan
    """Preparation of the process that starts ranks."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of each rank besides those of its place in the attempt."""
    directory: str = ""
    """Working directory; empty for that of the image."""
    image: str = ""
    """Image that should contain the command; used in messages."""
    uses_agent_store: bool
    """Whether each of them joins torch's store at the port of the attempt, and starts none itself."""
    asks_for_stop: bool = False
    """Whether they may ask if they should stop, through the library `trainium_worker`."""
    checks: frozenset[PreflightCheck] = QUICK_CHECKS
    """Checks of a node that need nothing but the agent and their libraries."""
    required_files: tuple[Path, ...] = ()
    """Files that they read, and that must not be empty."""
    storage_signal: signal.Signals = signal.SIGTERM
    """Signal that asks a rank to save where the memory of its node ends."""
    explains_exits: bool = False
    """Whether code 0 means that training is complete, also after a request to stop."""
    reports_each_step: bool = False
    """Whether every rank reports each step and is in the same one; otherwise the agent follows them from outside."""
    receives_posts: bool = False
    """Whether rank 0 posts its progress to the agent, as transformers does."""
    progress_pattern: str | None = None
    """Expression that finds steps in output."""
    checkpoints: ProgramCheckpoints | None = None
    """Checkpoints that they write; None if unknown."""


def describe_ranks(settings: AgentSettings, environment: Mapping[str, str]) -> RankSpec:
    """Describe the ranks of the job of these settings; `environment` is that of the container."""
    if settings.program is None:
        return _describe_trainer(settings, environment)
    return _describe_program(settings, settings.program, environment)


def _describe_trainer(settings: AgentSettings, container: Mapping[str, str]) -> RankSpec:
    # torch reads both at its import, which the ranks share. Without the second one its C++ code would print a
    # warning about the failed reverse look-up in another format than the log's.
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment = {name: value for name, value in defaults.items() if name not in container}
    config = str(settings.config_path)
    plan = StandbyPlan(
        modules=("torch.distributed",),
        entry=settings.rank_entry,
        warm=_TRAINER_WARM if settings.rank_entry == DEFAULT_RANK_ENTRY else "",
        config_path=config,
        environment=environment,
    )
    return RankSpec(
        command=("train", "--config", config),
        plan=plan,
        environment=environment,
        uses_agent_store=True,
        checks=frozenset(PreflightCheck),
        required_files=settings.required_files,
        storage_signal=signal.SIGUSR1,
        explains_exits=True,
        reports_each_step=True,
    )


def _describe_program(settings: AgentSettings, program: ProgramSpec, container: Mapping[str, str]) -> RankSpec:
    command, directory = (*program.command, *program.args), program.working_directory or ""
    environment = _build_program_environment(settings, container)
    python = find_python(command) if program.warm is ProgramWarm.AUTO else None
    plan = StandbyPlan()
    if python is not None:
        plan = StandbyPlan(
            python=python.interpreter,
            command=command,
            directory=directory,
            record=str(settings.memory_directory / _RECORD),
            environment=environment,
        )
    if program.batch is not None:
        environment = {**environment, worker_env.ENV_GLOBAL_BATCH: str(program.batch.global_size)}
    return RankSpec(
        command=command,
        plan=plan,
        environment=environment,
        directory=directory,
        image=program.image,
        # A program that starts its own ranks serves their store itself.
        uses_agent_store=python is not None and program.processes_per_node != 1 and not is_launcher(python),
        asks_for_stop=True,
        receives_posts=ENV_URL not in container,
        progress_pattern=program.progress.pattern,
        checkpoints=program.checkpoints,
    )


def _build_program_environment(settings: AgentSettings, container: Mapping[str, str]) -> Mapping[str, str]:
    """Return variables that all ranks of this node have in common; none replaces one of the container."""
    defaults = build_network_environment(settings.neuron_devices)
    if settings.processes_per_node > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun does
    defaults["PYTHONUNBUFFERED"] = "1"  # else Python buffers its output to a pipe, and steps are found late
    defaults["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as torchrun does
    environment = {name: value for name, value in defaults.items() if name not in container}
    if _LIBRARY.is_dir():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (container.get("PYTHONPATH", ""), str(_LIBRARY))))
    return environment


def build_network_environment(devices: int) -> dict[str, str]:
    """Return libfabric's variables for EFA (from AWS's launch scripts); empty on a node without Neuron devices or EFA.

    The agent sets no variable of the Neuron runtime or of its PJRT plugin, as torchrun does not: libraries derive
    cores, process index and root communicator from the variables of the rank. A launcher would pass the values of one
    rank to all of its ranks (torch_xla/_internal/neuron.py, `configure_pjrt_environment`).
    """
    if not devices or not _INFINIBAND.is_dir():
        return {}
    return dict(EFA_ENVIRONMENT)
