"""Collect what the agent reports to the coordinator: phase, progress, failures, restarts.

Guarantees:
- The report is used in the agent's event loop only, so no value of an old generation is reported for the new one.
- Sequence numbers count up over the life of the agent and are never used twice.
- A restart has resumed when a step completes that was not completed before the failure, or when the ranks have passed
  their last step again.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from trainium_agent.exits.diagnosis import MESSAGE_CHARACTERS, ExitDiagnoser, describe_exit, find_last_runtime_message
from trainium_contract.exit_codes import ExitCode
from trainium_contract.sizes import MAX_COMPILED
from trainium_contract.status.results import FIGURES, Alert, RunStage, read_results
from trainium_contract.wire.messages import (
    MAX_GENERATION,
    CheckResult,
    HeartbeatRequest,
    ProcessFailure,
    Progress,
    RestartRecord,
    StepTiming,
    StuckRank,
    TrainerPhase,
    WorkerPhase,
)
from trainium_worker.progress_record import ProgressPhase, read_alerts, read_notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.workload import Workload
    from trainium_contract.faults.causes import Cause
    from trainium_contract.spec.health import PreflightCheck
    from trainium_contract.spec.precompile import CompiledSize
    from trainium_worker.progress_record import ProgressRecord

_KEPT = 8
_LISTED_RANKS = 64
_LAST_LINES_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure; its message is created when the last lines of output have arrived."""

    sequence: int
    generation: int
    process: RankProcess
    exit_code: int
    step: int
    sentence: str = ""
    """Reason, for a process that the agent ended; the output does not show it."""
    at: float = 0.0
    """Unix seconds, for a process that the agent ended."""
    newer_generation: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the last lines have arrived; a child that holds the pipe open delays it for a second only."""
        if self.sentence or self.process.output.complete.is_set():
            return True
        return time.time() > self.process.ended_at + _LAST_LINES_SECONDS

    def build_message(self) -> ProcessFailure:
        """Return the failure as sent to the coordinator; it does not change once complete."""
        runtime_message = None if self.sentence else find_last_runtime_message(self.process)
        return ProcessFailure(
            sequence=self.sequence,
            generation=self.generation,
            attempt=self.process.attempt,
            rank=self.process.rank,
            exit_code=self.exit_code,
            step=self.step,
            message=self.sentence[:MESSAGE_CHARACTERS] or describe_exit(self.process),
            runtime_status=runtime_message.status if runtime_message is not None else None,
            output_line="" if self.sentence else self.process.output.find_last_error_sign(),
            newer_generation=self.newer_generation,
            at=self.at or self.process.ended_at,
        )


class PodReport:
    """The agent's view of its pod, the source of every heartbeat."""

    def __init__(self, settings: AgentSettings, workload: Workload, send_now: Callable[[], None]) -> None:
        self._settings = settings
        self._workload = workload
        self._send_now = send_now
        self.phase = WorkerPhase.PREFLIGHT
        self.generation = self.attempt = 0
        self.progress_files: Sequence[Path] = ()
        """Progress records of the ranks; that of the pod's first rank comes first."""
        self._progress: Progress | None = None
        self._failures: deque[_Failure] = deque(maxlen=_KEPT)
        self._restarts: deque[RestartRecord] = deque(maxlen=_KEPT)
        self._next_failure = 0
        self._next_restart = 0
        self._verdict: _Failure | ProcessFailure | None = None
        self._waiting_for: tuple[int, ...] = ()
        self._best_step = -1
        self.best_progress = -1.0
        """Highest observed step, plus number and completed share of a stage after the last step; -1 for none."""
        self._timed_attempt: tuple[int, int] = (0, -1)
        self._started = self._loaded = 0.0
        self._is_load_known = False
        self._stuck: tuple[StuckRank, ...] = ()
        self._left: tuple[int, int] | None = None
        """Generation and attempt of ranks that may still train, although a newer generation is known."""
        self._killed_generation = 0
        self._checks: dict[PreflightCheck, CheckResult] = {}
        self._compiled: tuple[CompiledSize, ...] = ()
        self.diagnoser = ExitDiagnoser(settings.rules_path, send_now)
        self.standby_warm: Callable[[], bool] = lambda: False
        self.timing: StepTiming | None = None
        """Step times of this pod's ranks; None until enough steps are complete."""

    @property
    def recovering(self) -> bool:
        """Whether a restart of this generation has not reached a new step yet."""
        return any(record.resumed_at is None and self._is_of_current_generation(record) for record in self._restarts)

    @property
    def verdict_code(self) -> int | None:
        """Exit code of the verdict, if this pod gave up with one."""
        verdict = self._verdict
        return None if verdict is None else verdict.exit_code

    def set_phase(self, phase: WorkerPhase, *, generation: int | None = None, attempt: int | None = None) -> None:
        """Change the phase, and the attempt with it; calls for a `generation` that is over have no effect.

        An attempt of the old generation would make the coordinator miss the first attempt of the new one.
        """
        if generation not in (None, self.generation):
            return
        changed = phase is not self.phase or attempt not in (None, self.attempt)
        self.phase = phase
        self.attempt = self.attempt if attempt is None else attempt
        if phase not in (WorkerPhase.JOINING, WorkerPhase.YIELDED, WorkerPhase.FAILED):
            self._waiting_for = ()
        if changed:
            self._send_now()

    def start_generation(self, generation: int, phase: WorkerPhase) -> None:
        """Record a newer generation; ranks of the old one may still be ending."""
        self._observe_last_step()
        self._left = (self.generation, self.attempt)
        self.generation = generation
        self.attempt = 0
        self._verdict = None
        self._waiting_for = ()
        if self._progress is not None:
            # The step remains until the new ranks report theirs; values of the old generation are reset.
            self._progress = self._progress.model_copy(
                update={"resume_step": None, "productive_seconds": 0.0, "started": 0.0, "loaded": 0.0}
            )
        self.set_phase(phase)

    def record_generation_start(self, cause: Cause) -> None:
        """Record that this pod, which has trained before, starts in a newer generation; no rank is alive."""
        stopped_at = self._observe_last_step()
        if self._best_step >= 0:
            self._add_restart(self.generation, 0, cause, stopped_at or time.time())

    def _observe_last_step(self) -> float:
        """Read the last step of the ranks, whichever attempt they are of; return when it ended, or 0 for none."""
        newest = self._workload.read_newest(self.progress_files)
        if newest is None:
            return 0.0
        record = newest[0]
        if record.step > 0 or record.resume_step > 0:
            self._best_step = max(self._best_step, record.step, record.resume_step)
        has_trained = RunStage.parse(record.stage) is RunStage.TRAIN and record.step > max(record.resume_step, 0)
        return max(_drop_nonfinite(record.updated) or 0.0, 0.0) if has_trained else 0.0

    def set_generation(self, generation: int) -> None:
        """Record a newer generation in which this pod cannot take part."""
        self.generation = generation
        self._send_now()

    def set_waiting_for(self, node_ranks: tuple[int, ...]) -> None:
        """Record the node ranks that the rendezvous waits for."""
        self._waiting_for = node_ranks[:_LISTED_RANKS]

    def record_failure(self, generation: int, process: RankProcess) -> None:
        """Record an unrequested exit."""
        self.observe()
        assert process.exit_code is not None
        self._add_failure(generation, process, process.exit_code)

    def record_hang(self, generation: int, process: RankProcess, sentence: str) -> None:
        """Record a process that the agent is about to end because it hangs."""
        self._add_failure(generation, process, ExitCode.HUNG, sentence, time.time())

    def _add_failure(
        self, generation: int, process: RankProcess, code: int, sentence: str = "", at: float = 0.0
    ) -> None:
        files, index = self.progress_files, process.local_rank
        reading = self._workload.read(files[index]) if index < len(files) else None
        step, newer = -1, 0
        if reading is not None and self._is_of_current_attempt(reading.record):
            step, newer = reading.record.step, reading.record.newer_generation
        newer = newer if 0 < newer <= MAX_GENERATION else 0
        self._failures.append(_Failure(self._next_failure, generation, process, code, step, sentence, at, newer))
        self._next_failure += 1
        self._send_now()

    def record_check(self, result: CheckResult) -> None:
        """Record the newest outcome of a check of this node."""
        self._checks = {**self._checks, result.check: result}
        self._send_now()

    def record_compiled_size(self, size: CompiledSize) -> None:
        """Record that the graphs for another size are compiled."""
        self._compiled = (*self._compiled, size)[-MAX_COMPILED:]
        self._send_now()

    def set_stuck_ranks(self, ranks: tuple[StuckRank, ...]) -> None:
        """Record the local ranks that are stalled."""
        changed, self._stuck = bool(ranks or self._stuck), ranks
        if changed:
            self._send_now()

    def set_verdict(self, process: RankProcess | None = None) -> None:
        """Set the verdict to the failure of this process, else to the newest one."""
        failures = [failure for failure in self._failures if failure.process is process] or list(self._failures)
        generation = failures[-1].generation
        if generation == self.generation:
            self._verdict = failures[-1]
        self.set_phase(WorkerPhase.FAILED, generation=generation)

    def set_pod_verdict(self, code: int, sentence: str) -> None:
        """Set a verdict on the pod itself, without a failed process."""
        self._verdict = ProcessFailure(
            sequence=self._next_failure,
            generation=self.generation,
            attempt=self.attempt,
            rank=0,
            exit_code=code,
            message=sentence[:MESSAGE_CHARACTERS],
            at=time.time(),
        )
        self._next_failure += 1
        self.set_phase(WorkerPhase.FAILED)

    def record_restart(self, generation: int, attempt: int, cause: Cause, failed_at: float) -> None:
        """Record that a restart in place starts."""
        self._observe_last_step()
        self._add_restart(generation, attempt, cause, failed_at)
        if self._progress is not None:
            self._progress = self._progress.model_copy(update={"started": 0.0, "loaded": 0.0})
        self.set_phase(WorkerPhase.JOINING, generation=generation, attempt=attempt)

    def _add_restart(self, generation: int, attempt: int, cause: Cause, failed_at: float) -> None:
        self._restarts.append(
            RestartRecord(
                sequence=self._next_restart,
                generation=generation,
                attempt=attempt,
                cause=cause,
                failed_at=failed_at,
                detected_at=time.time(),
                step_before=self._best_step,
            )
        )
        self._next_restart += 1

    def observe(self) -> None:
        """Read the ranks' progress and check whether a restart has resumed."""
        newest = self._workload.read_newest(self.progress_files)
        if newest is None:
            return
        record, path = newest
        if not self._is_of_current_attempt(record):
            self._count_last_steps(record)
            return
        self._record_times(record)
        stage = RunStage.parse(record.stage)
        is_training = stage is RunStage.TRAIN
        hang_detection = self._workload.hang_detection
        results = read_results(path)
        self._progress = Progress(
            step=max(record.step, 0),
            **{name: record.figures.get(name) for name in FIGURES},
            resume_step=record.resume_step if record.resume_step >= 0 else None,
            samples=max(record.samples, 0),
            memory_step=max(record.memory_step, -1),
            durable_step=max(record.durable_step, self._workload.durable_step, -1),
            updated=max(_drop_nonfinite(record.updated) or 0.0, 0.0),
            productive_seconds=max(_drop_nonfinite(record.productive_seconds) or 0.0, 0.0),
            started=self._started,
            loaded=self._loaded,
            notice=read_notice(path)[:MESSAGE_CHARACTERS],
            alerts=_read_alerts(path),
            total_steps=max(record.total_steps, 0),
            stage=stage.value,
            stage_progress=None if is_training else round(_drop_nonfinite(record.stage_progress) or 0.0, 4),
            stage_since=0.0 if is_training else max(_drop_nonfinite(record.stage_since) or 0.0, 0.0),
            artifacts=results.artifacts,
            evaluation=results.evaluation,
            hang_detection="" if hang_detection is None else hang_detection.value,
            problem=self._workload.problem[:MESSAGE_CHARACTERS],
        )
        resumed = record.resume_step if record.resume_step >= 0 else None
        for index, restart in enumerate(self._restarts):
            if restart.resumed_at is None and self._is_of_current_generation(restart):
                self._restarts[index] = restart.model_copy(
                    update={"resume_step": resumed, "resumed_at": self._find_resume_time(record, restart.step_before)}
                )
        if record.step > 0 or record.resume_step > 0:
            self._best_step = max(self._best_step, record.step, record.resume_step)
            stage_share = 0.0 if is_training else stage.number + record.stage_progress
            self.best_progress = max(self.best_progress, self._best_step + stage_share)
        if self.phase is WorkerPhase.LOADING and record.phase is ProgressPhase.TRAINING:
            self.set_phase(WorkerPhase.TRAINING)

    def build_heartbeat(self) -> HeartbeatRequest:
        """Return the current heartbeat."""
        self.observe()
        verdict = self._verdict
        return HeartbeatRequest(
            namespace=self._settings.namespace,
            job=self._settings.job,
            pod_name=self._settings.pod_name,
            pod_uid=self._settings.pod_uid,
            generation=self.generation,
            attempt=self.attempt,
            phase=self.phase,
            progress=self._progress,
            failures=tuple(
                failure.build_message() for failure in takewhile(lambda failure: failure.is_complete, self._failures)
            ),
            verdict=verdict.build_message() if isinstance(verdict, _Failure) else verdict,
            restarts=tuple(self._restarts),
            waiting_for=self._waiting_for,
            ready=self.standby_warm(),
            stuck=self._stuck,
            kernel=self.diagnoser.kernel.newest,
            timing=self.timing,
            checks=tuple(self._checks.values()),
            compiled=self._compiled,
            killed_generation=self._killed_generation,
        )

    def _count_last_steps(self, record: ProgressRecord) -> None:
        """Count the steps of ranks that train until they end or are killed: a restart repeats them."""
        is_left = (record.generation, record.attempt) == self._left
        if is_left and self._progress is not None and record.step > self._progress.step:
            self._progress = self._progress.model_copy(update={"step": record.step})

    def record_killed(self, generation: int) -> None:
        """Record that the ranks of a generation were killed because they did not end when asked to."""
        self._killed_generation = generation
        self._send_now()

    def _record_times(self, record: ProgressRecord) -> None:
        """Record when the processes of this attempt started, and when they began to train.

        Those of a program may count as training from their start; its stage `Compile`, or else its first step, shows
        when they had loaded.
        """
        attempt, now = (record.generation, record.attempt), time.time()
        if attempt != self._timed_attempt:
            self._timed_attempt, self._started, self._loaded, self._is_load_known = attempt, now, 0.0, False
        if not self._loaded and record.phase is ProgressPhase.TRAINING:
            self._loaded = now
        is_compiling = record.stage == TrainerPhase.COMPILE
        if self._workload.hang_detection is not None and not self._is_load_known and (is_compiling or record.step >= 0):
            self._is_load_known = True
            loaded = record.stage_since if is_compiling else record.updated
            self._loaded = min(max(_drop_nonfinite(loaded) or now, self._started), now)

    def _find_resume_time(self, record: ProgressRecord, step_before: int) -> float | None:
        """Return when the ranks passed the step at which the failure had stopped them; None before."""
        if record.step > max(step_before, record.resume_step):
            return record.updated
        may_report_none = self._workload.hang_detection is not None
        if may_report_none and record.step < 0 and step_before < 0 and record.phase is ProgressPhase.TRAINING:
            return record.updated  # a program without steps runs as soon as its processes do
        has_passed_step = RunStage.parse(record.stage) is not RunStage.TRAIN and record.step >= step_before
        return record.stage_since if has_passed_step else None

    def _is_of_current_attempt(self, record: ProgressRecord) -> bool:
        return (record.generation, record.attempt) == (self.generation, self.attempt)

    def _is_of_current_generation(self, record: RestartRecord) -> bool:
        return record.generation == self.generation


def _read_alerts(path: Path) -> tuple[Alert, ...]:
    """Return the alerts of the monitors of the pod's first rank."""
    return tuple(
        Alert(kind=kind, step=alert["step"], message=alert["message"][:MESSAGE_CHARACTERS])
        for kind, alert in read_alerts(path).items()
    )


def _drop_nonfinite(value: float) -> float | None:
    """Return the value; None for NaN and infinity."""
    return value if value == value and abs(value) != float("inf") else None  # noqa: PLR0124 - NaN differs from itself
