"""One rank, put together: data, peers, model, checkpoints and records, until the first step can be made.

Guarantees:
- What is wrong with packages, devices or data is found before a device or a process group is touched.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from trainium_contract.models.parameters import count_parameters
from trainium_trainer.artifacts.stage import at_milestones
from trainium_trainer.backends.choose import find_backend, make_backend
from trainium_trainer.backends.device import open_store
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.manager import CheckpointManager
from trainium_trainer.checkpoint.root.metrics_copy import records_folder
from trainium_trainer.checkpoint.root.owner import Start
from trainium_trainer.configuration.config import Settings, with_steps
from trainium_trainer.data.batches.broadcast import BatchGroup
from trainium_trainer.data.batches.loader import Loader, Share
from trainium_trainer.data.online.streams import Streams
from trainium_trainer.data.opening import Data, open_data
from trainium_trainer.data.prepared.prepared import watching
from trainium_trainer.data.revisions import RunRevisions
from trainium_trainer.data.streaming import open_loader
from trainium_trainer.data.tokens.tokenizer import digest_of
from trainium_trainer.exits import UserError
from trainium_trainer.loop.history import History
from trainium_trainer.loop.memory_check import warnings_at_start
from trainium_trainer.loop.references import load_references
from trainium_trainer.loop.run_progress import RunProgress
from trainium_trainer.monitor.writers import Recorder
from trainium_trainer.storage.opening import open_storage
from trainium_trainer.trackers.process import TrackerProcess, refuse_missing_trackers
from trainium_trainer.weights.initial import InitialWeights
from trainium_worker import Activity

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.backends.base import Backend, Mesh
    from trainium_trainer.loop.stop import StopRequest
    from trainium_trainer.monitor.progress import ProgressWriter
    from trainium_trainer.monitor.watch import Watch

_log = logging.getLogger("trainium.train")


class Stopwatch:
    """Names where start-up time goes."""

    def __init__(self) -> None:
        self._last = self._first = time.perf_counter()
        self._laps: list[str] = []

    def lap(self, name: str) -> None:
        """Give the time since the last lap a name."""
        now = time.perf_counter()
        self._laps.append(f"{name} {now - self._last:.2f} s")
        self._last = now

    def line(self) -> str:
        """All laps and their sum."""
        return f"start-up: {', '.join(self._laps)}, together {self._last - self._first:.2f} s"


@dataclass(slots=True)
class Run:
    """The parts of one rank, put together by `start`."""

    config: TrainingConfig
    course: RunProgress
    backend: Backend
    data: Data
    loader: Loader
    manager: CheckpointManager
    recorder: Recorder
    watch: Watch
    progress: ProgressWriter
    position: Position
    stopwatch: Stopwatch
    stop: StopRequest
    begin: InitialWeights
    trackers: TrackerProcess | None = None
    """Process of rank 0 for its trackers; None without any."""
    validation_loss: float | None = None
    """The newest one that this process has measured."""


def start(settings: Settings, progress: ProgressWriter, stop: StopRequest) -> Run:
    """Open the data, meet the other ranks, build the state and find where to go on. Collective."""
    launch = settings.launch
    stopwatch = Stopwatch()
    # What is wrong with packages, devices or data is found before a device or a process group is touched.
    refuse_missing_trackers(settings.config.monitor.trackers)
    choice = find_backend(settings)
    given = settings.config
    if launch.rank == 0 and given.artifacts.push is not None and not launch.is_restart:  # a restart needs no hub
        from trainium_trainer.artifacts.push import open_repository  # noqa: PLC0415 - few runs ask the hub

        open_repository(given)
    revisions = RunRevisions(
        open_storage(given.checkpoint.path), rank=launch.rank, open_store=lambda: open_store(launch)
    )
    given = given.model_copy(update={"data": revisions.pin(given.data)})
    with watching(launch.local_rank, launch.local_world_size):
        data = open_data(
            given.data, given.batch.global_size, epochs=given.epochs, steps_differ=given.batch.tolerance > 0
        )
    config = with_steps(given, data.epoch_samples)
    settings = replace(settings, config=config)
    course = RunProgress.of(settings, data.epoch_samples)
    begin = InitialWeights.open(config, settings.shape)
    stopwatch.lap("data")
    backend = make_backend(choice, settings, progress.pulse)
    stopwatch.lap("process group")
    if config.evaluate.enabled and config.evaluate.tasks is not None:
        from trainium_trainer.evaluate.stage import refuse_unmeasurable  # noqa: PLC0415 - imports transformers

        refuse_unmeasurable(backend.mesh.device.type)
    if launch.world_size > 1 and not backend.agree(data.fingerprint):
        raise UserError(
            f"data.source {config.data.source}: the ranks do not read the same tokens: mount the same data everywhere, "
            "run the same image, or set one data.cacheDirectory on shared storage"
        )
    if launch.world_size > 1 and not backend.agree(begin.fingerprint):
        raise UserError(
            f"model.weights {config.model.weights}: the ranks do not begin with the same models: mount the same "
            "folders everywhere"
        )
    for sentence in warnings_at_start(settings, backend.mesh.device):
        _log.warning("%s", sentence)
        progress.notice(sentence)
    backend.build()
    stopwatch.lap("model")
    progress.pulse.enter(Activity.LOAD)
    if begin.reference is not None:
        load_references(settings, data, begin.reference, backend)
        stopwatch.lap("references")
    if begin.base is not None and config.tuning.freezes:
        backend.load_frozen(begin.base)
        stopwatch.lap("base")
    fixed = settings.fixed(
        data.identity,
        digest_of(data.tokenizer),
        weights=begin.base_digest,
        adapter=begin.adapter_digest,
        reference=begin.reference_digest,
    )
    manager = CheckpointManager(
        config.checkpoint,
        state=backend.state,
        mesh=backend.mesh,
        start=Start(launch.generation, launch.job, launch.run_id),
        memory_directory=launch.memory_directory,
        after_milestone=at_milestones(config, backend.mesh, progress, base=begin.base, tokenizer=data.tokenizer),
        settings=fixed,
    )
    with progress.pulse.work_with_collectives:
        position = manager.resume()
    if launch.rank == 0:
        revisions.write()
    if position is None:
        backend.initialize(config.seed, begin.base, begin.adapter)
        position = Position(step=0, samples=0, tokens=0)
    stopwatch.lap("state")
    report_warnings(manager, progress, 0)
    mesh = backend.mesh
    root = records_folder(config.checkpoint)
    history = History(root, launch.memory_directory, progress)
    watch = history.open(settings, course, position, data, mesh)
    if config.monitor.record_samples and mesh.world_size > 1:
        backend.barrier()  # nobody appends to a file that rank 0 still shortens
    recorder = Recorder(
        root,
        rank=mesh.rank,
        dp_rank=mesh.data_rank if mesh.counts_samples else None,
        tensorboard=config.monitor.tensorboard,
        record_samples=config.monitor.record_samples,
        resume_step=position.step,
        aside=history.aside,
        notify=history.notify,
    )
    tracked = mesh.rank == 0 and config.monitor.trackers
    trackers = TrackerProcess(settings, root, fixed, step=position.step) if tracked else None
    loader = open_loader(
        data,
        Share(
            global_size=course.batch,
            micro_size=config.batch.micro_size,
            dp_rank=mesh.data_rank,
            dp_size=mesh.data_size,
            end=course.end,
        ),
        ahead=config.data.prefetch_steps,
        notes=root / "data",
        writes=mesh.counts_samples,
        batch_group=_batch_group_of(mesh) if isinstance(data.training, Streams) else BatchGroup(),
    )
    stopwatch.lap("files")
    if mesh.rank == 0 and data.report is not None:
        _log.info("data: %s", data.report.line())
    progress.total_steps(course.total_steps(position))
    progress.resumed(position.step, tokens=position.tokens, samples=position.samples)
    progress.checkpoints(memory_step=manager.memory_step, durable_step=manager.durable_step)
    _log.info(
        "%s; %s parameters%s, data parallel %d, tensor parallel %d, pipeline %d%s, step %d from %s",
        stopwatch.line(),
        f"{count_parameters(settings.shape):,}",
        f" ({settings.choice.trained:,} are trained)" if config.tuning.freezes else "",
        mesh.data_size,
        mesh.tp_size,
        mesh.pp_size,
        f", context {mesh.cp_size}" if mesh.cp_size > 1 else "",
        position.step,
        manager.resumed_from,
    )
    return Run(
        config,
        course,
        backend,
        data,
        loader,
        manager,
        recorder,
        watch,
        progress,
        position,
        stopwatch,
        stop,
        begin,
        trackers,
    )


def report_warnings(manager: CheckpointManager, progress: ProgressWriter, already: int) -> int:
    """Report the warnings of the checkpoint manager; return how many there were in all."""
    for sentence in manager.warnings[already:]:
        _log.warning("%s", sentence)
        progress.notice(sentence)
    return len(manager.warnings)


def _batch_group_of(mesh: Mesh) -> BatchGroup:
    """Find the ranks that train on this rank's samples. Collective where samples are shared."""
    if mesh.tp_size * mesh.pp_size * mesh.cp_size == 1:
        return BatchGroup(mesh.rank, mesh.rank)
    places = [torch.zeros(2, dtype=torch.int64) for _ in range(mesh.world_size)]
    dist.all_gather(places, torch.tensor([mesh.data_rank, mesh.counts_samples]), group=mesh.world)
    found = [tuple(place.tolist()) for place in places]
    same = [rank for rank, (data_rank, _) in enumerate(found) if data_rank == mesh.data_rank]
    leader = next(rank for rank in same if found[rank][1])
    return BatchGroup(leader, mesh.rank, tuple(rank for rank in same if rank != leader), mesh.world)
