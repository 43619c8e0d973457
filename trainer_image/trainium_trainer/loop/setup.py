"""Set up one rank for its first step: data, peers, model, checkpoints and records.

Guarantees:
- Errors in packages, devices and data are reported before a device or a process group is touched.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from trainium_contract.models.parameters import count_parameters
from trainium_trainer.artifacts.stage import create_milestone_hook
from trainium_trainer.backends.choose import create_backend, find_backend
from trainium_trainer.backends.device import open_store
from trainium_trainer.backends.mesh import are_equal_on_all_ranks, wait_for_all_ranks
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.manager import CheckpointManager
from trainium_trainer.checkpoint.root.metrics_copy import find_records_folder
from trainium_trainer.checkpoint.root.owner import RunStart
from trainium_trainer.configuration.config import Settings, resolve_steps
from trainium_trainer.data.batches.samples import Share
from trainium_trainer.data.dataset import Dataset, open_run_data
from trainium_trainer.data.loader import Loader, open_loader
from trainium_trainer.data.online.shard_reader import SampleGroup
from trainium_trainer.data.online.streams import Streams
from trainium_trainer.data.prepared.reader import divide_file_checks
from trainium_trainer.data.revisions import RunRevisions
from trainium_trainer.data.tokens.tokenizer import hash_tokenizer
from trainium_trainer.exits import UserError
from trainium_trainer.loop.history import History
from trainium_trainer.loop.memory_check import check_device_memory
from trainium_trainer.loop.references import load_references
from trainium_trainer.loop.run_length import RunLength
from trainium_trainer.monitor.writers import Recorder
from trainium_trainer.storage import open_storage
from trainium_trainer.trackers.process import TrackerProcess, refuse_missing_trackers
from trainium_trainer.weights.initial import InitialWeights
from trainium_worker.pulse import Activity, Pulse

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_contract.trainer.parallelism import BackendChoice
    from trainium_trainer.backends.base import Backend, Mesh
    from trainium_trainer.loop.stop import StopRequest
    from trainium_trainer.monitor.progress import ProgressWriter
    from trainium_trainer.monitor.step_monitor import StepMonitor

_log = logging.getLogger("trainium.train")


class StartupTimer:
    """Measures the phases of start-up."""

    def __init__(self) -> None:
        self._phase_began = self._began = time.perf_counter()
        self._phases: list[str] = []

    def end_phase(self, name: str) -> None:
        """Record the time since the end of the previous phase."""
        now = time.perf_counter()
        self._phases.append(f"{name} {now - self._phase_began:.2f} s")
        self._phase_began = now

    def format_summary(self) -> str:
        """Format all phases and their sum as one line."""
        return f"start-up: {', '.join(self._phases)}, together {self._phase_began - self._began:.2f} s"


@dataclass(slots=True, kw_only=True)
class Run:
    """The parts of one rank, created by `set_up_run`."""

    config: TrainingConfig
    length: RunLength
    backend: Backend
    data: Dataset
    loader: Loader
    manager: CheckpointManager
    recorder: Recorder
    monitor: StepMonitor
    progress: ProgressWriter
    position: Position
    stop: StopRequest
    initial_weights: InitialWeights
    trackers: TrackerProcess | None
    """The tracker process of rank 0; None without trackers."""
    validation_loss: float | None = None
    """The newest one that this process has computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The inputs of a run, opened before a device or a process group is touched."""

    settings: Settings
    """The settings with the number of steps that the data determines."""
    data: Dataset
    initial_weights: InitialWeights
    revisions: RunRevisions
    """The revisions of the data, which rank 0 records once the run has a state."""
    length: RunLength

    def list_fixed_settings(self) -> dict[str, Any]:
        """Return the settings that must not change between starts of the run."""
        return self.data.settings | self.settings.list_fixed_settings(
            self.data.identity, hash_tokenizer(self.data.tokenizer), self.initial_weights.digests
        )


def set_up_run(settings: Settings, progress: ProgressWriter, stop: StopRequest) -> Run:
    """Open the data, connect to the other ranks, build the state and find the position to resume. Collective."""
    timer = StartupTimer()
    backend_choice = _check_requirements(settings)
    inputs = _open_inputs(settings)
    timer.end_phase("data")
    backend = create_backend(backend_choice, inputs.settings, progress.pulse)
    timer.end_phase("process group")
    _check_ranks(inputs, backend, progress)
    backend.build()
    timer.end_phase("model")
    progress.pulse.enter(Activity.LOAD)
    _load_fixed_weights(inputs, backend, timer)
    fixed_settings = inputs.list_fixed_settings()
    manager, position = _restore_state(inputs, backend, progress, fixed_settings)
    timer.end_phase("state")
    report_warnings(manager, progress, 0)
    recorder, monitor, trackers = _open_records(inputs, backend, progress, fixed_settings, position)
    loader = _open_run_loader(inputs, backend.mesh)
    timer.end_phase("files")
    progress.publish(total_steps=inputs.length.count_total_steps(position))
    progress.record_resume(position.step, tokens=position.tokens, samples=position.samples)
    progress.publish(memory_step=manager.memory_step, durable_step=manager.durable_step)
    _log_start(inputs, backend.mesh, timer, f"step {position.step} from {manager.resumed_from}")
    return Run(
        config=inputs.settings.config,
        length=inputs.length,
        backend=backend,
        data=inputs.data,
        loader=loader,
        manager=manager,
        recorder=recorder,
        monitor=monitor,
        progress=progress,
        position=position,
        stop=stop,
        initial_weights=inputs.initial_weights,
        trackers=trackers,
    )


def _check_requirements(settings: Settings) -> BackendChoice:
    """Check packages, devices and the repository to push to; return the backend. Raises UserError."""
    refuse_missing_trackers(settings.config.monitor.trackers)
    backend_choice = find_backend(settings)
    if settings.launch.rank == 0 and settings.config.artifacts.push is not None and not settings.launch.is_restart:
        from trainium_trainer.artifacts.push import open_repository  # noqa: PLC0415 - few runs push

        open_repository(settings.config)
    return backend_choice


def _open_inputs(settings: Settings) -> RunInputs:
    """Open the data of the run's revisions and the initial weights."""
    config, launch = settings.config, settings.launch
    revisions = RunRevisions(
        open_storage(config.checkpoint.path), rank=launch.rank, open_store=lambda: open_store(launch)
    )
    config = config.model_copy(update={"data": revisions.pin(config.data)})
    with divide_file_checks(launch.local_rank, launch.local_world_size):
        data = open_run_data(config)
    settings = replace(settings, config=resolve_steps(config, data.epoch_samples))
    return RunInputs(
        settings=settings,
        data=data,
        initial_weights=InitialWeights.open(settings.config, settings.shape),
        revisions=revisions,
        length=RunLength.of(settings, data.epoch_samples),
    )


