"""Collect what the agent reports to the coordinator: phase, progress, failures, restarts.

Guarantees:
- It is used in the agent's event loop only, so nothing of an old generation is reported as the new one's.
- Sequence numbers count up over the life of the agent and are never used twice.
- A restart is resumed when a step ends that had not been completed before the failure, or when the ranks are past
  their last step again.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from trainium_agent.exits.diagnosis import MESSAGE_CHARACTERS, Signs, describe_exit, last_message
from trainium_agent.ranks.results import read_results
from trainium_contract.sizes import MAX_COMPILED
from trainium_contract.status.results import Alert, RunStage
from trainium_contract.wire.messages import (
    CheckResult,
    HeartbeatRequest,
    ProcessFailure,
    Progress,
    RestartRecord,
    StepTiming,
    StuckRank,
    WorkerPhase,
)
from trainium_worker import ProgressPhase, read_alerts, read_notice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.base import Workload
    from trainium_contract.faults.causes import Cause
    from trainium_contract.spec.health import PreflightCheck
    from trainium_contract.spec.precompile import CompiledSize
    from trainium_worker import ProgressRecord

_KEPT = 8
_LISTED_RANKS = 64
_LAST_LINES_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure whose message is rendered late, when the last lines of output have arrived."""

    sequence: int
    generation: int
    process: RankProcess
    exit_code: int
    step: int
    sentence: str = ""
    """Reason that the output does not show: the agent ended the process itself."""
    at: float = 0.0
    """Unix seconds, for such a failure."""

    @property
    def settled(self) -> bool:
        """Whether its last lines are known; a child that holds the pipe open is not waited for."""
        if self.sentence or self.process.output.complete.is_set():
            return True
        return time.time() > self.process.ended_at + _LAST_LINES_SECONDS

    def message(self) -> ProcessFailure:
        """Return the failure as the coordinator gets it; the same whenever it is asked for once settled."""
        word = None if self.sentence else last_message(self.process)
        return ProcessFailure(
            sequence=self.sequence,
            generation=self.generation,
            attempt=self.process.attempt,
            rank=self.process.rank,
            exit_code=self.exit_code,
            step=self.step,
            message=self.sentence[:MESSAGE_CHARACTERS] or describe_exit(self.process),
            runtime_status=word.status if word is not None else None,
            output_line="" if self.sentence else self.process.output.last_output_line(),
            at=self.at or self.process.ended_at,
        )


