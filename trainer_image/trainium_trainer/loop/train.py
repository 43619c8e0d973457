"""The training loop: one rank from its configuration to its exit code.

Invariants: the position (step, samples, tokens) is equal on all ranks and is all that the loop remembers beside the
state; every decision that could differ between ranks (stop, save, skip, give up) is taken from numbers that all ranks
have summed together; nothing is written to the history that the state does not contain.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.messages import AlertKind
from trainium_contract.wire.nonfinite_origin import told_origin
from trainium_trainer.artifacts.stage import at_milestones
from trainium_trainer.backends.choose import find_backend, make_backend
from trainium_trainer.backends.sample_group import fellows_of
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.manager import CheckpointManager
from trainium_trainer.configuration.config import with_steps
from trainium_trainer.data.batches.broadcast import Fellows
from trainium_trainer.data.batches.loader import validation_batches
from trainium_trainer.data.batches.share import Share
from trainium_trainer.data.online.streams import Streams
from trainium_trainer.data.opening import open_data
from trainium_trainer.data.prepared.prepared import watching
from trainium_trainer.data.streaming import open_loader
from trainium_trainer.data.tokens.tokenizer import digest_of
from trainium_trainer.exits import NumericalError, UserError
from trainium_trainer.loop.course import Course
from trainium_trainer.loop.history import History
from trainium_trainer.loop.memory_check import told_at_start
from trainium_trainer.loop.schedule import learning_rate
from trainium_trainer.monitor.progress import ProgressPhase, ProgressWriter
from trainium_trainer.monitor.pulse import Activity
from trainium_trainer.monitor.writers import Recorder
from trainium_trainer.weights.beginning import Beginning

if TYPE_CHECKING:
    from trainium_contract.trainer.config import TrainingConfig
    from trainium_trainer.backends.base import Backend, StepOutcome
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.batches.loader import Loader
    from trainium_trainer.data.opening import Data
    from trainium_trainer.loop.stop import StopRequest
    from trainium_trainer.monitor.watch import Alert, Watch

_log = logging.getLogger("trainium.train")
_SECONDS_BETWEEN_LINES = 1.0


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
    course: Course
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
    begin: Beginning
    validation_loss: float | None = None
    """The newest one that this process has measured."""


def train(settings: Settings, stop: StopRequest) -> ExitCode:
    """Train until the last step, a request to leave, or an error. Raises what `exits` knows."""
    launch = settings.launch
    progress = ProgressWriter(launch.progress_file, generation=launch.generation, attempt=launch.attempt)
    stop.guard(progress.pulse)
    try:
        run = start(settings, progress, stop)
        code = loop(run)
        if code is ExitCode.FINISHED:
            _after(run, launch.local_rank)
        progress.phase(ProgressPhase.FINISHED if code is ExitCode.FINISHED else ProgressPhase.YIELDED)
        run.backend.barrier()
        run.manager.close()
        run.recorder.close()
        run.loader.close()
        run.backend.close()
    except BaseException:
        progress.phase(ProgressPhase.FAILED)
        raise
    return code


def _after(run: Run, node_rank: int) -> None:
    """What follows the last step, if anything does. Collective."""
    from trainium_trainer.loop.after_training import has_stages, run_stages  # noqa: PLC0415 - few runs have such stages

    if has_stages(run.config):
        run.stop.nothing_to_save()
        run_stages(
            run.config,
            run.backend.mesh,
            run.progress,
            step=run.position.step,
            begin=run.begin,
            tokenizer=run.data.tokenizer,
            node_rank=node_rank,
            trained_loss=run.validation_loss,
        )


def start(settings: Settings, progress: ProgressWriter, stop: StopRequest) -> Run:
    """Open the data, meet the other ranks, build the state and find where to go on. Collective."""
    launch = settings.launch
    stopwatch = Stopwatch()
    # What is wrong with packages, devices or data is found before a device or a process group is touched.
    choice = find_backend(settings)
    with watching(launch.local_rank, launch.local_world_size):
        given = settings.config
        data = open_data(
            given.data, given.batch.global_size, epochs=given.epochs, steps_differ=given.batch.tolerance > 0
        )
    config = with_steps(settings.config, data.epoch_samples)
    settings = replace(settings, config=config)
    course = Course.of(settings, data.epoch_samples)
    begin = Beginning.open(config, settings.shape)
    stopwatch.lap("data")
    backend = make_backend(choice, settings, progress.pulse)
    stopwatch.lap("process group")
    if launch.world_size > 1 and not backend.agree(data.fingerprint):
        raise UserError(
            f"data.source {config.data.source}: the ranks do not read the same tokens: mount the same data everywhere, "
            "run the same image, or set one data.cacheDirectory on shared storage"
        )
    if launch.world_size > 1 and not backend.agree(begin.fingerprint):
        raise UserError(
            f"model.weights {config.model.weights}: the ranks do not begin with the same model: mount the same folder "
            "everywhere"
        )
    for sentence in told_at_start(settings, backend.mesh.device):
        _log.warning("%s", sentence)
        progress.notice(sentence)
    backend.build()
    stopwatch.lap("model")
    progress.pulse.enter(Activity.LOAD)
    if begin.base is not None and config.tuning.freezes:
        backend.load_frozen(begin.base)
        stopwatch.lap("base")
    manager = CheckpointManager(
        config.checkpoint,
        state=backend.state,
        mesh=backend.mesh,
        generation=launch.generation,
        memory_directory=launch.memory_directory,
        after_milestone=at_milestones(config, backend.mesh, progress, base=begin.base, tokenizer=data.tokenizer),
        settings=settings.fixed(
            data.identity, digest_of(data.tokenizer), weights=begin.base_digest, adapter=begin.adapter_digest
        ),
        run=launch.run_id,
        job=launch.job,
    )
    with progress.pulse.work_with_collectives:
        position = manager.resume()
    if position is None:
        backend.initialize(config.seed, begin.base, begin.adapter)
        position = Position(step=0, samples=0, tokens=0)
    stopwatch.lap("state")
    _report_warnings(manager, progress, 0)
    mesh = backend.mesh
    root = Path(config.checkpoint.records)
    history = History(root, launch.memory_directory, progress)
    watch = history.open(settings, course, position, data, mesh)
    if config.monitor.record_samples and mesh.world_size > 1:
        backend.barrier()  # nobody appends to a file that rank 0 still shortens
    recorder = Recorder(
        root,
        rank=mesh.rank,
        dp_rank=mesh.dp_rank if mesh.counts_samples else None,
        tensorboard=config.monitor.tensorboard,
        record_samples=config.monitor.record_samples,
        resume_step=position.step,
        aside=history.aside,
        tell=history.tell,
    )
    loader = open_loader(
        data,
        Share(
            global_size=course.batch,
            micro_size=config.batch.micro_size,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
            end=course.end,
        ),
        ahead=config.data.prefetch_steps,
        notes=root / "data",
        writes=mesh.counts_samples,
        fellows=fellows_of(mesh) if isinstance(data.training, Streams) else Fellows(),
    )
    stopwatch.lap("files")
    if mesh.rank == 0 and data.report is not None:
        _log.info("data: %s", data.report.line())
    progress.total_steps(course.total_steps(position))
    progress.resumed(position.step, tokens=position.tokens, samples=position.samples)
    progress.checkpoints(memory_step=manager.memory_step, durable_step=manager.durable_step)
    _log.info(
        "%s; %s parameters%s, data parallel %d, tensor parallel %d, pipeline %d, step %d from %s",
        stopwatch.line(),
        f"{settings.shape.num_parameters:,}",
        f" ({settings.choice.trained:,} are trained)" if config.tuning.freezes else "",
        mesh.dp_size,
        mesh.tp_size,
        mesh.pp_size,
        position.step,
        manager.resumed_from,
    )
    return Run(
        config, course, backend, data, loader, manager, recorder, watch, progress, position, stopwatch, stop, begin
    )


def loop(run: Run) -> ExitCode:
    """Steps until the last one or until any rank is asked to leave. Collective."""
    config, course, manager, pulse = run.config, run.course, run.manager, run.progress.pulse
    steps = course.total_steps(run.position)
    skipped = 0
    warned = len(manager.warnings)
    began = last_line = time.perf_counter()
    gc.freeze()  # what start-up made lives as long as the process
    while not course.is_over(run.position):
        step = run.position.step + 1
        taken = course.next_batch(run.position.samples)
        batch = run.loader.batch_at(run.position.samples)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            run.backend.accumulate(micro_batch, last=number == len(batch.micro_batches))
        with pulse.saving:
            manager.before_update()
        needed = time.monotonic()  # not after: stopped inside, it may find its peers' parts in its sockets much later
        totals = run.backend.totals(stop=run.stop.requested, memory_ends=run.stop.memory_ends, vote=manager.vote())
        after = replace(run.position, step=step, samples=run.position.samples + taken, batch=taken)
        rate = learning_rate(config, course.done(after) - 1)
        done = run.backend.step(tokens=totals.tokens, learning_rate=rate, clip_norm=config.optimizer.clip_norm)
        skipped = 0 if done.applied else skipped + 1
        if not done.applied:
            _skip(run, step, done, skipped)
        run.position = replace(
            after,
            tokens=after.tokens + totals.tokens * done.applied,
            loss=done.loss,
            grad_norm=done.gradient_norm,
        )
        last = course.is_over(run.position)
        now = time.perf_counter()
        seconds, began = now - began, now
        figures, alerts = run.watch.step(
            step=step,
            loss=done.loss,
            grad_norm=done.gradient_norm,
            learning_rate=rate,
            tokens=run.position.tokens,
            samples=run.position.samples,
            batch=taken,
            new_tokens=totals.tokens,
            seconds=seconds,
            parameter_norm=_parameter_norm(run, step),
            validation_loss=None if totals.stop and not last else _validation_loss(run, step, last=last),
        )
        began += time.perf_counter() - now  # measurements are no part of the next step
        with pulse.saving:  # these write to storage or copy the state
            if run.recorder.writes:
                manager.check_owner(needed)
            run.recorder.samples(step, batch.samples)
            run.recorder.step(figures)
            if done.applied:
                manager.after_step(run.position, totals.votes)
        run.progress.step_done(figures, seconds=seconds)
        _tell(run, step, alerts)
        run.progress.checkpoints(memory_step=manager.memory_step, durable_step=manager.durable_step)
        warned = _report_warnings(manager, run.progress, warned)
        if run.backend.mesh.rank == 0 and (last or totals.stop or now - last_line >= _SECONDS_BETWEEN_LINES):
            last_line = now
            _log.info("step %d/%d: loss %.4f, %.0f tokens/s", step, steps, done.loss, figures.tokens_per_second)
        if totals.stop and not last:
            return _leave(run, memory_ends=totals.memory_ends)
    run.stop.agreed()
    with pulse.saving:
        manager.finish(run.position)
    run.progress.checkpoints(memory_step=manager.memory_step, durable_step=manager.durable_step)
    return ExitCode.FINISHED


def _parameter_norm(run: Run, step: int) -> float | None:
    """The norm of all parameters where it is due. Collective."""
    every = run.config.monitor.parameter_norm_steps
    return run.backend.parameter_norm() if every and step % every == 0 else None


def _validation_loss(run: Run, step: int, *, last: bool) -> float | None:
    """The loss on what is held back, where it is due. Collective."""
    data, config, mesh = run.data.validation, run.config, run.backend.mesh
    if data is None or config.data.validation is None:
        return None
    if step % config.data.validation.every_steps and not last:
        return None
    with run.progress.pulse.measuring:
        batches = validation_batches(
            data, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size, micro_size=config.batch.micro_size
        )
        loss = run.validation_loss = run.backend.evaluate(batches)
    if mesh.rank == 0:
        _log.info("step %d: validation loss %.4f on %d samples", step, loss, data.num_samples)
    return loss


def _tell(run: Run, step: int, alerts: tuple[Alert, ...]) -> None:
    """Pass on what the monitors of rank 0 have found: only they know the whole history."""
    if run.backend.mesh.rank == 0:
        for alert in alerts:
            _log.warning("%s", alert.sentence)
            run.progress.alert(alert.kind, step, alert.sentence)


def _leave(run: Run, *, memory_ends: bool) -> ExitCode:
    """Save as every rank agreed, and say so. Collective."""
    run.stop.agreed()
    with run.progress.pulse.saving:
        run.manager.yield_(run.position, memory_ends=memory_ends)
    run.progress.checkpoints(memory_step=run.manager.memory_step, durable_step=run.manager.durable_step)
    _log.info("asked to leave: saved step %d", run.position.step)
    return ExitCode.YIELDING


def _skip(run: Run, step: int, done: StepOutcome, skipped: int) -> None:
    """Say that a step was skipped; NumericalError when that were more in a row than the configuration bears."""
    tolerance = run.config.non_finite_tolerance
    found = f"step {step}: loss is {done.loss}, gradient norm is {done.gradient_norm}"
    found += told_origin(done.origins, run.backend.mesh.world_size)
    if done.culprits:
        found += (
            f" (not finite on this rank: {len(done.culprits)} gradients, nearest to the loss that of "
            f"{done.culprits[-1]})"
        )
    if skipped > tolerance:
        raise NumericalError(
            f"{found}, {skipped} such in a row (nonFiniteTolerance is {tolerance}): lower optimizer.learningRate, or "
            "look at the samples of this step (monitor.recordSamples)"
        )
    _log.warning("%s: skipped", found)
    if run.backend.mesh.rank == 0:
        sentence = f"{found}: skipped, {skipped} of at most {tolerance} in a row"
        run.progress.alert(AlertKind.STEP_SKIPPED, step, sentence)


def _report_warnings(manager: CheckpointManager, progress: ProgressWriter, already: int) -> int:
    """Pass on what the checkpoint manager has to say; returns how many sentences were seen."""
    for sentence in manager.warnings[already:]:
        _log.warning("%s", sentence)
        progress.notice(sentence)
    return len(manager.warnings)
