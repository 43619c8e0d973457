"""The owner of a generation in the agent's event loop: it alone holds the state, decides by `life`, and has it done.

Every other thread only posts events to it. Invariants: events are answered one at a time, in the order in which they
were posted; what an errand is given is a copy; nothing here blocks. See docs/decisions/0104-one-owner-loop.md.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
import traceback
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_trainer.agent.generation.state_watcher import StateWatcher
from trainium_trainer.agent.generation_tasks import GenerationWork, Given
from trainium_trainer.agent.hang.watchdog import look_seconds
from trainium_trainer.agent.lifecycle import actions as do
from trainium_trainer.agent.lifecycle import events as on
from trainium_trainer.agent.lifecycle.generation import step, wake_at
from trainium_trainer.agent.lifecycle.state import Life, Stage, Terms

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from trainium_contract.wire.messages import CheckResult, Membership
    from trainium_trainer.agent.coordinator.report import PodReport
    from trainium_trainer.agent.generation_tasks import ErrandThread
    from trainium_trainer.agent.hang.detection import Calibration
    from trainium_trainer.agent.lifecycle.events import Order
    from trainium_trainer.agent.ranks.processes import RankProcess
    from trainium_trainer.agent.ranks.standby_keeper import StandbyKeeper
    from trainium_trainer.agent.settings import AgentSettings

_log = logging.getLogger(__name__)


class GenerationOwner:
    """Runs this pod's ranks for one generation, through any number of restarts in place."""

    def __init__(
        self,
        settings: AgentSettings,
        membership: Membership,
        node_rank: int,
        *,
        keeper: StandbyKeeper,
        report: PodReport,
        calibration: Calibration,
        worker: ErrandThread,
        post: Callable[[Callable[[], None]], None],
        call_at: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
        on_over: Callable[[Life], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """`post` has something done in the event loop, from any thread; `call_at` and what is called back are its own.

        Times are those of `time.monotonic`.
        """
        self._generation = membership.generation
        self._terms = Terms(membership.generation, settings.grace_seconds, look_seconds(settings.hang))
        self._report = report
        self._worker = worker
        self._post = post
        self._call_at = call_at
        self._on_over = on_over
        self._on_broken = on_broken
        self._life = Life()
        self._ranks: tuple[RankProcess, ...] = ()
        self._alarm: asyncio.TimerHandle | None = None
        self._told_to_leave = threading.Event()
        self._watcher = StateWatcher(
            membership,
            on_change=lambda state: self._say(on.SharedChanged(state)),
            on_loss=lambda: _log.info("the store of generation %d cannot be reached", membership.generation),
        )
        self._work = GenerationWork(
            settings,
            membership,
            node_rank,
            keeper=keeper,
            signs=report.signs,
            calibration=calibration,
            watcher=self._watcher,
            reached=report.reached,
            told_to_leave=self._told_to_leave,
            say=self._say,
            on_started=lambda ranks: post(lambda: self._adopt(ranks)),
            on_exit=self._ended,
            report_check=lambda result: post(lambda: self._checked(result)),
        )

    def begin(self) -> None:
        """Take part."""
        self._report.timed(None)
        self._watcher.start()
        self._take(on.Begin())

    def order(self, order: Order, superseded_by: int = 0) -> None:
        """Leave the generation; `on_over` is called when no rank is alive."""
        self._take(on.Ordered(order, superseded_by))

    # From any thread.

    def _say(self, event: on.Event) -> None:
        self._post(lambda: self._take(event))

    def _ended(self, process: RankProcess) -> None:
        code = process.exit_code
        assert code is not None
        self._say(on.Ended(process.attempt, process.local_rank, process.rank, code, process.asked))

    # In the event loop.

    def _take(self, event: on.Event) -> None:
        assert threading.current_thread() is threading.main_thread(), "threads post, they do not take"
        before = self._life.stage
        self._life, actions = step(self._terms, self._life, event, time.monotonic())
        for action in actions:
            self._carry_out(action)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._life.stage is not Stage.OVER:
            due = wake_at(self._life)
            if due is not None:
                self._alarm = self._call_at(due, lambda: self._take(on.Tick()))
        elif before is not Stage.OVER:
            self._end()

    def _end(self) -> None:
        self._watcher.stop()
        self._report.stuck(())
        life = self._life

        def close() -> None:
            self._work.close()
            self._post(lambda: self._on_over(life))

        self._worker.do(close)

    def _adopt(self, ranks: tuple[RankProcess, ...]) -> None:
        self._ranks = ranks

    def _checked(self, result: CheckResult) -> None:
        self._report.checked(result)

    def _carry_out(self, action: do.Action) -> None:
        report = self._report
        match action:
            case do.Do(errand):
                self._give(errand)
            case do.Hurry():
                self._told_to_leave.set()
                self._watcher.nudge()
            case do.Kill():
                self._signal(signal.SIGKILL)
            case do.AskToLeave(memory_ends):
                self._signal(signal.SIGUSR1 if memory_ends else signal.SIGTERM)
            case do.Enter(phase, attempt):
                report.enter(phase, generation=self._generation, attempt=attempt)
            case do.Restarting(attempt, cause, failed_at):
                report.restarting(self._generation, attempt, cause, time.time() if failed_at is None else failed_at)
            case do.Failed(local_rank):
                report.failed(self._generation, self._ranks[local_rank])
            case do.Hung(rank, sentence):
                process = next(each for each in self._ranks if each.rank == rank)
                report.hung(self._generation, process, ExitCode.HUNG, sentence)
            case do.GiveUp(local_rank):
                report.give_up(None if local_rank is None else self._ranks[local_rank])
            case do.GiveUpWith(code, sentence):
                report.give_up_with(code, sentence)
            case do.Waits(nodes):
                report.wait_for(nodes)
            case do.Observe():
                report.observe()
            case do.Stuck(ranks):
                report.stuck(ranks)
            case do.Timed(timing):
                report.timed(timing)
            case do.Say(sentence, severe):
                _log.log(logging.ERROR if severe else logging.WARNING, "%s", sentence)
            case do.Break(sentence):
                self._on_broken(sentence)

    def _give(self, errand: do.Errand) -> None:
        given = Given(self._report.reached, self._ranks)

        def perform() -> None:
            try:
                result = self._work.perform(errand, given)
            except Exception:  # noqa: BLE001 - the pod must end rather than sit idle
                failure = traceback.format_exc()
                self._post(lambda: self._on_broken(failure))
            else:
                self._say(result)

        self._worker.do(perform)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._ranks:
            process.signal(number)
