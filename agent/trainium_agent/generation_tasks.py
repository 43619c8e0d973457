"""Run the blocking tasks of a generation, one after another, in the pod's worker thread.

A task gets all that it needs of the runner's state when it is submitted, and returns one result. Invariant: the
connection to the generation's store, the rendezvous and the observed stalls belong to the worker alone.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from trainium_agent.checks.pair_round import NodeFailedPairTestError, PairRound
from trainium_agent.checks.pairing import noted
from trainium_agent.exits.diagnosis import weight
from trainium_agent.exits.restart_policy import Decision, GenerationState, RestartJudgement, after_yield, judge
from trainium_agent.generation.store import ExitBarrier, StoreLostError
from trainium_agent.hang.detection import Finding, FindingKind, after_hang
from trainium_agent.hang.response import HangResponse
from trainium_agent.lifecycle import actions as do
from trainium_agent.lifecycle import events as on
from trainium_agent.rendezvous import (
    GenerationRendezvous,
    GenerationStoppedError,
    RendezvousInterruptedError,
)
from trainium_agent.workload.base import AttemptLayout
from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.messages import WorkerPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_agent.exits.diagnosis import Diagnosis, Signs
    from trainium_agent.generation.state_watcher import StateWatcher
    from trainium_agent.hang.detection import Calibration
    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.standby_keeper import StandbyKeeper
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.base import Workload
    from trainium_contract.wire.messages import CheckResult, Membership

_T = TypeVar("_T")
_LAST_LINES_SECONDS = 1.0


class BlockingWorker:
    """The thread in which tasks are done, one after another, for the life of the pod."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    def do(self, task: Callable[[], None]) -> None:
        """Do it when those before it are done; it raises nothing."""
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            self._tasks.get()()


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The owner's state as of when an task is given."""

    reached: float
    """How far this pod has seen the run come."""
    ranks: tuple[RankProcess, ...]
    """Of the newest attempt, by local rank."""
    attempt: int


