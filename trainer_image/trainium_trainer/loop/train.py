"""The training loop: one rank from its configuration to its exit code.

Guarantees:
- The position (step, samples, tokens) is equal on all ranks; besides the model state the loop keeps no other state.
- Every decision that could differ between ranks (stop, save, skip, fail) is made from values reduced over all ranks.
- The history never contains a step that the state does not contain.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import distributed as dist

from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.messages import AlertKind
from trainium_contract.wire.nonfinite_origin import format_nonfinite_ranks
from trainium_trainer.backends.mesh import wait_for_all_ranks
from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.data.loader import iterate_validation_batches
from trainium_trainer.exits import NumericalError
from trainium_trainer.loop.profile import StepProfiler, step_profiler
from trainium_trainer.loop.schedule import compute_learning_rate
from trainium_trainer.loop.setup import Run, report_warnings, set_up_run
from trainium_trainer.monitor.progress import ProgressWriter
from trainium_trainer.monitor.step_metrics import StepMetrics
from trainium_worker.progress_record import ProgressPhase

if TYPE_CHECKING:
    from trainium_trainer.backends.base import Evaluation, StepOutcome, StepTotals
    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.loader import RankBatch
    from trainium_trainer.loop.stop import StopRequest

_log = logging.getLogger("trainium.train")
_SECONDS_BETWEEN_LINES = 1.0


def train(settings: Settings, stop: StopRequest) -> ExitCode:
    """Train until the last step, a stop request, or an error. Raises the errors that `exits` maps to exit codes."""
    launch = settings.launch
    progress = ProgressWriter(launch.progress_file, generation=launch.generation, attempt=launch.attempt)
    stop.guard(progress.pulse)
    try:
        run = set_up_run(settings, progress, stop)
        with step_profiler(run, launch.progress_file) as profiler:
            code = run_steps(run, profiler)
        if code is ExitCode.FINISHED:
            from trainium_trainer.loop.after_training import run_stages  # noqa: PLC0415 - few runs have such stages

            run_stages(run, launch.local_rank)
        progress.publish(phase=ProgressPhase.FINISHED if code is ExitCode.FINISHED else ProgressPhase.YIELDED)
        wait_for_all_ranks(run.backend.mesh, progress.pulse)
        if run.trackers is not None:
            run.trackers.close(finished=code is ExitCode.FINISHED)
        run.manager.close()
        run.recorder.close()
        run.loader.close()
        dist.destroy_process_group()  # after the last collective of every rank
    except StaleGenerationError as error:
        progress.publish(phase=ProgressPhase.FAILED, newer_generation=error.newer)
        raise
    except BaseException:
        progress.publish(phase=ProgressPhase.FAILED)
        raise
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """The result of one step, equal on all ranks."""

    totals: StepTotals
    outcome: StepOutcome
    learning_rate: float
    position: Position
    """The position after the step."""
    started_at: float
    """The monotonic time before the reduction of the totals, in which a stopped process can pause."""


def run_steps(run: Run, profiler: StepProfiler) -> ExitCode:
    """Run steps until the last one or until any rank is asked to stop. Collective."""
    manager = run.manager
    steps = run.length.count_total_steps(run.position)
    skipped_in_a_row = 0
    reported_warnings = len(manager.warnings)
    step_began = last_line = time.perf_counter()
    gc.freeze()  # objects created at start-up live as long as the process
    while not run.length.is_over(run.position):
        step = run.position.step + 1
        if profiler.windows:
            step_began += profiler.start_window(step)
        batch = run.loader.read_batch(run.position.samples)
        update = _update_state(run, batch)
        skipped_in_a_row = 0 if update.outcome.applied else skipped_in_a_row + 1
        if not update.outcome.applied:
            _report_skipped_step(run, step, update.outcome, skipped_in_a_row)
        run.position = update.position
        stop, is_last = update.totals.stop, run.length.is_over(run.position)
        now = time.perf_counter()
        seconds, step_began = now - step_began, now
        measured = _measure_step(run, update, seconds=seconds, is_last=is_last)
        metrics, alerts = run.monitor.step(measured, new_tokens=update.totals.tokens)
        step_began += time.perf_counter() - now  # validation time does not count as time of the next step
        _record_step(run, update, batch, metrics)
        run.progress.record_step(metrics, seconds=seconds)
        if run.backend.mesh.rank == 0:  # only the monitors of rank 0 have the whole history
            for alert in alerts:
                _log.warning("%s", alert.message)
                run.progress.write_alert(alert.kind, step, alert.message)
        run.progress.publish(memory_step=manager.memory_step, durable_step=manager.durable_step)
        reported_warnings = report_warnings(manager, run.progress, reported_warnings)
        if run.backend.mesh.rank == 0 and (is_last or stop or now - last_line >= _SECONDS_BETWEEN_LINES):
            last_line = now
            speed = metrics.tokens_per_second or 0.0
            digits = 0 if speed >= 10 else 2
            _log.info("step %d/%d: loss %.4f, %.*f tokens/s", step, steps, update.outcome.loss, digits, speed)
        if profiler.windows:
            step_began += profiler.end_window(step)
        if stop and not is_last:
            return _save_and_leave(run, memory_ends=update.totals.memory_ends)
    run.stop.record_agreement()
    with run.progress.pulse.saving():
        manager.finish(run.position)
    run.progress.publish(memory_step=manager.memory_step, durable_step=manager.durable_step)
    return ExitCode.FINISHED


def _update_state(run: Run, batch: RankBatch) -> _Update:
    """Compute the gradients of a batch and update the state, unless they are not finite. Collective."""
    config, backend, manager = run.config, run.backend, run.manager
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        backend.accumulate(micro_batch, last=number == len(batch.micro_batches))
    with run.progress.pulse.saving():
        manager.finish_snapshot()
    started_at = time.monotonic()
    totals = backend.all_reduce_totals(stop=run.stop.requested, memory_ends=run.stop.memory_ends, vote=manager.vote())
    batch_size = run.length.compute_next_batch(run.position.samples)
    position = replace(
        run.position, step=run.position.step + 1, samples=run.position.samples + batch_size, batch=batch_size
    )
    rate = compute_learning_rate(config, run.length.count_completed_steps(position) - 1)
    outcome = backend.step(divisor=totals.divisor, learning_rate=rate, clip_norm=config.optimizer.clip_norm)
    tokens = position.tokens + totals.tokens * outcome.applied
    position = replace(position, tokens=tokens, loss=outcome.loss, grad_norm=outcome.gradient_norm)
    return _Update(totals=totals, outcome=outcome, learning_rate=rate, position=position, started_at=started_at)


def _measure_step(run: Run, update: _Update, *, seconds: float, is_last: bool) -> StepMetrics:
    """Return the figures of a step, with those of a validation where one is due. Collective."""
    position, outcome, norm_steps = update.position, update.outcome, run.config.monitor.parameter_norm_steps
    assert position.batch is not None  # every update sets it
    norm = run.backend.compute_parameter_norm() if norm_steps and position.step % norm_steps == 0 else None
    validation = None if update.totals.stop and not is_last else _validate(run, position.step, is_last=is_last)
    return StepMetrics(
        step=position.step,
        loss=outcome.loss,
        grad_norm=outcome.gradient_norm,
        learning_rate=update.learning_rate,
        tokens=position.tokens,
        samples=position.samples,
        batch=position.batch,
        seconds=seconds,
        parameter_norm=norm,
        validation_loss=None if validation is None else validation.loss,
        rewards=update.totals.rewards,
        validation_rewards=None if validation is None else validation.rewards,
    )


def _record_step(run: Run, update: _Update, batch: RankBatch, metrics: StepMetrics) -> None:
    """Record samples and figures of a step, take its snapshot, and start a durable save if the ranks voted for one."""
    with run.progress.pulse.saving():  # these write to storage or copy the state
        if run.recorder.writes:
            run.manager.check_owner(update.started_at)
        run.recorder.record_samples(update.position.step, batch.samples)
        run.recorder.step(metrics)
        if update.outcome.applied:
            run.manager.save_step(update.position, update.totals.votes)


def _validate(run: Run, step: int, *, is_last: bool) -> Evaluation | None:
    """Compute the validation loss where it is due. Collective."""
    data, config, mesh = run.data.validation, run.config, run.backend.mesh
    if data is None or config.data.validation is None:
        return None
    if step % config.data.validation.every_steps and not is_last:
        return None
    with run.progress.pulse.validating():
        batches = iterate_validation_batches(
            data, dp_rank=mesh.data_rank, dp_size=mesh.data_size, micro_size=config.batch.micro_size
        )
        evaluation = run.backend.evaluate(batches)
    if evaluation.rewards is None:  # the loss of pairs has no perplexity
        run.validation_loss = evaluation.loss
    if mesh.rank == 0:
        _log.info("step %d: validation loss %.4f on %d samples", step, evaluation.loss, data.num_samples)
    return evaluation


def _save_and_leave(run: Run, *, memory_ends: bool) -> ExitCode:
    """Save before the exit on which all ranks agreed, and log it. Collective."""
    run.stop.record_agreement()
    with run.progress.pulse.saving():
        run.manager.save_before_exit(run.position, memory_ends=memory_ends)
    run.progress.publish(memory_step=run.manager.memory_step, durable_step=run.manager.durable_step)
    _log.info("asked to leave: saved step %d", run.position.step)
    return ExitCode.YIELDING


def _report_skipped_step(run: Run, step: int, outcome: StepOutcome, skipped_in_a_row: int) -> None:
    """Report a skipped step. Raises NumericalError when more were skipped in a row than the configuration allows."""
    tolerance = run.config.non_finite_tolerance
    problem = f"step {step}: loss is {outcome.loss}, gradient norm is {outcome.gradient_norm}"
    problem += format_nonfinite_ranks(outcome.nonfinite_ranks, run.backend.mesh.world_size)
    if names := outcome.nonfinite_parameters:
        problem += f" (gradients that are not finite: {len(names)}, nearest to the loss that of {names[-1]})"
    if skipped_in_a_row > tolerance:
        raise NumericalError(
            f"{problem}, {skipped_in_a_row} such in a row (nonFiniteTolerance is {tolerance}): lower "
            "optimizer.learningRate, or look at the samples of this step (monitor.recordSamples)"
        )
    _log.warning("%s: skipped", problem)
    if run.backend.mesh.rank == 0:
        message = f"{problem}: skipped, {skipped_in_a_row} of at most {tolerance} in a row"
        run.progress.write_alert(AlertKind.STEP_SKIPPED, step, message)