class PodReport:
    """The agent's own view of its pod, from which every heartbeat is made."""

    def __init__(self, settings: AgentSettings, workload: Workload, wake: Callable[[], None]) -> None:
        self._settings = settings
        self._workload = workload
        self._wake = wake
        self._phase = WorkerPhase.PREFLIGHT
        self._generation = 0
        self._attempt = 0
        self._progress_files: tuple[Path, ...] = ()
        self._progress: Progress | None = None
        self._failures: deque[_Failure] = deque(maxlen=_KEPT)
        self._restarts: deque[RestartRecord] = deque(maxlen=_KEPT)
        self._next_failure = 0
        self._next_restart = 0
        self._verdict: _Failure | ProcessFailure | None = None
        self._waiting_for: tuple[int, ...] = ()
        self._best_step = -1
        self._reached = -1.0
        self._dated: tuple[int, int] = (0, -1)
        self._started = self._loaded = 0.0
        self._stuck: tuple[StuckRank, ...] = ()
        self._checks: dict[PreflightCheck, CheckResult] = {}
        self._compiled: tuple[CompiledSize, ...] = ()
        self.signs = Signs(settings.rules_path, wake)
        self.standby_warm: Callable[[], bool] = lambda: False
        self._timing: StepTiming | None = None

    @property
    def reporting_as(self) -> tuple[int, int]:
        """Generation and attempt; 0 before the first."""
        return self._generation, self._attempt

    @property
    def phase(self) -> WorkerPhase:
        """The phase of the agent."""
        return self._phase

    @property
    def best_step(self) -> int:
        """Highest step that this pod has seen completed; -1 for none."""
        return self._best_step

    @property
    def reached(self) -> float:
        """Progress that this pod has observed: rises with each new step, then with the stages after the last one.

        Steps, and for a stage its number and the share of it that is over; -1 for nothing.
        """
        return self._reached

    @property
    def recovering(self) -> bool:
        """Whether a restart of the present attempt has not reached a new step yet."""
        return any(record.resumed_at is None and self._is_current(record) for record in self._restarts)

    @property
    def verdict_code(self) -> int | None:
        """Exit code of the verdict, if this pod gave up with one."""
        verdict = self._verdict
        return None if verdict is None else verdict.exit_code

    def enter(self, phase: WorkerPhase, *, generation: int | None = None, attempt: int | None = None) -> None:
        """Change the phase, and the attempt with it; calls for a `generation` that is over have no effect.

        Its attempt would make the coordinator pass over the first attempt of the generation that has come.
        """
        if generation not in (None, self._generation):
            return
        changed = phase is not self._phase or attempt not in (None, self._attempt)
        self._phase = phase
        self._attempt = self._attempt if attempt is None else attempt
        if phase not in (WorkerPhase.JOINING, WorkerPhase.YIELDED, WorkerPhase.FAILED):
            self._waiting_for = ()
        if changed:
            self._wake()

    def enter_generation(self, generation: int, phase: WorkerPhase) -> None:
        """Record a newer generation; ranks of the old one may still be ending."""
        self._generation = generation
        self._attempt = 0
        self._verdict = None
        self._waiting_for = ()
        if self._progress is not None:
            # The step remains until the new ranks know theirs; everything that belongs to a generation restarts.
            self._progress = self._progress.model_copy(
                update={"resume_step": None, "productive_seconds": 0.0, "started": 0.0, "loaded": 0.0}
            )
        self.enter(phase)

    def know(self, generation: int) -> None:
        """Record a newer generation in which this pod cannot take part."""
        self._generation = generation
        self._wake()

    def follow(self, files: Sequence[Path]) -> None:
        """Read progress from these records from now on, the pod's first rank first."""
        self._progress_files = tuple(files)

    def wait_for(self, node_ranks: tuple[int, ...]) -> None:
        """Record the node ranks that the rendezvous still lacks."""
        self._waiting_for = node_ranks[:_LISTED_RANKS]

    def failed(self, generation: int, process: RankProcess) -> None:
        """Record an unrequested exit."""
        self.observe()
        assert process.exit_code is not None
        record = self._current_record(process.local_rank)
        step = record.step if record is not None else -1
        self._failures.append(_Failure(self._next_failure, generation, process, process.exit_code, step))
        self._next_failure += 1
        self._wake()

    def hung(self, generation: int, process: RankProcess, code: int, sentence: str) -> None:
        """Record a process that the agent is about to end because it hangs."""
        record = self._current_record(process.local_rank)
        step = record.step if record is not None else -1
        self._failures.append(
            _Failure(self._next_failure, generation, process, code, step, sentence=sentence, at=time.time())
        )
        self._next_failure += 1
        self._wake()

    def checked(self, result: CheckResult) -> None:
        """Record the newest outcome of a check of this node."""
        self._checks = {**self._checks, result.check: result}
        self._wake()

    def compiled(self, size: CompiledSize) -> None:
        """Record that the graphs of another size are compiled."""
        self._compiled = (*self._compiled, size)[-MAX_COMPILED:]
        self._wake()

    def stuck(self, ranks: tuple[StuckRank, ...]) -> None:
        """Record the local ranks that are stalled now."""
        changed, self._stuck = bool(ranks or self._stuck), ranks
        if changed:
            self._wake()

    def timed(self, timing: StepTiming | None) -> None:
        """Record the step times of this pod's ranks; None until enough steps were made."""
        self._timing = timing

    def give_up(self, process: RankProcess | None = None) -> None:
        """Set the verdict to the failure of this process, else to the newest one."""
        failures = [failure for failure in self._failures if failure.process is process] or list(self._failures)
        generation = failures[-1].generation
        if generation == self._generation:
            self._verdict = failures[-1]
        self.enter(WorkerPhase.FAILED, generation=generation)

    def give_up_with(self, code: int, sentence: str) -> None:
        """Set a verdict without a process: the pod itself is unfit."""
        self._verdict = ProcessFailure(
            sequence=self._next_failure,
            generation=self._generation,
            attempt=self._attempt,
            rank=0,
            exit_code=code,
            message=sentence[:MESSAGE_CHARACTERS],
            at=time.time(),
        )
        self._next_failure += 1
        self.enter(WorkerPhase.FAILED)

    def restarting(self, generation: int, attempt: int, cause: Cause, failed_at: float) -> None:
        """Record that a restart in place starts."""
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
        if self._progress is not None:
            self._progress = self._progress.model_copy(update={"started": 0.0, "loaded": 0.0})
        self.enter(WorkerPhase.JOINING, generation=generation, attempt=attempt)

    def observe(self) -> None:
        """Read the ranks' progress and see whether a restart has resumed."""
        newest = self._workload.newest(self._progress_files)
        if newest is None or not self._is_of_attempt(newest[0]):
            return
        record, beside = newest
        self._date(record)
        stage = RunStage.of(record.stage)
        trains = stage is RunStage.TRAIN
        hang_detection = self._workload.hang_detection
        results = read_results(beside)
        self._progress = Progress(
            step=max(record.step, 0),
            loss=record.loss,
            tokens_per_second=record.tokens_per_second,
            samples_per_second=record.samples_per_second,
            reward_margin=record.reward_margin,
            reward_accuracy=record.reward_accuracy,
            resume_step=record.resume_step if record.resume_step >= 0 else None,
            samples=max(record.samples, 0),
            memory_step=max(record.memory_step, -1),
            durable_step=max(record.durable_step, self._workload.durable_step, -1),
            updated=max(_finite(record.updated) or 0.0, 0.0),
            productive_seconds=max(_finite(record.productive_seconds) or 0.0, 0.0),
            started=self._started,
            loaded=self._loaded,
            notice=read_notice(beside)[:MESSAGE_CHARACTERS],
            alerts=_alerts(beside),
            total_steps=max(record.total_steps, 0),
            stage=stage.value,
            stage_progress=None if trains else round(_finite(record.stage_progress) or 0.0, 4),
            stage_since=0.0 if trains else max(_finite(record.stage_since) or 0.0, 0.0),
            artifacts=results.artifacts,
            evaluation=results.evaluation,
            hang_detection="" if hang_detection is None else hang_detection.value,
            problem=self._workload.problem[:MESSAGE_CHARACTERS],
        )
        resumed = record.resume_step if record.resume_step >= 0 else None
        for index, restart in enumerate(self._restarts):
            if restart.resumed_at is None and self._is_current(restart):
                self._restarts[index] = restart.model_copy(
                    update={"resume_step": resumed, "resumed_at": _resumed_at(record, restart.step_before)}
                )
        if record.step > 0 or record.resume_step > 0:
            self._best_step = max(self._best_step, record.step, record.resume_step)
            after = 0.0 if trains else stage.number + record.stage_progress
            self._reached = max(self._reached, self._best_step + after)
        training = self._phase is WorkerPhase.LOADING and record.phase is ProgressPhase.TRAINING
        if training:
            self.enter(WorkerPhase.TRAINING)

    def heartbeat(self) -> HeartbeatRequest:
        """Return the message for now."""
        self.observe()
        verdict = self._verdict
        return HeartbeatRequest(
            namespace=self._settings.namespace,
            job=self._settings.job,
            pod_name=self._settings.pod_name,
            pod_uid=self._settings.pod_uid,
            generation=self._generation,
            attempt=self._attempt,
            phase=self._phase,
            progress=self._progress,
            failures=tuple(failure.message() for failure in takewhile(lambda failure: failure.settled, self._failures)),
            verdict=verdict.message() if isinstance(verdict, _Failure) else verdict,
            restarts=tuple(self._restarts),
            waiting_for=self._waiting_for,
            ready=self.standby_warm(),
            stuck=self._stuck,
            kernel=self.signs.kernel.newest,
            timing=self._timing,
            checks=tuple(self._checks.values()),
            compiled=self._compiled,
        )

    def _date(self, record: ProgressRecord) -> None:
        """Record when this attempt's processes were up and when they started to train."""
        attempt = (record.generation, record.attempt)
        if attempt != self._dated:
            self._dated, self._started, self._loaded = attempt, time.time(), 0.0
        if not self._loaded and record.phase is ProgressPhase.TRAINING:
            self._loaded = time.time()

    def _current_record(self, index: int) -> ProgressRecord | None:
        """Progress of one local rank, unless it is left over from an earlier attempt."""
        if index >= len(self._progress_files):
            return None
        found = self._workload.read(self._progress_files[index])
        return found[0] if found is not None and self._is_of_attempt(found[0]) else None

    def _is_of_attempt(self, record: ProgressRecord) -> bool:
        return (record.generation, record.attempt) == (self._generation, self._attempt)

    def _is_current(self, record: RestartRecord) -> bool:
        return record.generation == self._generation


def _alerts(path: Path) -> tuple[Alert, ...]:
    """Return the alerts of the monitors of the pod's first rank."""
    return tuple(
        Alert(kind=kind, step=alert["step"], message=alert["message"][:MESSAGE_CHARACTERS])
        for kind, alert in read_alerts(path).items()
    )


def _resumed_at(record: ProgressRecord, step_before: int) -> float | None:
    """Return when the ranks passed the step at which the failure had stopped them; None while they have not."""
    if record.step > max(step_before, record.resume_step):
        return record.updated
    if record.step < 0 and step_before < 0 and record.phase is ProgressPhase.TRAINING:
        return record.updated  # a program without steps trains as soon as it runs
    back = RunStage.of(record.stage) is not RunStage.TRAIN and record.step >= step_before
    return record.stage_since if back else None


def _finite(value: float) -> float | None:
    """Return a number that JSON can carry, or None."""
    return value if value == value and abs(value) != float("inf") else None  # noqa: PLR0124 - NaN differs from itself
