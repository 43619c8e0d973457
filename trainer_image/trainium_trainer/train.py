"""The training loop: one rank from its configuration to its exit code.

Invariants: the position (step, samples, tokens) is equal on all ranks and is all that the loop remembers beside the
state; every decision that could differ between ranks (stop, save, skip, give up) is taken from numbers that all ranks
have summed together; nothing is written to the history that the state does not contain.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_trainer.backends.native import NativeBackend
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.manager import CheckpointManager
from trainium_trainer.data.loader import Loader, samples_at
from trainium_trainer.data.packing import open_tokens
from trainium_trainer.exits import NumericalError, UserError
from trainium_trainer.monitor.progress import ProgressPhase, ProgressWriter
from trainium_trainer.monitor.throughput import Throughput
from trainium_trainer.monitor.writers import Recorder, step_record
from trainium_trainer.schedule import learning_rate

if TYPE_CHECKING:
    from trainium_contract.trainer import TrainingConfig
    from trainium_trainer.backends.base import Backend
    from trainium_trainer.config import Settings
    from trainium_trainer.stop import StopRequest

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
    backend: Backend
    loader: Loader
    manager: CheckpointManager
    recorder: Recorder
    progress: ProgressWriter
    position: Position
    stopwatch: Stopwatch
    stop: StopRequest


def train(settings: Settings, stop: StopRequest) -> ExitCode:
    """Train until the last step, a request to leave, or an error. Raises what `exits` knows."""
    launch = settings.launch
    progress = ProgressWriter(launch.progress_file, generation=launch.generation, attempt=launch.attempt)
    try:
        run = start(settings, progress, stop)
        code = loop(run)
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


def start(settings: Settings, progress: ProgressWriter, stop: StopRequest) -> Run:
    """Open the data, meet the other ranks, build the state and find where to go on. Collective."""
    config, launch = settings.config, settings.launch
    stopwatch = Stopwatch()
    # Data first: what is wrong with it is found before a device or a process group is touched.
    tokens = open_tokens(config.data)
    stopwatch.lap("data")
    backend: Backend = NativeBackend(settings)
    stopwatch.lap("process group")
    if launch.world_size > 1 and not backend.agree(tokens.fingerprint):
        raise UserError(
            f"data.source {config.data.source}: the ranks do not read the same tokens: mount the same data everywhere, "
            "run the same image, or set one data.cacheDirectory on shared storage"
        )
    backend.build()
    stopwatch.lap("model")
    manager = CheckpointManager(
        config.checkpoint,
        state=backend.state,
        mesh=backend.mesh,
        generation=launch.generation,
        memory_directory=launch.memory_directory,
        config_digest=settings.digest(tokens.identity),
        run=launch.run_id,
    )
    position = manager.resume()
    if position is None:
        backend.initialize(config.seed)
        position = Position(step=0, samples=0, tokens=0)
    stopwatch.lap("state")
    _report_warnings(manager, progress, 0)
    mesh = backend.mesh
    root = Path(config.checkpoint.path)
    if mesh.rank == 0:
        Recorder.rewind(root, position.step)
        _mend_history(config, root, position, tokens.num_samples)
    if config.monitor.record_samples and mesh.world_size > 1:
        backend.barrier()  # nobody appends to a file that rank 0 still shortens
    recorder = Recorder(
        root,
        rank=mesh.rank,
        dp_rank=mesh.dp_rank if mesh.tp_rank == 0 else None,
        tensorboard=config.monitor.tensorboard,
        record_samples=config.monitor.record_samples,
        resume_step=position.step,
    )
    loader = Loader(
        tokens,
        seed=config.data.seed,
        global_size=config.batch.global_size,
        micro_size=config.batch.micro_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
    )
    stopwatch.lap("files")
    progress.resumed(position.step, tokens=position.tokens, samples=position.samples)
    progress.checkpoints(memory_step=manager.memory_step, durable_step=manager.durable_step)
    _log.info(
        "%s; %s parameters, data parallel %d, tensor parallel %d, step %d from %s",
        stopwatch.line(),
        f"{settings.shape.num_parameters:,}",
        mesh.dp_size,
        mesh.tp_size,
        position.step,
        manager.resumed_from,
    )
    return Run(config, backend, loader, manager, recorder, progress, position, stopwatch, stop)


def _mend_history(config: TrainingConfig, root: Path, position: Position, num_samples: int) -> None:
    """Write what a rank that was lost right after the resumed step did not get to write of it."""
    if position.loss is None or position.grad_norm is None:
        return
    batch = config.batch.global_size
    Recorder.mend(
        root,
        step_record(
            step=position.step,
            loss=position.loss,
            grad_norm=position.grad_norm,
            learning_rate=learning_rate(config, position.step - 1),
            tokens=position.tokens,
            samples=position.samples,
            seconds=None,
        ),
        samples=samples_at(position.samples - batch, batch, num_samples=num_samples, seed=config.data.seed)
        if config.monitor.record_samples
        else (),
    )


def loop(run: Run) -> ExitCode:
    """Steps until the last one or until any rank is asked to leave. Collective."""
    config, manager = run.config, run.manager
    throughput = Throughput()
    skipped = 0
    warned = len(manager.warnings)
    began = last_line = time.perf_counter()
    gc.freeze()  # what start-up made lives as long as the process
    while run.position.step < config.steps:
        step = run.position.step + 1
        batch = run.loader.batch_at(run.position.samples)
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            run.backend.accumulate(micro_batch, last=number == len(batch.micro_batches))
        manager.before_update()
        totals = run.backend.totals(stop=run.stop.requested, memory_ends=run.stop.memory_ends, vote=manager.vote())
        norm = run.backend.gradient_norm(totals.tokens)
        rate = learning_rate(config, step - 1)
        finite = math.isfinite(totals.loss) and math.isfinite(norm)
        if finite:
            skipped = 0
            clip = min(1.0, config.optimizer.clip_norm / (norm + 1e-6))
            run.backend.update(learning_rate=rate, gradient_scale=clip / totals.tokens)
        else:
            skipped += 1
            _refuse_non_finite(config, step, totals.loss, norm, skipped)
            run.backend.discard()
        run.position = Position(
            step=step,
            samples=run.position.samples + config.batch.global_size,
            tokens=run.position.tokens + totals.tokens * finite,
            loss=totals.loss,
            grad_norm=norm,
        )
        now = time.perf_counter()
        seconds, began = now - began, now
        speed = throughput.add(totals.tokens, seconds)
        run.recorder.samples(step, batch.samples)
        run.recorder.step(
            step=step,
            loss=totals.loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=run.position.tokens,
            samples=run.position.samples,
            seconds=seconds,
            tokens_per_second=speed,
        )
        if finite:
            manager.after_step(run.position, totals.votes)
        run.progress.step_done(
            step=step,
            loss=totals.loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=run.position.tokens,
            samples=run.position.samples,
            seconds=seconds,
            tokens_per_second=speed,
        )
        run.progress.checkpoints(memory_step=manager.memory_step, durable_step=manager.durable_step)
        warned = _report_warnings(manager, run.progress, warned)
        last = step == config.steps
        if run.backend.mesh.rank == 0 and (last or totals.stop or now - last_line >= _SECONDS_BETWEEN_LINES):
            last_line = now
            _log.info("step %d/%d: loss %.4f, %.0f tokens/s", step, config.steps, totals.loss, speed)
        if totals.stop and not last:
            return _leave(run, memory_ends=totals.memory_ends)
    manager.finish(run.position)
    run.progress.checkpoints(memory_step=manager.memory_step, durable_step=manager.durable_step)
    return ExitCode.FINISHED


def _leave(run: Run, *, memory_ends: bool) -> ExitCode:
    """Save as every rank agreed, and say so. Collective."""
    run.manager.yield_(run.position, memory_ends=memory_ends)
    run.progress.checkpoints(memory_step=run.manager.memory_step, durable_step=run.manager.durable_step)
    _log.info("asked to leave: saved step %d", run.position.step)
    return ExitCode.YIELDING


def _refuse_non_finite(config: TrainingConfig, step: int, loss: float, norm: float, skipped: int) -> None:
    """Raise NumericalError when more steps in a row were skipped than the configuration bears."""
    if skipped > config.non_finite_tolerance:
        raise NumericalError(
            f"step {step}: loss is {loss}, gradient norm is {norm}, {skipped} such in a row "
            f"(nonFiniteTolerance is {config.non_finite_tolerance}): lower optimizer.learningRate, or look at the "
            "samples of this step (monitor.recordSamples)"
        )
    _log.warning("step %d: loss is %s, gradient norm is %s: skipped", step, loss, norm)


def _report_warnings(manager: CheckpointManager, progress: ProgressWriter, already: int) -> int:
    """Pass on what the checkpoint manager has to say; returns how many sentences were seen."""
    for sentence in manager.warnings[already:]:
        _log.warning("%s", sentence)
        progress.notice(sentence)
    return len(manager.warnings)
