"""One generation of training on this pod, on top of torch.distributed.elastic's SimpleElasticAgent.

The base class does the rendezvous, the assignment of ranks and the restart; this class gives it workers from the
standby and replaces its polling loop by one that waits for events: an exit, a change of the shared state, an order.
See docs/decisions/0011-own-run-loop.md for what of the base class is not used, and why.

Invariants: a restart bumps the shared attempt exactly once however many ranks fail; no rank of an attempt is alive when
the next one is joined; an exit that the agent asked for is never reported as a failure.
"""

from __future__ import annotations

import logging
import queue
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource

from trainium_contract.exit_codes import ExitCode
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.messages import Membership, WorkerPhase
from trainium_trainer.agent.checks.pair_round import FoundBadError, PairRound
from trainium_trainer.agent.checks.pairing import noted
from trainium_trainer.agent.exits.diagnosis import weight
from trainium_trainer.agent.exits.restart_policy import Decision, GenerationState, Judgement, after_yield, judge
from trainium_trainer.agent.generation.exit_barrier import Roll
from trainium_trainer.agent.generation.generation_store import GenerationStore, StoreLostError
from trainium_trainer.agent.generation.shutdown import Order, Outcome
from trainium_trainer.agent.generation.turns import StateWatcher
from trainium_trainer.agent.hang.detection import Finding, Kind, after_hang
from trainium_trainer.agent.hang.response import HangResponse
from trainium_trainer.agent.ranks.processes import RankProcess
from trainium_trainer.agent.ranks.rank_group import LocalRanks
from trainium_trainer.agent.rendezvous import GenerationRendezvous, RendezvousInterruptedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.agent.coordinator.report import Report
    from trainium_trainer.agent.hang.detection import Calibration
    from trainium_trainer.agent.ranks.standby_keeper import StandbyKeeper
    from trainium_trainer.agent.settings import AgentSettings

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_YIELD_PATIENCE_SECONDS = 5.0
_RECONNECT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _StateChanged:
    state: GenerationState


class _Nudge:
    """Something else changed: look around."""


class _Overdue:
    """A local rank stands still for longer than it may."""


_Event = RankProcess | _StateChanged | _Nudge | _Overdue