def _check_ranks(inputs: RunInputs, backend: Backend, progress: ProgressWriter) -> None:
    """Check the memory of the device, and that all ranks read the same inputs. Collective. Raises UserError."""
    config = inputs.settings.config
    if config.evaluate.enabled and config.evaluate.tasks is not None:
        from trainium_trainer.evaluate.stage import refuse_unmeasurable  # noqa: PLC0415 - imports transformers

        refuse_unmeasurable(backend.mesh.device.type)
    if inputs.settings.launch.world_size > 1:
        _refuse_unequal_ranks(inputs, backend.mesh, progress.pulse)
    for warning in check_device_memory(inputs.settings, backend.mesh.device):
        _log.warning("%s", warning)
        progress.write_notice(warning)


def _load_fixed_weights(inputs: RunInputs, backend: Backend, timer: StartupTimer) -> None:
    """Compute what a reference model contributes, and load the weights that the run does not train."""
    weights = inputs.initial_weights
    if weights.reference is not None:
        load_references(inputs.settings, inputs.data, weights.reference, backend)
        timer.end_phase("references")
    if weights.base is not None and inputs.settings.config.tuning.freezes:
        backend.load_frozen(weights.base)
        timer.end_phase("base")


def _restore_state(
    inputs: RunInputs, backend: Backend, progress: ProgressWriter, fixed_settings: dict[str, Any]
) -> tuple[CheckpointManager, Position]:
    """Resume the newest state, or initialize it; return it with its position. Collective."""
    config, launch, weights = inputs.settings.config, inputs.settings.launch, inputs.initial_weights
    with progress.pulse.work_with_collectives:
        manager = CheckpointManager(
            config.checkpoint,
            state=backend.state,
            mesh=backend.mesh,
            start=RunStart(launch.generation, launch.job, launch.run_id),
            memory_directory=launch.memory_directory,
            after_milestone=create_milestone_hook(
                config, backend.mesh, progress, base=weights.base, tokenizer=inputs.data.tokenizer
            ),
            settings=fixed_settings,
        )
    if launch.rank == 0:
        inputs.revisions.write()
    if manager.position is not None:
        return manager, manager.position
    backend.initialize(config.seed, weights.base, weights.adapter)
    return manager, Position(step=0, samples=0, tokens=0)