class GenerationTasks:
    """The tasks of one generation."""

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        *,
        workload: Workload,
        keeper: StandbyKeeper,
        signs: Signs,
        calibration: Calibration,
        watcher: StateWatcher,
        reached: float,
        leave_requested: threading.Event,
        post_fact: Callable[[on.Fact], None],
        on_started: Callable[[tuple[RankProcess, ...]], None],
        on_exit: Callable[[RankProcess], None],
        report_check: Callable[[CheckResult], None],
    ) -> None:
        """Callbacks run in the worker's thread, `on_exit` in any."""
        self._settings = settings
        self._membership = membership
        self._node_rank = node_rank
        self._workload = workload
        self._keeper = keeper
        self._signs = signs
        self._leave_requested = leave_requested
        self._on_exit = on_exit
        self._on_started = on_started
        self._diagnosed: tuple[RankProcess, Diagnosis] | None = None
        self._cause = membership.cause
        pair_checks = (PreflightCheck.PAIRWISE, PreflightCheck.BANDWIDTH) if settings.program is None else ()
        self._rendezvous = GenerationRendezvous(
            membership,
            node_rank,
            initial=GenerationState(best_step=reached),
            interrupted=leave_requested.is_set,
            waiting_for=lambda nodes: post_fact(on.WaitingFor(nodes)),
            watcher=watcher,
            reserve_port=workload.reserve_port,
            pair_rounds={
                check: PairRound(
                    settings,
                    membership,
                    node_rank,
                    keeper,
                    check=check,
                    reserve_port=workload.reserve_port,
                    interrupted=self._stop_when_ordered,
                    report=report_check,
                )
                for check in pair_checks
                if check in settings.checks
            },
        )
        self._store = self._rendezvous.store
        self._exit_barrier = ExitBarrier(self._store, node_rank, len(membership.members))
        self._hangs = HangResponse(
            settings, membership, node_rank, calibration=calibration, store=self._store, workload=workload
        )

    def perform(self, task: do.Task, given: TaskContext) -> on.Result:
        """Do it. Raises what makes the whole pod useless, as a standby that cannot be replaced."""
        self._hangs.see(tuple(each for each in given.ranks if each.alive and not each.asked))
        try:
            return self._perform(task, given)
        except StoreLostError as loss:
            return on.StoreLost(str(loss))

    def close(self) -> None:
        """Close the connections of the generation, which is over on this pod."""
        self._rendezvous.shutdown()

    def _perform(self, task: do.Task, given: TaskContext) -> on.Result:
        match task:
            case do.SimpleTask.JOIN:
                return self._join(given)
            case do.StartRanks():
                return self._start(task, given.attempt)
            case do.DiagnoseEnds():
                return self._judge(task, given)
            case do.SimpleTask.COUNT_UNANSWERED_HANG:
                self._connect_again(wanted=True)
                return on.HangCounted(self._count(Finding(FindingKind.SILENT), given))
            case do.SignExit():
                problem = self._workload.on_finish(given.ranks) if task.phase is WorkerPhase.FINISHED else ""
                if problem:
                    return self._give_up(given.attempt, ExitCode.USER_ERROR, problem, given)
                self._exit_barrier.sign(given.attempt, task.phase)
                return on.Outcome.DONE
            case do.SimpleTask.CHECK_FINISHED:
                return self._finish(given.attempt)
            case do.SimpleTask.CHECK_YIELDED:
                return on.YieldChecked(self._unless_store_lost(lambda: self._go_on(given)))
            case do.Announce():
                self._unless_store_lost(lambda: self._store.change(lambda state: _announced(task, state)))
                return on.Outcome.DONE
            case do.SimpleTask.ANNOUNCE_BROKEN:
                self._unless_store_lost(lambda: self._store.change(lambda state: replace(state, broken=True)))
                return on.Outcome.DONE
            case _:
                return self._perform_hang_task(task, given)

    # The beginning of an attempt.

    def _join(self, given: TaskContext) -> on.Result:
        self._hangs.forget()
        try:
            state, port = self._rendezvous.next_rendezvous()
            self._cause = state.cause if state.attempt else self._membership.cause
            return on.Joined(state, port)
        except RendezvousInterruptedError:
            return on.Outcome.INTERRUPTED
        except GenerationStoppedError:
            return on.Outcome.STOPPED
        except NodeFailedPairTestError as found:
            return self._give_up(self._rendezvous.attempt, found.code, str(found), given)

    def _give_up(self, attempt: int, code: ExitCode, sentence: str, given: TaskContext) -> on.GaveUp:
        self._unless_store_lost(
            lambda: self._store.change(lambda state: judge(code, attempt, given.reached, state, 0).state)
        )
        return on.GaveUp(code, sentence)

    def _start(self, start: do.StartRanks, attempt: int) -> on.Started:
        generation, members = self._membership.generation, self._membership.members
        layout = AttemptLayout(
            generation=generation,
            attempt=attempt,
            node_rank=self._node_rank,
            nodes=len(members),
            on_a_node=self._membership.processes_per_node,
            master_ip=members[0].pod_ip,
            master_port=start.port,
            accumulation=self._membership.accumulation,
            cause="" if generation == 1 and attempt == 0 else self._cause,
        )
        ranks = tuple(self._start_rank(layout, local_rank) for local_rank in range(layout.on_a_node))
        self._on_started(ranks)
        return on.Started(len(ranks))

    def _start_rank(self, layout: AttemptLayout, local_rank: int) -> RankProcess:
        return self._keeper.start(
            self._workload.request(layout, local_rank),
            local_rank=local_rank,
            rank=layout.rank(local_rank),
            attempt=layout.attempt,
            on_exit=self._on_exit,
            on_line=self._workload.on_output(layout, local_rank),
        )

    # Ends of ranks.

    def _judge(self, task: do.DiagnoseEnds, given: TaskContext) -> on.EndsDiagnosed:
        self._connect_again(wanted=task.reconnect)
        ended = [given.ranks[local_rank] for local_rank in task.local_ranks]
        process = ended[0] if len(ended) == 1 else max(ended, key=lambda each: weight(self._signs.meaning(each)))
        code, attempt, diagnosis = process.exit_code or 0, given.attempt, self._diagnosis_of(process)

        def judged(state: GenerationState) -> RestartJudgement:
            return judge(
                code,
                attempt,
                given.reached,
                state,
                self._settings.max_in_place_restarts,
                verdict=diagnosis.verdict,
                seen_before=diagnosis.seen_before,
            )

        judgement = judged(self._store.state())
        after = self._store.change(lambda state: noted(state, judged(state).state))
        withdraw = judgement.decision is Decision.WITHDRAW
        if withdraw or after.stopped is not None:
            process.output.complete.wait(_LAST_LINES_SECONDS)  # nobody can ask for them later
        return on.EndsDiagnosed(
            local_rank=process.local_rank,
            rank=process.rank,
            code=code,
            cause=diagnosis.verdict.cause,
            sentence=diagnosis.verdict.sentence,
            ended_at=process.ended_at,
            withdraw=withdraw,
            backoff_seconds=judgement.backoff_seconds,
            after=after,
        )

    def _diagnosis_of(self, process: RankProcess) -> Diagnosis:
        """Diagnose the end once: it counts as one failure, however often the store is lost meanwhile."""
        if self._diagnosed is None or self._diagnosed[0] is not process:
            self._diagnosed = (process, self._signs.diagnose(process))
        return self._diagnosed[1]

    # Standstills.

    def _perform_hang_task(self, task: do.Task, given: TaskContext) -> on.Result:
        match task:
            case do.SimpleTask.OPEN_INQUIRY:
                return self._hangs.ask(given.attempt)
            case do.AnswerQuestion():
                return self._unless_store_lost(lambda: self._hangs.answer(task.state)) or self._hangs.inquired()
            case do.SimpleTask.CONCLUDE_INQUIRY:
                finding = self._hangs.conclude(given.attempt)
                if finding is None:
                    return self._hangs.inquired()
                return self._hangs.found(finding, self._count(finding, given))
            case do.ReadFinding():
                finding = self._unless_store_lost(lambda: self._hangs.published(given.attempt))
                return self._hangs.found(finding or Finding(FindingKind.COLLECTIVE), task.after)
            case _:
                return self._hangs.sample()

    def _count(self, finding: Finding, given: TaskContext) -> GenerationState:
        limit = self._settings.max_in_place_restarts
        return self._store.change(lambda state: after_hang(finding, given.attempt, given.reached, state, limit))

    # The end without a failure.

    def _finish(self, attempt: int) -> on.FinishChecked:
        finished = self._exit_barrier.all_finished(attempt)
        if finished:
            self._exit_barrier.part()
        return on.FinishChecked(finished)

    def _go_on(self, given: TaskContext) -> GenerationState | None:
        """Continue in place where all ranks yielded and no newer generation came, unless a member leaves the job."""
        if not self._exit_barrier.all_signed(given.attempt):
            return None
        state = self._store.state()
        if state.leaving or state.stopped is not None or state.superseded > self._membership.generation:
            return None
        return self._store.change(lambda seen: after_yield(given.attempt, given.reached, seen))

    # The store.

    def _connect_again(self, *, wanted: bool) -> None:
        if wanted and not self._store.connected:
            self._store.connect()

    def _unless_store_lost(self, operation: Callable[[], _T]) -> _T | None:
        try:
            return operation()
        except StoreLostError:
            return None

    def _stop_when_ordered(self) -> None:
        if self._leave_requested.is_set():
            raise RendezvousInterruptedError("ordered to leave")


def _announced(task: do.Announce, state: GenerationState) -> GenerationState:
    return replace(state, leaving=state.leaving or task.leaving, superseded=max(state.superseded, task.superseded_by))
