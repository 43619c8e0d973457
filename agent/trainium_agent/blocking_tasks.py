"""Run the blocking tasks of a generation, one after another, in the pod's worker thread.

A task receives a copy of the runner's state that it needs, and returns one result. Only the worker thread uses the
connection to the generation's store, the rendezvous and the observed stalls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from trainium_agent.checks.pair_round import NodeFailedPairTestError, PairRound
from trainium_agent.checks.pairing import count_unexplained
from trainium_agent.exits.diagnosis import exit_priority
from trainium_agent.exits.restart_policy import (
    GenerationState,
    RestartAction,
    RestartDecision,
    after_yield,
    decide_restart,
)
from trainium_agent.hang.detection import Finding, FindingKind, after_hang
from trainium_agent.hang.response import HangResponse
from trainium_agent.lifecycle import actions, events
from trainium_agent.lifecycle.generation import KILL_SECONDS
from trainium_agent.rendezvous import GenerationRendezvous, GenerationStoppedError
from trainium_agent.shared_state.state_watcher import WaitInterruptedError
from trainium_agent.shared_state.store import ExitBarrier, StoreLostError
from trainium_agent.workload.attempt import AttemptLayout
from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.messages import WorkerPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_agent.exits.diagnosis import Diagnosis
    from trainium_agent.pod_services import PodServices
    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.shared_state.state_watcher import StateWatcher
    from trainium_contract.wire.messages import Membership

_T = TypeVar("_T")
_LAST_LINES_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The runner's state at the time when a task is submitted."""

    best_progress: float
    """Progress of the run that this pod has observed (`PodReport.best_progress`)."""
    ranks: tuple[RankProcess, ...]
    """Ranks of the newest attempt, by local rank."""
    attempt: int