def _open_records(
    inputs: RunInputs,
    backend: Backend,
    progress: ProgressWriter,
    fixed_settings: dict[str, Any],
    position: Position,
) -> tuple[Recorder, StepMonitor, TrackerProcess | None]:
    """Truncate the records of the run to a position, and open recorder, monitor and trackers. Collective."""
    config, launch, mesh = inputs.settings.config, inputs.settings.launch, backend.mesh
    root = find_records_folder(config.checkpoint)
    history = History(root, launch.memory_directory, progress)
    monitor = history.open(inputs.settings, inputs.length, position, inputs.data, mesh)
    if config.monitor.record_samples and mesh.world_size > 1:
        wait_for_all_ranks(mesh, progress.pulse)  # no rank may append to a file that rank 0 is still truncating
    recorder = Recorder(
        root,
        rank=mesh.rank,
        dp_rank=mesh.data_rank if mesh.counts_samples else None,
        tensorboard=config.monitor.tensorboard,
        record_samples=config.monitor.record_samples,
        resume_step=position.step,
        fallback=history.fallback,
        notify=history.notify,
    )
    if mesh.rank != 0 or not config.monitor.trackers:
        return recorder, monitor, None
    trackers = TrackerProcess(inputs.settings, root, fixed_settings, step=position.step)
    return recorder, monitor, trackers


def _open_run_loader(inputs: RunInputs, mesh: Mesh) -> Loader:
    """Open the loader of this rank's share of each step. Collective if it tokenizes online."""
    config, length = inputs.settings.config, inputs.length
    return open_loader(
        inputs.data,
        Share(
            global_size=length.batch,
            micro_size=config.batch.micro_size,
            dp_rank=mesh.data_rank,
            dp_size=mesh.data_size,
            end=length.end,
        ),
        ahead=config.data.prefetch_steps,
        counts_folder=find_records_folder(config.checkpoint) / "data",
        writes=mesh.counts_samples,
        sample_group=_find_sample_group(mesh) if isinstance(inputs.data.training, Streams) else None,
    )


def _log_start(inputs: RunInputs, mesh: Mesh, timer: StartupTimer, position: str) -> None:
    """Log the phases of start-up, the size of the model, its division, and the position of the state."""
    settings = inputs.settings
    if mesh.rank == 0 and inputs.data.report is not None:
        _log.info("data: %s", inputs.data.report.format_line())
    _log.info(
        "%s; %s parameters%s, data parallel %d, tensor parallel %d, pipeline %d%s, %s",
        timer.format_summary(),
        f"{count_parameters(settings.shape):,}",
        f" ({settings.trainable.trained:,} are trained)" if settings.config.tuning.freezes else "",
        mesh.data_size,
        mesh.tp_size,
        mesh.pp_size,
        f", context {mesh.cp_size}" if mesh.cp_size > 1 else "",
        position,
    )


def _refuse_unequal_ranks(inputs: RunInputs, mesh: Mesh, pulse: Pulse) -> None:
    """Raise UserError on all ranks if they do not read the same tokens and initial weights. Collective."""
    config, fingerprints = inputs.settings.config, (inputs.data.fingerprint, inputs.initial_weights.fingerprint)
    has_same_data, has_same_weights = are_equal_on_all_ranks(fingerprints, mesh, pulse)
    if not has_same_data:
        raise UserError(
            f"data.source {config.data.source}: the ranks do not read the same tokens: mount the same data everywhere, "
            "run the same image, or set one data.cacheDirectory on shared storage"
        )
    if not has_same_weights:
        raise UserError(
            f"model.weights {config.model.weights}: the ranks do not begin with the same models: mount the same "
            "folders everywhere"
        )


def report_warnings(manager: CheckpointManager, progress: ProgressWriter, reported: int) -> int:
    """Report the warnings of the checkpoint manager after the first `reported`; return the number of all."""
    for warning in manager.warnings[reported:]:
        _log.warning("%s", warning)
        progress.write_notice(warning)
    return len(manager.warnings)


def _find_sample_group(mesh: Mesh) -> SampleGroup | None:
    """Return the ranks that train on the same samples as this rank, None for it alone. Collective."""
    if mesh.tp_size * mesh.pp_size * mesh.cp_size == 1:
        return None
    gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(mesh.world_size)]
    dist.all_gather(gathered, torch.tensor([mesh.data_rank, mesh.counts_samples]), group=mesh.world)
    members = [rank for rank, row in enumerate(gathered) if row[0] == mesh.data_rank]
    leader = next(rank for rank in members if gathered[rank][1])
    return SampleGroup(leader, mesh.rank, tuple(rank for rank in members if rank != leader), mesh.world)
