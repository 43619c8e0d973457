"""Run this pod's part of a generation from the agent's event loop, as `lifecycle` decides.

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

from trainium_agent.blocking_tasks import BlockingTasks, TaskContext
from trainium_agent.hang.rank_sampler import sample_seconds
from trainium_agent.lifecycle import actions, events
from trainium_agent.lifecycle.events import Order
from trainium_agent.lifecycle.generation import KILL_SECONDS, step, wake_at
from trainium_agent.lifecycle.state import GenerationLimits, LocalGeneration, Stage
from trainium_agent.linux.kernel import read_process_state
from trainium_agent.shared_state.agreed_stop import AgreedStop
from trainium_agent.shared_state.state_watcher import StateWatcher
from trainium_agent.workload.attempt import find_progress_file
from trainium_contract.exit_codes import ExitCode
from trainium_worker.save_request import request_path, request_save

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from pathlib import Path

    from trainium_agent.exits.restart_policy import GenerationState
    from trainium_agent.pod_services import PodServices
    from trainium_agent.ranks.processes import RankProcess
    from trainium_contract.wire.messages import Membership

_log = logging.getLogger(__name__)
_LAST_OUTPUT_SECONDS = 0.5
_POLL_SECONDS = 0.01
_SAVE_SECONDS = KILL_SECONDS / 2
"""Longest wait for a rank that saves the newest step before it is killed."""


class GenerationRunner:
    """Runs this pod's ranks for one generation, through any number of restarts in place."""

    def __init__(
        self,
        services: PodServices,
        membership: Membership,
        node_rank: int,
        on_end: Callable[[LocalGeneration], None],
    ) -> None:
        """`on_end` is called in the event loop, once no rank is alive."""
        self._settings = settings = services.settings
        self._membership = membership
        self._node_rank = node_rank
        self._generation = membership.generation
        self._report = services.report
        self._workload = services.workload
        self._worker = services.worker
        self._event_loop = services.event_loop
        self._on_end = on_end
        grace = membership.find_grace_seconds(settings.pod_uid)
        self.grace_seconds = settings.grace_seconds if grace is None else min(settings.grace_seconds, grace)
        """Time for the ranks to save: of the job, or less where the pod has less."""
        self._local = LocalGeneration(
            GenerationLimits(membership.generation, self.grace_seconds, sample_seconds(settings.hang))
        )
        self._stop: AgreedStop | None = None
        self._memory_remains = False
        """Whether this pod is known to be in the next generation."""
        self._ranks: tuple[RankProcess, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher = StateWatcher(
            membership,
            on_change=lambda state: self._event_loop.post(lambda: self._on_shared_state(state)),
            on_loss=lambda: _log.info("the store of generation %d cannot be reached", membership.generation),
        )
        self._tasks = BlockingTasks(
            services,
            membership,
            node_rank,
            watcher=self._watcher,
            post_event=self._post_event,
            on_started=lambda ranks: self._event_loop.post(lambda: self._set_ranks(ranks)),
            on_exit=lambda process: self._event_loop.post(lambda: self._handle_exit(process)),
        )

    def start(self) -> None:
        """Start this pod's part of the generation."""
        self._report.timing = None
        self._watcher.start()
        self._handle(events.SimpleEvent.BEGIN)

    def leave(self, order: Order, superseded_by: int = 0, *, memory_remains: bool) -> None:
        """Order this pod to leave the generation; `on_end` is called when no rank is alive.

        memory_remains: the pod is in the next generation.
        """
        self._memory_remains = memory_remains
        if self._stop is not None and not memory_remains:
            self._stop.end_memory()
        self._handle(events.LeaveOrdered(order, superseded_by))

    # From any thread.

    def _post_event(self, event: events.Event) -> None:
        self._event_loop.post(lambda: self._handle(event))

    # In the event loop.

    def _handle(self, event: events.Event) -> None:
        assert threading.current_thread() is threading.main_thread(), "only the main thread handles events"
        previous_stage = self._local.stage
        self._local, requested = step(self._local, event, time.monotonic())
        for action in requested:
            self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._local.stage is not Stage.ENDED:
            deadline = wake_at(self._local)
            if deadline is not None:
                self._timer = self._event_loop.call_at(deadline, lambda: self._handle(events.SimpleEvent.TICK))
        elif previous_stage is not Stage.ENDED:
            self._close()

    def _close(self) -> None:
        self._watcher.stop()
        self._report.set_stuck_ranks(())
        local = self._local

        def close() -> None:
            self._tasks.close()
            self._event_loop.post(lambda: self._on_end(local))

        self._worker.submit(close)

    def _handle_exit(self, process: RankProcess) -> None:
        code = process.exit_code
        assert code is not None
        may_be_unread = code == ExitCode.FINISHED and not process.output.complete.is_set()
        if may_be_unread and time.time() < process.ended_at + _LAST_OUTPUT_SECONDS:
            # The last step of a program may still be in the pipe.
            self._event_loop.call_at(time.monotonic() + _POLL_SECONDS, lambda: self._handle_exit(process))
            return
        if code == ExitCode.FINISHED:
            self._workload.record_success(process)
        if process.exit_requested or (self._stop is not None and self._stop.attempt == process.attempt):
            self._workload.observe(fresh=True)
            code = self._workload.exit_code_after_request(code)
        self._handle(events.RankExited(process.attempt, process.local_rank, process.rank, code, process.exit_requested))

    def _set_ranks(self, ranks: tuple[RankProcess, ...]) -> None:
        self._ranks = ranks

    def _perform(self, action: actions.Action) -> None:
        report = self._report
        match action:
            case actions.RunTask(task):
                self._submit(task)
            case actions.SimpleAction.INTERRUPT_TASK:
                self._watcher.interrupt()
            case actions.SimpleAction.KILL:
                self._signal(signal.SIGKILL)
            case actions.RequestExit(memory_ends):
                self._request_exit(self._workload.ranks.storage_signal if memory_ends else signal.SIGTERM)
            case actions.EnterPhase(phase, attempt):
                report.set_phase(phase, generation=self._generation, attempt=attempt)
            case actions.ReportRestart(attempt, cause, failed_at):
                report.record_restart(self._generation, attempt, cause, time.time() if failed_at is None else failed_at)
            case actions.ReportFailure(local_rank):
                report.record_failure(self._generation, self._ranks[local_rank])
            case actions.ReportHang(rank, sentence):
                process = next(rank_process for rank_process in self._ranks if rank_process.rank == rank)
                report.record_hang(self._generation, process, sentence)
            case actions.ReportVerdict(local_rank):
                report.set_verdict(None if local_rank is None else self._ranks[local_rank])
                self._workload.list_checkpoints(0.0)  # for the final figures, without a delay of the verdict
            case actions.ReportNodeVerdict(code, sentence):
                report.set_pod_verdict(code, sentence)
            case actions.ReportWaiting(nodes):
                report.set_waiting_for(nodes)
            case actions.SimpleAction.OBSERVE_PROGRESS:
                self._workload.observe(fresh=True)
                report.observe()
            case actions.SimpleAction.REPORT_GRACE_EXCEEDED:
                _log.warning(
                    "the ranks did not end within %.0f s of the request and are killed: what they made since their "
                    "checkpoint is lost",
                    self._settings.grace_seconds,
                )
                report.record_killed(self._generation)
            case actions.ReportStuck(ranks):
                report.set_stuck_ranks(ranks)
            case actions.ReportTiming(timing):
                report.timing = timing
            case actions.Log(sentence, severe):
                _log.log(logging.ERROR if severe else logging.WARNING, "%s", sentence)
            case actions.FailPod(sentence):
                self._event_loop.fail(sentence)

    def _submit(self, task: actions.Task) -> None:
        context = TaskContext(self._report.best_progress, self._ranks, self._local.attempt)

        def perform() -> None:
            try:
                result = self._tasks.perform(task, context)
            except Exception:  # noqa: BLE001 - the pod must end rather than sit idle
                failure = traceback.format_exc()
                self._event_loop.post(lambda: self._event_loop.fail(failure))
            else:
                self._post_event(result)

        self._worker.submit(perform)

    def _request_exit(self, number: signal.Signals) -> None:
        """Ask the ranks to save and exit: after a step that all agents agree on if the ranks ask, else by a signal."""
        stop = self._join_stop()
        if stop is None:
            self._signal(number)
        else:
            stop.signal_on_failure(lambda: self._event_loop.post(lambda: self._signal(number)))

    def _on_shared_state(self, state: GenerationState) -> None:
        if state.leaving or state.superseded_by > self._generation:
            self._join_stop()
        self._handle(events.SharedStateChanged(state))

    def _join_stop(self) -> AgreedStop | None:
        """Join the agreed stop, once in an attempt; None for ranks that do not ask."""
        if not self._workload.ranks.asks_for_stop or not self._ranks:
            return None
        attempt = self._ranks[0].attempt
        if self._stop is None or self._stop.attempt != attempt:
            records = [
                find_progress_file(self._settings, self._generation, process.local_rank) for process in self._ranks
            ]
            timeout = self.grace_seconds / 2
            self._stop = AgreedStop(
                self._membership,
                self._node_rank,
                attempt,
                records,
                memory_remains=self._memory_remains,
                timeout=timeout,
            )
            self._stop.start()
        return self._stop

    def _signal(self, number: signal.Signals) -> None:
        """Signal the ranks; one that holds the newest step for all ranks writes it before, if the memory remains."""
        for process in self._ranks:
            record = find_progress_file(self._settings, self._generation, process.local_rank)
            can_save = request_path(record).is_socket() and self._local.order is not Order.TERMINATE
            is_stopped = read_process_state(process.pid).letter in ("T", "t")
            if can_save and not is_stopped and process.request_exit():
                arguments = (process, record, number)
                threading.Thread(target=_save_and_signal, args=arguments, name="save", daemon=True).start()
            else:
                process.signal(number)


def _save_and_signal(process: RankProcess, record: Path, number: signal.Signals) -> None:
    if request_save(record, _SAVE_SECONDS):
        _log.info("rank %d has saved the newest step for all ranks", process.rank)
    process.signal(number)