class BlockingTasks:
    """Performs the tasks of one generation."""

    def __init__(
        self,
        services: PodServices,
        membership: Membership,
        node_rank: int,
        *,
        watcher: StateWatcher,
        post_event: Callable[[events.ExternalEvent], None],
        on_started: Callable[[tuple[RankProcess, ...]], None],
        on_exit: Callable[[RankProcess], None],
    ) -> None:
        """Callbacks run in the worker thread, `on_exit` in any thread."""
        settings = services.settings
        self._services = services
        self._workload = services.workload
        self._max_restarts = settings.max_in_place_restarts
        self._diagnoser = services.report.diagnoser
        self._membership = membership
        self._node_rank = node_rank
        self._on_exit = on_exit
        self._on_started = on_started
        self._diagnosed: tuple[RankProcess, Diagnosis] | None = None
        self._cause = membership.cause
        self._rendezvous = GenerationRendezvous(
            membership,
            node_rank,
            initial=GenerationState(best_progress=services.report.best_progress),
            waiting_for=lambda nodes: post_event(events.WaitingForNodes(nodes)),
            watcher=watcher,
            reserve_port=services.reserve_port,
            pair_rounds={
                check: PairRound(
                    settings,
                    membership,
                    node_rank,
                    check,
                    watcher=watcher,
                    standby_manager=services.standby_manager,
                    reserve_port=services.reserve_port,
                    report=services.record_check,
                )
                for check in (PreflightCheck.PAIRWISE, PreflightCheck.BANDWIDTH)
                if check in settings.checks
            },
        )
        self._store = self._rendezvous.store
        self._exit_barrier = ExitBarrier(self._store, node_rank, len(membership.members))
        self._hangs = HangResponse(
            settings,
            membership,
            node_rank,
            calibration=services.calibration,
            store=self._store,
            workload=services.workload,
        )

    def perform(self, task: actions.Task, context: TaskContext) -> events.Result:
        """Perform a task. Raises the errors that end the pod, such as a standby that cannot be replaced."""
        self._hangs.set_living_ranks(tuple(rank for rank in context.ranks if rank.alive and not rank.exit_requested))
        try:
            return self._perform(task, context)
        except StoreLostError as loss:
            return events.StoreLost(str(loss))

    def close(self) -> None:
        """Close the connections of the generation."""
        self._rendezvous.shutdown()

    def _perform(self, task: actions.Task, context: TaskContext) -> events.Result:
        match task:
            case actions.SimpleTask.JOIN:
                return self._join(context)
            case actions.StartRanks():
                return self._start(task, context.attempt)
            case actions.DiagnoseExits():
                return self._diagnose(task, context)
            case actions.SimpleTask.COUNT_UNANSWERED_HANG:
                self._store.connect()
                return events.HangCounted(self._count_hang(Finding(FindingKind.SILENT), context))
            case actions.EnterExitBarrier():
                problem = self._workload.on_finish(context.ranks) if task.phase is WorkerPhase.FINISHED else ""
                if problem:
                    return self._give_up(context.attempt, ExitCode.USER_ERROR, problem, context)
                self._exit_barrier.enter(context.attempt, task.phase)
                return events.SimpleResult.DONE
            case actions.SimpleTask.CHECK_FINISHED:
                return self._check_finished(context.attempt)
            case actions.SimpleTask.CHECK_YIELDED:
                return events.YieldChecked(self._unless_store_lost(lambda: self._continue_after_yield(context)))
            case actions.Announce():
                self._unless_store_lost(lambda: self._store.update_state(lambda state: _announce(task, state)))
                return events.SimpleResult.DONE
            case actions.SimpleTask.ANNOUNCE_BROKEN:
                self._unless_store_lost(lambda: self._store.update_state(lambda state: replace(state, broken=True)))
                return events.SimpleResult.DONE
            case actions.SimpleTask.END_LEFTOVERS:
                left = self._services.standby_manager.end_leftovers(KILL_SECONDS)
                return events.Unkillable(", ".join(left)) if left else events.SimpleResult.DONE
            case _:
                return self._perform_hang_task(task, context)

    # Start of an attempt.

    def _join(self, context: TaskContext) -> events.Result:
        self._hangs.reset()
        try:
            state, port = self._rendezvous.join_next()
            self._cause = state.cause if state.attempt else self._membership.cause
            return events.AttemptJoined(state, port)
        except WaitInterruptedError:
            return events.SimpleResult.INTERRUPTED
        except GenerationStoppedError:
            return events.SimpleResult.STOPPED
        except NodeFailedPairTestError as failure:
            return self._give_up(self._rendezvous.attempt, failure.code, str(failure), context)

    def _give_up(self, attempt: int, code: ExitCode, sentence: str, context: TaskContext) -> events.PodGaveUp:
        self._unless_store_lost(
            lambda: self._store.update_state(
                lambda state: decide_restart(code, attempt, context.best_progress, state, 0).state
            )
        )
        return events.PodGaveUp(code, sentence)

    def _start(self, start: actions.StartRanks, attempt: int) -> events.RanksStarted:
        generation, members = self._membership.generation, self._membership.members
        layout = AttemptLayout(
            generation=generation,
            attempt=attempt,
            node_rank=self._node_rank,
            nodes=len(members),
            ranks_per_node=self._membership.processes_per_node,
            master_ip=members[0].pod_ip,
            master_port=start.port,
            accumulation=self._membership.accumulation,
            requested_nodes=self._membership.requested_nodes,
            cause="" if generation == 1 and attempt == 0 else self._cause,
        )
        ranks = tuple(self._start_rank(layout, local_rank) for local_rank in range(layout.ranks_per_node))
        self._on_started(ranks)
        return events.RanksStarted(len(ranks))

    def _start_rank(self, layout: AttemptLayout, local_rank: int) -> RankProcess:
        return self._services.standby_manager.start(
            self._workload.request(layout, local_rank),
            local_rank=local_rank,
            rank=layout.compute_rank(local_rank),
            attempt=layout.attempt,
            on_exit=self._on_exit,
            on_line=self._workload.on_output(layout, local_rank),
        )

    # Ends of ranks.

    def _diagnose(self, task: actions.DiagnoseExits, context: TaskContext) -> events.ExitsDiagnosed:
        if task.reconnect:
            self._store.connect()
        ended_ranks = [context.ranks[local_rank] for local_rank in task.local_ranks]
        process = (
            ended_ranks[0]
            if len(ended_ranks) == 1
            else max(ended_ranks, key=lambda rank: exit_priority(self._diagnoser.classify(rank)))
        )
        code, attempt, diagnosis = process.exit_code or 0, context.attempt, self._diagnose_once(process)

        def decide(state: GenerationState) -> RestartDecision:
            return decide_restart(
                code,
                attempt,
                context.best_progress,
                state,
                self._max_restarts,
                verdict=diagnosis.verdict,
                seen_before=diagnosis.seen_before,
            )

        decision = decide(self._store.read_state())
        new_state = self._store.update_state(lambda state: count_unexplained(state, decide(state).state))
        should_withdraw = decision.action is RestartAction.WITHDRAW
        if should_withdraw or new_state.stopped is not None:
            process.output.complete.wait(_LAST_LINES_SECONDS)  # nothing can ask for them later
        return events.ExitsDiagnosed(
            local_rank=process.local_rank,
            rank=process.rank,
            code=code,
            cause=diagnosis.verdict.cause,
            sentence=diagnosis.verdict.sentence,
            ended_at=process.ended_at,
            withdraw=should_withdraw,
            backoff_seconds=decision.backoff_seconds,
            state=new_state,
        )

    def _diagnose_once(self, process: RankProcess) -> Diagnosis:
        """Diagnose the end once: it counts as one failure, even if the store is lost and the task is repeated."""
        if self._diagnosed is None or self._diagnosed[0] is not process:
            self._diagnosed = (process, self._diagnoser.diagnose(process))
        return self._diagnosed[1]

    # Hangs.

    def _perform_hang_task(self, task: actions.Task, context: TaskContext) -> events.Result:
        match task:
            case actions.SimpleTask.OPEN_INQUIRY:
                self._hangs.inquiry.open(context.attempt)
                return self._hangs.build_inquiry_update()
            case actions.AnswerInquiry():
                self._unless_store_lost(lambda: self._hangs.inquiry.answer(task.state))
                return self._hangs.build_inquiry_update()
            case actions.SimpleTask.CONCLUDE_INQUIRY:
                finding = self._hangs.inquiry.conclude(context.attempt)
                if finding is None:
                    return self._hangs.build_inquiry_update()
                return self._hangs.apply_finding(finding, self._count_hang(finding, context))
            case actions.ReadFinding():
                finding = self._unless_store_lost(lambda: self._hangs.inquiry.read_finding(context.attempt))
                return self._hangs.apply_finding(finding or Finding(FindingKind.COLLECTIVE), task.state)
            case _:
                return self._hangs.sample()

    def _count_hang(self, finding: Finding, context: TaskContext) -> GenerationState:
        return self._store.update_state(
            lambda state: after_hang(finding, context.attempt, context.best_progress, state, self._max_restarts)
        )

    # Ends without a failure.

    def _check_finished(self, attempt: int) -> events.FinishChecked:
        all_finished = self._exit_barrier.have_all_finished(attempt)
        if all_finished:
            self._exit_barrier.leave()
        return events.FinishChecked(all_finished)

    def _continue_after_yield(self, context: TaskContext) -> GenerationState | None:
        """Start the next attempt if all ranks yielded, without a newer generation or a member that leaves the job."""
        if not self._exit_barrier.have_all_entered(context.attempt):
            return None
        state = self._store.read_state()
        if state.leaving or state.stopped is not None or state.superseded_by > self._membership.generation:
            return None
        return self._store.update_state(lambda current: after_yield(context.attempt, context.best_progress, current))

    # The store.

    def _unless_store_lost(self, operation: Callable[[], _T]) -> _T | None:
        try:
            return operation()
        except StoreLostError:
            return None


def _announce(task: actions.Announce, state: GenerationState) -> GenerationState:
    return replace(
        state, leaving=state.leaving or task.leaving, superseded_by=max(state.superseded_by, task.superseded_by)
    )
