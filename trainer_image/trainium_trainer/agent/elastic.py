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
from enum import IntEnum, StrEnum
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

from trainium_contract.exit_codes import Cause, ExitCode, Response, verdict_of
from trainium_contract.messages import Membership, WorkerPhase
from trainium_trainer.agent.generation_store import GenerationStore, StateWatcher, StoreLostError
from trainium_trainer.agent.policy import Decision, GenerationState, after_yield, judge
from trainium_trainer.agent.processes import RankProcess
from trainium_trainer.agent.ranks import LocalRanks
from trainium_trainer.agent.rendezvous import GenerationRendezvous, RendezvousInterruptedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.agent.report import Report
    from trainium_trainer.agent.settings import AgentSettings
    from trainium_trainer.agent.standby_keeper import StandbyKeeper

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_YIELD_PATIENCE_SECONDS = 5.0
_FAREWELL_SECONDS = 5.0
_ORPHANED_SECONDS = 30.0
_RECONNECT_SECONDS = 0.2


class Order(IntEnum):
    """How the agent is told to leave a generation; a higher one overrides a lower one."""

    NONE = 0
    GRACEFUL = 1
    """A newer generation; let the ranks save first."""
    TERMINATE = 2
    """The pod is ending; let the ranks save first."""
    IMMEDIATE = 3
    """A newer generation; kill the ranks."""


class Outcome(StrEnum):
    """How a generation ended on this pod."""

    FINISHED = "Finished"
    """Every rank of every member ended with code 0."""
    LEFT = "Left"
    """As ordered; no rank is alive."""


@dataclass(frozen=True, slots=True)
class _StateChanged:
    state: GenerationState


class _Nudge:
    """Something else changed: look around."""