class GenerationAgent(SimpleElasticAgent):
    """Runs this pod's ranks for one generation, through any number of restarts in place."""

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        keeper: StandbyKeeper,
        report: Report,
        calibration: Calibration,
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._generation = membership.generation
        self._node_rank = node_rank
        self._report = report
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._order = Order.NONE
        self._superseded_by = 0
        self._yield_reported_at = 0.0
        self._roll = Roll(lambda: self._shared, node_rank, len(membership.members))
        self.outcome = Outcome.LEFT
        self.yielded = False
        """The ranks ended with code 75 when this pod left."""
        self._watcher = StateWatcher(
            membership,
            on_change=lambda state: self._events.put(_StateChanged(state)),
            on_loss=lambda: self._events.put(_Nudge()),
        )
        self._rendezvous_handler = GenerationRendezvous(
            membership,
            node_rank,
            settings.run_id,
            initial=GenerationState(best_step=report.reached),
            interrupted=lambda: self._order is not Order.NONE,
            waiting_for=report.wait_for,
            watcher=self._watcher,
            pair_round=PairRound(
                settings, membership, node_rank, keeper, interrupted=self._stop_when_ordered, report=report.checked
            )
            if PreflightCheck.PAIRWISE in settings.checks
            else None,
        )
        self._ranks = LocalRanks(
            settings,
            keeper,
            generation=membership.generation,
            run_id=self._rendezvous_handler.get_run_id(),
            on_exit=self._events.put,
        )
        self._hangs = HangResponse(
            settings,
            membership,
            node_rank,
            ranks=self._ranks,
            report=report,
            calibration=calibration,
            store=lambda: self._shared,
            on_overdue=lambda: self._events.put(_Overdue()),
        )
        super().__init__(
            WorkerSpec(
                role="trainer",
                local_world_size=membership.processes_per_node,
                entrypoint=settings.rank_entry,
                rdzv_handler=self._rendezvous_handler,
                max_restarts=settings.max_in_place_restarts,
            )
        )

    # Orders, from other threads.

    def order(self, order: Order, superseded_by: int = 0) -> None:
        """Leave the generation; `run` returns when no rank is alive."""
        self._superseded_by = max(self._superseded_by, superseded_by)
        self._order = max(self._order, order)
        self._events.put(_Nudge())
        self._watcher.nudge()

    # The base class's seams, with its signatures.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._enter(WorkerPhase.LOADING, attempt=self._attempt)
        self._ranks.start(worker_group, self._attempt)
        return {process.local_rank: process.pid for process in self._ranks}

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:  # noqa: ARG002
        self._ranks.kill()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002
        return RunResult(state=WorkerState.HEALTHY if self._ranks.alive else WorkerState.STOPPED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        self._watcher.stop()
        self._hangs.stop()
        self._ranks.kill()
        self._rendezvous_handler.shutdown()

    def record_duration(self, state: str) -> AbstractContextManager[None]:  # type: ignore[override]  # noqa: ARG002
        """Nothing: the heartbeats carry the durations."""
        return nullcontext()

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # The base class looks up the host's full name for every event, which takes seconds where DNS is slow.
        return Event(f"trainium.worker.{state}", source=source, metadata={"generation": str(self._generation)})

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002
        self._enter(WorkerPhase.JOINING, attempt=0)
        self._watcher.start()
        self._hangs.start()
        self._until_interrupted(lambda: self._initialize_workers(self._worker_group))
        while True:
            self._leave_when_ordered()
            event = self._next_event()
            if isinstance(event, _StateChanged):
                self._follow(event.state)
            elif isinstance(event, _Overdue):
                self._with_store(lambda: self._hangs.ask(self._attempt))
            elif isinstance(event, RankProcess) and event.attempt == self._attempt and not event.asked:
                self._exited(event)
            elif self._report.phase is WorkerPhase.YIELDED:
                self._restart_when_nobody_calls()
            self._end_what_hangs()
            if self._report.phase is WorkerPhase.FINISHED and self._roll.all_finished(self._attempt):
                self._roll.part()
                self.outcome = Outcome.FINISHED
                return RunResult(
                    state=WorkerState.SUCCEEDED,
                    return_values={worker.global_rank: None for worker in self._worker_group.workers},
                )

    # Events.

    @property
    def _attempt(self) -> int:
        return self._rendezvous_handler.state.attempt

    @property
    def _shared(self) -> GenerationStore:
        return self._rendezvous_handler.store

    def _next_event(self) -> _Event:
        waiting = self._hangs.concluding or self._report.phase in (WorkerPhase.FINISHED, WorkerPhase.YIELDED)
        try:
            return self._events.get(timeout=_POLL_SECONDS if waiting else None)
        except queue.Empty:
            return _Nudge()

    def _follow(self, state: GenerationState) -> None:
        """Another agent changed the shared state."""
        hung = state.cause is Cause.HANG and state.attempt == self._attempt + 1
        if state.stopped is not None:
            if state.stopped == ExitCode.HUNG and self._report.phase is not WorkerPhase.FAILED:
                self._end_attempt(self._finding(), state)
            self._stop()
        elif state.attempt > self._attempt and self._report.phase is not WorkerPhase.FAILED:
            if hung:
                self._end_attempt(self._finding(), state)
                return
            cause = Cause.YIELDED if state.cause is Cause.YIELDED else Cause.PEER_LOST
            self._restart(state.attempt, cause, time.time())
        elif state.attempt == self._attempt and self._ranks.alive:
            self._quietly(lambda: self._hangs.answer(state))

    def _exited(self, process: RankProcess) -> None:
        code = process.exit_code
        assert code is not None
        if code in (ExitCode.FINISHED, ExitCode.YIELDING):
            if not self._ranks.alive:
                self._all_left()
            return
        if self._report.phase is WorkerPhase.FAILED:
            return
        _log.warning("rank %d ended with code %d in attempt %d", process.rank, code, process.attempt)
        self._report.failed(self._generation, process)
        self._ranks.kill()
        self._decide(self._worst(process))

    def _worst(self, process: RankProcess) -> RankProcess:
        """The exit to decide by: of those at the same moment, the one that asks for most."""
        ended = [process]
        for other in self._ranks:
            if other is not process and not other.asked and other.exit_code not in (0, ExitCode.YIELDING):
                self._report.failed(self._generation, other)
                ended.append(other)
        return ended[0] if len(ended) == 1 else max(ended, key=lambda each: weight(self._report.signs.meaning(each)))

    def _decide(self, process: RankProcess) -> None:
        code, attempt = process.exit_code or 0, process.attempt
        diagnosis = self._report.signs.diagnose(process)
        reached, limit = self._report.reached, self._settings.max_in_place_restarts

        def judged(state: GenerationState) -> Judgement:
            verdict, seen_before = diagnosis.verdict, diagnosis.seen_before
            return judge(code, attempt, reached, state, limit, verdict=verdict, seen_before=seen_before)

        while True:
            try:
                judgement = judged(self._shared.state())
                after = self._shared.change(lambda state: noted(state, judged(state).state))
                break
            except StoreLostError as loss:
                self._await_store(loss)
        if after.stopped is not None or judgement.decision is Decision.WITHDRAW:
            _log.error(
                "giving up in place: rank %d ended with code %d (%s)", process.rank, code, diagnosis.verdict.sentence
            )
            self._report.give_up(process)
            return
        if judgement.backoff_seconds:
            self._enter(WorkerPhase.JOINING)
            self._pause(judgement.backoff_seconds)
        self._restart(after.attempt, diagnosis.verdict.cause, process.ended_at)

    def _withdraw(self, finding: FoundBadError) -> None:
        """Leave the generation with a verdict about this node; the others wait for its replacement."""
        _log.error("giving up in place: %s", finding)
        code, attempt, reached = finding.code, self._attempt, self._report.reached
        self._quietly(lambda: self._shared.change(lambda state: judge(code, attempt, reached, state, 0).state))
        self._report.give_up_with(code, str(finding))

    # Standstills.

    def _finding(self) -> Finding:
        return self._quietly(lambda: self._hangs.published(self._attempt)) or Finding(Kind.COLLECTIVE)

    def _end_what_hangs(self) -> None:
        """End the attempt when the agents have found that it hangs."""
        if not self._hangs.concluding:
            return
        finding = self._with_store(lambda: self._hangs.conclude(self._attempt))
        if finding is None:
            return
        after = self._with_store(lambda: self._shared.change(self._judged(finding)))
        if after is not None:
            self._end_attempt(finding, after)

    def _judged(self, finding: Finding) -> Callable[[GenerationState], GenerationState]:
        attempt, reached, limit = self._attempt, self._report.reached, self._settings.max_in_place_restarts
        return lambda state: after_hang(finding, attempt, reached, state, limit)

    def _end_attempt(self, finding: Finding, after: GenerationState) -> None:
        """Tell what stood still here, end the ranks, and go on with the next attempt unless there is none."""
        cause, failed_at = self._hangs.end_attempt(finding, self._generation)
        self._ranks.kill()
        if after.stopped is None:
            self._restart(after.attempt, cause, failed_at)
        elif cause is Cause.HANG and finding.kind is Kind.STUCK:
            self._report.give_up()
        else:
            self._stop()

    def _with_store(self, operation: Callable[[], _T]) -> _T | None:
        """Consult the others about a standstill.

        None when their store is gone: then the ranks, which stand still anyway, are ended here too, and the next
        attempt, or a newer generation, is waited for.
        """
        try:
            return operation()
        except StoreLostError as loss:
            self._ranks.kill()
            self._await_store(loss)
        while True:
            try:
                after = self._shared.change(self._judged(Finding(Kind.SILENT)))
                break
            except StoreLostError as loss:
                self._await_store(loss)
        if after.stopped is None:
            self._restart(after.attempt, Cause.HANG, time.time())
        return None

    def _await_store(self, loss: StoreLostError) -> None:
        """Try once more to reach the store. Raises RendezvousInterruptedError when told to leave instead."""
        if self._report.phase is not WorkerPhase.JOINING:
            _log.warning("the store of generation %d is gone (%s); waiting for a newer one", self._generation, loss)
            self._enter(WorkerPhase.JOINING)
        self._report.wait_for((0,))
        self._leave_when_ordered()
        time.sleep(_RECONNECT_SECONDS)
        self._quietly(self._shared.connect)

    def _restart(self, attempt: int, cause: Cause, failed_at: float) -> None:
        """Begin the next attempt; to a pod whose own ranks did not fail the cause is a lost peer."""
        self._hangs.forget()
        self._report.observe()
        self._report.restarting(self._generation, attempt, cause, failed_at)
        self._until_interrupted(lambda: self._restart_workers(self._worker_group))

    def _stop(self) -> None:
        """Another agent gave up for all."""
        self._ranks.kill()
        if self._report.phase is not WorkerPhase.FAILED:
            _log.error("generation %d was stopped by another member", self._generation)
            self._enter(WorkerPhase.FAILED)

    def _all_left(self) -> None:
        """Every local rank ended with 0 or 75."""
        finished = self._ranks.all_ended_with(ExitCode.FINISHED)
        self._report.observe()
        phase = WorkerPhase.FINISHED if finished else WorkerPhase.YIELDED
        self._enter(phase)
        self._yield_reported_at = time.monotonic()
        self._roll.sign(self._attempt, phase)

    def _restart_when_nobody_calls(self) -> None:
        """All ranks yielded though no newer generation came: go on in place, unless a member is leaving for good."""
        if time.monotonic() < self._yield_reported_at + _YIELD_PATIENCE_SECONDS:
            return
        if not self._roll.all_signed(self._attempt):
            return
        state = self._quietly(self._shared.state)
        if state is None or state.leaving or state.superseded > self._generation:
            return
        attempt, reached = self._attempt, self._report.reached
        after = self._quietly(lambda: self._shared.change(lambda seen: after_yield(attempt, reached, seen)))
        if after is not None:
            self._restart(after.attempt, Cause.YIELDED, time.time())

    # Leaving.

    def _leave_when_ordered(self) -> None:
        """Carry out an order to leave. Raises RendezvousInterruptedError when no rank is alive."""
        if self._order is Order.NONE:
            return
        if self._order is not Order.IMMEDIATE:
            self._save_and_end()
        self._ranks.kill()
        raise RendezvousInterruptedError("left as ordered")

    def _save_and_end(self) -> None:
        """Ask the ranks to save and leave; wait for them as long as it makes sense."""
        deadline = time.monotonic() + self._settings.grace_seconds
        self._ranks.ask_to_leave(memory_ends=self._order is Order.TERMINATE)
        self._announce_leaving()
        told_broken = False
        while self._ranks.alive and time.monotonic() < deadline:
            if self._order is Order.IMMEDIATE:
                return
            codes = {process.exit_code for process in self._ranks} - {None, 0, int(ExitCode.YIELDING)}
            if codes and not told_broken:
                told_broken = True
                self._quietly(lambda: self._shared.change(lambda state: replace(state, broken=True)))
            try:
                event = self._events.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, _StateChanged) and (event.state.broken or event.state.stopped is not None):
                break
        self.yielded = self._ranks.all_ended_with(ExitCode.YIELDING)
        self._report.observe()  # what they saved last

    def _announce_leaving(self) -> None:
        leaving = self._order is Order.TERMINATE

        def announced(state: GenerationState) -> GenerationState:
            return replace(
                state, leaving=state.leaving or leaving, superseded=max(state.superseded, self._superseded_by)
            )

        self._quietly(lambda: self._shared.change(announced))

    # Small things.

    def _enter(self, phase: WorkerPhase, *, attempt: int | None = None) -> None:
        self._report.enter(phase, generation=self._generation, attempt=attempt)

    def _stop_when_ordered(self) -> None:
        if self._order is not Order.NONE:
            raise RendezvousInterruptedError("told to leave")

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._order is Order.NONE:
            time.sleep(_POLL_SECONDS)

    def _until_interrupted(self, work: Callable[[], None]) -> None:
        """Run a rendezvous; when it is interrupted by a stop of the generation, report that instead."""
        try:
            work()
        except RendezvousInterruptedError:
            if self._order is not Order.NONE:
                self._leave_when_ordered()
            self._stop()
        except FoundBadError as finding:
            self._withdraw(finding)

    def _quietly(self, operation: Callable[[], _T]) -> _T | None:
        try:
            return operation()
        except StoreLostError:
            return None
