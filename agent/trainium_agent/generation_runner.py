"""Run this pod's part of a generation from the agent's event loop, by the decisions of `lifecycle`.

Every other thread only posts events to it.

Guarantees:
- Events are handled one at a time, in the order in which they were posted.
- A task gets a copy of the state; nothing here blocks.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import traceback
from typing import TYPE_CHECKING

from trainium_agent.generation.agreed_stop import AgreedStop
from trainium_agent.generation.state_watcher import StateWatcher
from trainium_agent.generation_tasks import GenerationTasks, TaskContext
from trainium_agent.hang.watchdog import sample_seconds
from trainium_agent.lifecycle import actions as do
from trainium_agent.lifecycle import events as on
from trainium_agent.lifecycle.generation import step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, LocalGeneration, Stage
from trainium_agent.workload.base import progress_file
from trainium_contract.exit_codes import ExitCode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from trainium_agent.coordinator.report import PodReport
    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_agent.generation_tasks import BlockingWorker
    from trainium_agent.hang.detection import Calibration
    from trainium_agent.lifecycle.events import Order
    from trainium_agent.ranks.processes import RankProcess
    from trainium_agent.ranks.standby_keeper import StandbyKeeper
    from trainium_agent.settings import AgentSettings
    from trainium_agent.workload.base import Workload
    from trainium_contract.wire.messages import CheckResult, Membership

_log = logging.getLogger(__name__)
_LAST_OUTPUT_SECONDS = 0.5
_POLL_SECONDS = 0.01


class GenerationRunner:
    """Runs this pod's ranks for one generation, through any number of restarts in place."""

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        *,
        workload: Workload,
        keeper: StandbyKeeper,
        report: PodReport,
        calibration: Calibration,
        worker: BlockingWorker,
        post: Callable[[Callable[[], None]], None],
        call_at: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        on_over: Callable[[LocalGeneration], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """`post` has something done in the event loop, from any thread; `call_at` and what is called back are its own.

        Times are those of `time.monotonic`.
        """
        self._settings = settings
        self._membership = membership
        self._node_rank = node_rank
        self._generation = membership.generation
        self._limits = GenerationLimits(membership.generation, settings.grace_seconds, sample_seconds(settings.hang))
        self._report = report
        self._workload = workload
        self._worker = worker
        self._post = post
        self._call_at = call_at
        self._on_over = on_over
        self._on_broken = on_broken
        self._local = LocalGeneration()
        self._stop: AgreedStop | None = None
        self._ranks: tuple[RankProcess, ...] = ()
        self._alarm: asyncio.TimerHandle | None = None
        self._leave_requested = threading.Event()
        self._watcher = StateWatcher(
            membership,
            on_change=lambda state: self._post(lambda: self._shared_changed(state)),
            on_loss=lambda: _log.info("the store of generation %d cannot be reached", membership.generation),
        )
        self._work = GenerationTasks(
            settings,
            membership,
            node_rank,
            workload=workload,
            keeper=keeper,
            signs=report.signs,
            calibration=calibration,
            watcher=self._watcher,
            reached=report.reached,
            leave_requested=self._leave_requested,
            post_fact=self._post_event,
            on_started=lambda ranks: post(lambda: self._adopt(ranks)),
            on_exit=self._ended,
            report_check=lambda result: post(lambda: self._checked(result)),
        )

    def begin(self) -> None:
        """Take part."""
        self._report.timed(None)
        self._watcher.start()
        self._handle(on.Notice.BEGIN)

    def order(self, order: Order, superseded_by: int = 0) -> None:
        """Leave the generation; `on_over` is called when no rank is alive."""
        self._handle(on.LeaveOrdered(order, superseded_by))

    # From any thread.

    def _post_event(self, event: on.Event) -> None:
        self._post(lambda: self._handle(event))

    def _ended(self, process: RankProcess) -> None:
        self._post(lambda: self._take_end(process))

    # In the event loop.

    def _handle(self, event: on.Event) -> None:
        assert threading.current_thread() is threading.main_thread(), "threads post, they do not take"
        before = self._local.stage
        self._local, actions = step(self._limits, self._local, event, time.monotonic())
        for action in actions:
            self._carry_out(action)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._local.stage is not Stage.OVER:
            deadline = wake_at(self._local)
            if deadline is not None:
                self._alarm = self._call_at(deadline, lambda: self._handle(on.Notice.TICK))
        elif before is not Stage.OVER:
            self._end()

    def _end(self) -> None:
        self._watcher.stop()
        self._report.stuck(())
        local = self._local

        def close() -> None:
            self._work.close()
            self._post(lambda: self._on_over(local))

        self._worker.do(close)

    def _take_end(self, process: RankProcess) -> None:
        code = process.exit_code
        assert code is not None
        unread = code == ExitCode.FINISHED and not process.output.complete.is_set()
        if unread and time.time() < process.ended_at + _LAST_OUTPUT_SECONDS:
            # The last step of a program may be on its way through the pipe.
            self._call_at(time.monotonic() + _POLL_SECONDS, lambda: self._take_end(process))
            return
        if process.asked or (self._stop is not None and self._stop.attempt == process.attempt):
            self._workload.observe(fresh=True)
            code = self._workload.code_after_request(code)
        self._handle(on.RankEnded(process.attempt, process.local_rank, process.rank, code, process.asked))

    def _adopt(self, ranks: tuple[RankProcess, ...]) -> None:
        self._ranks = ranks

    def _checked(self, result: CheckResult) -> None:
        self._report.checked(result)

    def _carry_out(self, action: do.Action) -> None:
        report = self._report
        match action:
            case do.RunTask(task):
                self._give(task)
            case do.SimpleAction.INTERRUPT_TASK:
                self._leave_requested.set()
                self._watcher.nudge()
            case do.SimpleAction.KILL:
                self._signal(signal.SIGKILL)
            case do.RequestExit(memory_ends):
                self._request_exit(self._workload.exit_signal(memory_ends=memory_ends))
            case do.EnterPhase(phase, attempt):
                report.enter(phase, generation=self._generation, attempt=attempt)
            case do.ReportRestart(attempt, cause, failed_at):
                report.restarting(self._generation, attempt, cause, time.time() if failed_at is None else failed_at)
            case do.ReportFailure(local_rank):
                report.failed(self._generation, self._ranks[local_rank])
            case do.ReportHang(rank, sentence):
                process = next(each for each in self._ranks if each.rank == rank)
                report.hung(self._generation, process, ExitCode.HUNG, sentence)
            case do.ReportVerdict(local_rank):
                report.give_up(None if local_rank is None else self._ranks[local_rank])
            case do.ReportNodeVerdict(code, sentence):
                report.give_up_with(code, sentence)
            case do.ReportWaiting(nodes):
                report.wait_for(nodes)
            case do.SimpleAction.OBSERVE_PROGRESS:
                self._workload.observe(fresh=True)
                report.observe()
            case do.ReportStuck(ranks):
                report.stuck(ranks)
            case do.ReportTiming(timing):
                report.timed(timing)
            case do.Log(sentence, severe):
                _log.log(logging.ERROR if severe else logging.WARNING, "%s", sentence)
            case do.FailPod(sentence):
                self._on_broken(sentence)

    def _give(self, task: do.Task) -> None:
        given = TaskContext(self._report.reached, self._ranks, self._local.attempt)

        def perform() -> None:
            try:
                result = self._work.perform(task, given)
            except Exception:  # noqa: BLE001 - the pod must end rather than sit idle
                failure = traceback.format_exc()
                self._post(lambda: self._on_broken(failure))
            else:
                self._post_event(result)

        self._worker.do(perform)

    def _request_exit(self, number: signal.Signals) -> None:
        """Ask the ranks to save and exit: after a step that all agents agree on, where they ask for it."""
        stop = self._join_stop()
        if stop is None:
            self._signal(number)
        else:
            stop.or_signal(lambda: self._post(lambda: self._signal(number)))

    def _shared_changed(self, state: GenerationState) -> None:
        if state.leaving or state.superseded > self._generation:
            self._join_stop()
        self._handle(on.SharedChanged(state))

    def _join_stop(self) -> AgreedStop | None:
        """Take part, once for an attempt, in the choice of its last step; None for ranks that never ask."""
        if not self._workload.agrees_on_stop or not self._ranks:
            return None
        attempt = self._ranks[0].attempt
        if self._stop is None or self._stop.attempt != attempt:
            records = [progress_file(self._settings, self._generation, process.local_rank) for process in self._ranks]
            timeout = self._settings.grace_seconds / 2
            self._stop = AgreedStop(self._membership, self._node_rank, attempt, records, timeout=timeout)
            self._stop.start()
        return self._stop

    def _signal(self, number: signal.Signals) -> None:
        for process in self._ranks:
            process.signal(number)