class GenerationAgent(SimpleElasticAgent):
    """Runs this pod's ranks for one generation, through any number of restarts in place."""

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        keeper: StandbyKeeper,
        report: Report,
    ) -> None:
        self._settings = settings
        self._membership = membership
        self._generation = membership.generation
        self._node_rank = node_rank
        self._report = report
        self._events: queue.SimpleQueue[RankProcess | _StateChanged | _Nudge] = queue.SimpleQueue()
        self._order = Order.NONE
        self._superseded_by = 0
        self._yield_reported_at = 0.0
        self._store_seen_at = 0.0
        self.outcome = Outcome.LEFT
        self.yielded = False
        """The ranks ended with code 75 when this pod left."""
        self._rendezvous_handler = GenerationRendezvous(
            membership,
            node_rank,
            settings.run_id,
            initial=GenerationState(best_step=report.best_step),
            interrupted=lambda: self._order is not Order.NONE,
            waiting_for=report.wait_for,
        )
        self._watcher = StateWatcher(
            membership,
            on_change=lambda state: self._events.put(_StateChanged(state)),
            on_loss=lambda: self._events.put(_Nudge()),
        )
        self._ranks = LocalRanks(
            settings,
            keeper,
            generation=membership.generation,
            run_id=self._rendezvous_handler.get_run_id(),
            on_exit=self._events.put,
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

    # The base class's seams, with its signatures.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._report.enter(WorkerPhase.LOADING, attempt=self._attempt)
        self._ranks.start(worker_group, self._attempt)
        return {process.local_rank: process.pid for process in self._ranks}

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:  # noqa: ARG002
        self._ranks.kill()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002
        return RunResult(state=WorkerState.HEALTHY if self._ranks.alive else WorkerState.STOPPED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        self._watcher.stop()
        self._ranks.kill()
        self._rendezvous_handler.shutdown()

    def record_duration(self, state: str) -> AbstractContextManager[None]:  # type: ignore[override]  # noqa: ARG002
        """Nothing: the heartbeats carry the durations."""
        return nullcontext()

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # The base class looks up the host's full name for every event, which takes seconds where DNS is slow.
        return Event(f"trainium.worker.{state}", source=source, metadata={"generation": str(self._generation)})

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:  # noqa: ARG002
        self._report.enter(WorkerPhase.JOINING, attempt=0)
        self._watcher.start()
        self._until_interrupted(lambda: self._initialize_workers(self._worker_group))
        while True:
            self._leave_when_ordered()
            event = self._next_event()
            if isinstance(event, _StateChanged):
                self._follow(event.state)
            elif isinstance(event, RankProcess) and event.attempt == self._attempt and not event.asked:
                self._exited(event)
            elif self._report.phase is WorkerPhase.YIELDED:
                self._restart_when_nobody_calls()
            if self._report.phase is WorkerPhase.FINISHED and self._all_finished():
                self._farewell()
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

    def _next_event(self) -> RankProcess | _StateChanged | _Nudge:
        waiting = self._report.phase in (WorkerPhase.FINISHED, WorkerPhase.YIELDED)
        try:
            return self._events.get(timeout=_POLL_SECONDS if waiting else None)
        except queue.Empty:
            return _Nudge()

    def _follow(self, state: GenerationState) -> None:
        """Another agent changed the shared state."""
        if state.stopped is not None:
            self._stop()
        elif state.attempt > self._attempt and self._report.phase is not WorkerPhase.FAILED:
            cause = Cause.YIELDED if state.cause is Cause.YIELDED else Cause.PEER_LOST
            self._restart(state.attempt, cause, time.time())

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
        """The exit to decide by: of those at the same moment, one that forbids a restart."""
        for other in self._ranks:
            if other is not process and not other.asked and other.exit_code not in (0, ExitCode.YIELDING):
                self._report.failed(self._generation, other)
                if verdict_of(other.exit_code or 0).response is Response.STOP:
                    process = other
        return process

    def _decide(self, process: RankProcess) -> None:
        code, attempt = process.exit_code or 0, process.attempt
        best_step, limit = self._report.best_step, self._settings.max_in_place_restarts

        def judged(state: GenerationState) -> GenerationState:
            return judge(code, attempt, best_step, state, limit).state

        while True:
            try:
                judgement = judge(code, attempt, best_step, self._shared.state(), limit)
                after = self._shared.change(judged)
                break
            except StoreLostError as loss:
                self._await_store(loss)
        if after.stopped is not None or judgement.decision is Decision.WITHDRAW:
            _log.error("giving up in place: rank %d ended with code %d", process.rank, code)
            self._report.give_up()
            return
        if judgement.backoff_seconds:
            self._report.enter(WorkerPhase.JOINING)
            self._pause(judgement.backoff_seconds)
        self._restart(after.attempt, verdict_of(code).cause, process.ended_at)

    def _await_store(self, loss: StoreLostError) -> None:
        """Try once more to reach the store. Raises RendezvousInterruptedError when told to leave instead."""
        if self._report.phase is not WorkerPhase.JOINING:
            _log.warning("the store of generation %d is gone (%s); waiting for a newer one", self._generation, loss)
            self._report.enter(WorkerPhase.JOINING)
        self._report.wait_for((0,))
        self._leave_when_ordered()
        time.sleep(_RECONNECT_SECONDS)
        self._quietly(self._shared.connect)

    def _restart(self, attempt: int, cause: Cause, failed_at: float) -> None:
        """Begin the next attempt; to a pod whose own ranks did not fail the cause is a lost peer."""
        self._report.observe()
        self._report.restarting(self._generation, attempt, cause, failed_at)
        self._until_interrupted(lambda: self._restart_workers(self._worker_group))

    def _stop(self) -> None:
        """Another agent gave up for all."""
        self._ranks.kill()
        if self._report.phase is not WorkerPhase.FAILED:
            _log.error("generation %d was stopped by another member", self._generation)
            self._report.enter(WorkerPhase.FAILED)

    def _all_left(self) -> None:
        """Every local rank ended with 0 or 75."""
        finished = self._ranks.all_ended_with(ExitCode.FINISHED)
        self._report.observe()
        self._report.enter(WorkerPhase.FINISHED if finished else WorkerPhase.YIELDED)
        self._yield_reported_at = self._store_seen_at = time.monotonic()
        self._quietly(lambda: self._shared.count(self._shared.key(self._attempt, self._report.phase), 1))

    def _all_finished(self) -> bool:
        if not self._shared.connected:
            self._quietly(self._shared.connect)
        if self._shared.connected:
            self._store_seen_at = time.monotonic()
            return self._counted(WorkerPhase.FINISHED) == len(self._membership.members)
        # Node 0 leaves once all are finished; had it been lost instead, a newer generation would have come by now.
        return time.monotonic() > self._store_seen_at + _ORPHANED_SECONDS

    def _farewell(self) -> None:
        """Node 0 hosts the store, so it stays until the others have seen that all are finished."""
        key, others = self._shared.key("left"), len(self._membership.members) - 1
        if self._node_rank != 0:
            self._quietly(lambda: self._shared.count(key, 1))
            return
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < deadline and (self._quietly(lambda: self._shared.count(key)) or 0) < others:
            time.sleep(_POLL_SECONDS)

    def _counted(self, phase: WorkerPhase) -> int:
        count = self._quietly(lambda: self._shared.count(self._shared.key(self._attempt, phase)))
        return count or 0

    def _restart_when_nobody_calls(self) -> None:
        """All ranks yielded though no newer generation came: go on in place, unless a member is leaving for good."""
        if time.monotonic() < self._yield_reported_at + _YIELD_PATIENCE_SECONDS:
            return
        if self._counted(WorkerPhase.YIELDED) + self._counted(WorkerPhase.FINISHED) < len(self._membership.members):
            return
        state = self._quietly(self._shared.state)
        if state is None or state.leaving or state.superseded > self._generation:
            return
        attempt, best_step = self._attempt, self._report.best_step
        after = self._quietly(lambda: self._shared.change(lambda seen: after_yield(attempt, best_step, seen)))
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

    def _announce_leaving(self) -> None:
        leaving = self._order is Order.TERMINATE

        def announced(state: GenerationState) -> GenerationState:
            return replace(
                state, leaving=state.leaving or leaving, superseded=max(state.superseded, self._superseded_by)
            )

        self._quietly(lambda: self._shared.change(announced))

    # Small things.

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

    def _quietly(self, operation: Callable[[], _T]) -> _T | None:
        try:
            return operation()
        except StoreLostError:
            return None
