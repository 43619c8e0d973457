"""Set up one rank for its first step: data, peers, model, checkpoints and records.

Guarantees:
- Errors in packages, devices and data are reported before a device or a process group is touched.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from trainium_contract.models.parameters import count_parameters
from trainium_trainer.artifacts.stage import create_milestone_hook
from trainium_trainer.backends.choose import create_backend, find_backend
from trainium_trainer.backends.device import open_store
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
from trainium_trainer.loop.run_progress import RunProgress
from trainium_trainer.monitor.writers import Recorder
from trainium_trainer.storage import open_storage
from trainium_trainer.trackers.process import TrackerProcess, refuse_missing_trackers
from trainium_trainer.weights.initial import InitialWeights
from trainium_worker.pulse import Activity

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig
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
    run_progress: RunProgress
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


def set_up_run(settings: Settings, progress: ProgressWriter, stop: StopRequest) -> Run:
    """Open the data, connect to the other ranks, build the state and find the position to resume. Collective."""
    launch, timer = settings.launch, StartupTimer()
    # Check packages, devices and data before a device or a process group is touched.
    refuse_missing_trackers(settings.config.monitor.trackers)
    backend_choice = find_backend(settings)
    if launch.rank == 0 and settings.config.artifacts.push is not None and not launch.is_restart:
        from trainium_trainer.artifacts.push import open_repository  # noqa: PLC0415 - few runs push

        open_repository(settings.config)
    revisions = RunRevisions(
        open_storage(settings.config.checkpoint.path), rank=launch.rank, open_store=lambda: open_store(launch)
    )
    settings, data = _open_run_data(settings, revisions)
    config = settings.config
    run_progress = RunProgress.of(settings, data.epoch_samples)
    initial_weights = InitialWeights.open(config, settings.shape)
    timer.end_phase("data")
    backend = create_backend(backend_choice, settings, progress.pulse)
    timer.end_phase("process group")
    if config.evaluate.enabled and config.evaluate.tasks is not None:
        from trainium_trainer.evaluate.stage import refuse_unmeasurable  # noqa: PLC0415 - imports transformers

        refuse_unmeasurable(backend.mesh.device.type)
    if launch.world_size > 1:
        _refuse_unequal_ranks(config, backend, data, initial_weights)
    for warning in check_device_memory(settings, backend.mesh.device):
        _log.warning("%s", warning)
        progress.write_notice(warning)
    backend.build()
    timer.end_phase("model")
    progress.pulse.enter(Activity.LOAD)
    if initial_weights.reference is not None:
        load_references(settings, data, initial_weights.reference, backend)
        timer.end_phase("references")
    if initial_weights.base is not None and config.tuning.freezes:
        backend.load_frozen(initial_weights.base)
        timer.end_phase("base")
    fixed_settings = data.settings | settings.list_fixed_settings(
        data.identity, hash_tokenizer(data.tokenizer), initial_weights.digests
    )
    manager = CheckpointManager(
        config.checkpoint,
        state=backend.state,
        mesh=backend.mesh,
        start=RunStart(launch.generation, launch.job, launch.run_id),
        memory_directory=launch.memory_directory,
        after_milestone=create_milestone_hook(
            config, backend.mesh, progress, base=initial_weights.base, tokenizer=data.tokenizer
        ),
        settings=fixed_settings,
    )
    with progress.pulse.work_with_collectives:
        position = manager.resume()
    if launch.rank == 0:
        revisions.write()
    if position is None:
        backend.initialize(config.seed, initial_weights.base, initial_weights.adapter)
        position = Position(step=0, samples=0, tokens=0)
    timer.end_phase("state")
    report_warnings(manager, progress, 0)
    mesh = backend.mesh
    root = find_records_folder(config.checkpoint)
    history = History(root, launch.memory_directory, progress)
    monitor = history.open(settings, run_progress, position, data, mesh)
    if config.monitor.record_samples and mesh.world_size > 1:
        backend.barrier()  # no rank may append to a file that rank 0 is still truncating
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
    has_trackers = mesh.rank == 0 and config.monitor.trackers
    trackers = TrackerProcess(settings, root, fixed_settings, step=position.step) if has_trackers else None
    loader = open_loader(
        data,
        Share(
            global_size=run_progress.batch,
            micro_size=config.batch.micro_size,
            dp_rank=mesh.data_rank,
            dp_size=mesh.data_size,
            end=run_progress.end,
        ),
        ahead=config.data.prefetch_steps,
        counts_folder=root / "data",
        writes=mesh.counts_samples,
        sample_group=_find_sample_group(mesh) if isinstance(data.training, Streams) else None,
    )
    timer.end_phase("files")
    progress.publish(total_steps=run_progress.count_total_steps(position))
    progress.record_resume(position.step, tokens=position.tokens, samples=position.samples)
    progress.publish(memory_step=manager.memory_step, durable_step=manager.durable_step)
    if mesh.rank == 0 and data.report is not None:
        _log.info("data: %s", data.report.format_line())
    _log.info(
        "%s; %s parameters%s, data parallel %d, tensor parallel %d, pipeline %d%s, step %d from %s",
        timer.format_summary(),
        f"{count_parameters(settings.shape):,}",
        f" ({settings.trainable.trained:,} are trained)" if config.tuning.freezes else "",
        mesh.data_size,
        mesh.tp_size,
        mesh.pp_size,
        f", context {mesh.cp_size}" if mesh.cp_size > 1 else "",
        position.step,
        manager.resumed_from,
    )
    return Run(
        config=config,
        run_progress=run_progress,
        backend=backend,
        data=data,
        loader=loader,
        manager=manager,
        recorder=recorder,
        monitor=monitor,
        progress=progress,
        position=position,
        stop=stop,
        initial_weights=initial_weights,
        trackers=trackers,
    )


def _open_run_data(settings: Settings, revisions: RunRevisions) -> tuple[Settings, Dataset]:
    """Open the data of the run's revisions; return them with the settings whose number of steps is known."""
    config, launch = settings.config, settings.launch
    config = config.model_copy(update={"data": revisions.pin(config.data)})
    with divide_file_checks(launch.local_rank, launch.local_world_size):
        data = open_run_data(config)
    return replace(settings, config=resolve_steps(config, data.epoch_samples)), data


def _refuse_unequal_ranks(
    config: TrainingConfig, backend: Backend, data: Dataset, initial_weights: InitialWeights
) -> None:
    """Raise UserError on all ranks if they do not read the same tokens and initial weights. Collective."""
    if not backend.is_equal_on_all_ranks(data.fingerprint):
        raise UserError(
            f"data.source {config.data.source}: the ranks do not read the same tokens: mount the same data everywhere, "
            "run the same image, or set one data.cacheDirectory on shared storage"
        )
    if not backend.is_equal_on_all_ranks(initial_weights.fingerprint):
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
