"""Run a worker pod from the agent's event loop: one generation after another until the job is finished.

Only the event loop holds the state of the pod, and `lifecycle/pod.py` decides; threads only post events to it.

Guarantees:
- Threads do the blocking work, and do not access the supervisor's state.
- When `run` returns, every process that the agent started has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from trainium_agent.background_compile import BackgroundCompiler
from trainium_agent.checks.node_checks import NodeChecks
from trainium_agent.checks.preflight import compare_clocks
from trainium_agent.coordinator.client import Callbacks, CoordinatorClient
from trainium_agent.coordinator.report import PodReport
from trainium_agent.exits.kernel_log import KernelLog
from trainium_agent.generation_runner import GenerationRunner
from trainium_agent.hang.detection import Calibration
from trainium_agent.lifecycle import pod
from trainium_agent.lifecycle.events import Order
from trainium_agent.pod_services import PodServices
from trainium_agent.ranks.output import OutputPump
from trainium_agent.ranks.processes import Reaper, kill_descendants
from trainium_agent.ranks.shared_imports import SharedImports
from trainium_agent.ranks.standby_manager import Standby, StandbyManager
from trainium_agent.threads import BlockingWorker, EventLoop
from trainium_agent.workload.attempt import find_progress_file
from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.last_report import encode_last_report
from trainium_contract.wire.messages import HeartbeatRequest, Membership, Transition, WorkerPhase
from trainium_contract.worker_process import log_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from trainium_agent.checks.preflight import PreflightFinding
    from trainium_agent.lifecycle.state import LocalGeneration
    from trainium_agent.settings import AgentSettings
    from trainium_agent.shared_state.server import StoreServer
    from trainium_agent.workload.workload import Workload
    from trainium_contract.wire.messages import CheckResult, ImportedModules

_log = logging.getLogger(__name__)
_RECOVERING_SECONDS = 0.02
_TRAINING_SECONDS = 0.5
_UNACKNOWLEDGED_SECONDS = 300.0
_LAST_KILL_SECONDS = 5.0
_SLACK_SECONDS = 5.0
_LAST_LIST_SECONDS = 0.5
"""Longest wait for the list of the last checkpoints; less than the shortest grace period, that of an eviction (1 s)."""
_FLUSH_SECONDS = 2.0
"""Time for the last heartbeat, which reports the last save; part of the margin between grace period and kill."""
_INTERNAL_ERROR = 70
_ASKED_TO_END = "the pod was asked to end (SIGTERM) before its ranks had finished; its events say by whom"
_UNANSWERED = "the ranks of another worker failed, and no operator answered"


class AgentSupervisor:
    """Creates and connects everything that runs in the agent's process."""

    def __init__(self, settings: AgentSettings, workload: Workload, standby: Standby, store: StoreServer) -> None:
        self._settings = settings
        self._workload = workload
        self._event_loop = event_loop = EventLoop(self._fail)
        self._store = store  # serves for the life of the pod
        self._reaper = Reaper()
        self._report = PodReport(settings, workload, lambda: event_loop.post(self._client.send_heartbeat_now))
        self._standby_manager = StandbyManager(
            workload.ranks.plan,
            standby,
            self._reaper,
            OutputPump(settings),
            asyncio.get_running_loop().call_soon_threadsafe,
        )
        self._services = PodServices(
            settings, workload, self._standby_manager, self._report, Calibration(), event_loop, BlockingWorker()
        )
        self._compiler = BackgroundCompiler(
            settings,
            self._standby_manager,
            post=event_loop.post,
            on_compiled=self._report.record_compiled_size,
            on_end=lambda: self._handle(pod.SimpleEvent.COMPILER_ENDED),
        )
        self._checks = NodeChecks(settings, self._standby_manager, report=self._services.record_check)
        self._report.standby_warm = self._is_warm
        self._kernel_log = KernelLog(settings.kernel_log, self._report.diagnoser.kernel)
        self._imports = SharedImports(workload.ranks.plan.record)
        self._client = CoordinatorClient(
            settings,
            store.port,
            version("trainium-agent"),
            Callbacks(
                heartbeat=self._report.build_heartbeat,
                on_membership=self._handle_membership,
                on_endpoints=workload.roles.update,
                imported=self._find_imported,
                on_imported=self._imports.add,
                on_acknowledged=self._handle_acknowledgement,
                on_job_deleted=lambda: self._handle(pod.SimpleEvent.JOB_DELETED),
                on_job_failed=self._handle_failed_job,
                on_coordinator_time=self._handle_coordinator_time,
            ),
        )
        self._pod = pod.Pod(settings.check_seconds)
        self._membership: Membership | None = None
        self._runner: GenerationRunner | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._clock_passed: bool | None = None
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, findings: Iterable[PreflightFinding], checked: Iterable[CheckResult] = ()) -> int:
        """Run until the pod ends, given the findings of the quick checks; return its exit code."""
        for result in checked:
            self._report.record_check(result)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reaper.reap)
        loop.add_signal_handler(signal.SIGTERM, self._event_loop.run, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self._event_loop.run, self._terminate)
        self._reaper.reap()
        tasks = [asyncio.create_task(self._client.run()), asyncio.create_task(self._observe())]
        for task in tasks:
            task.add_done_callback(self._handle_task_end)
        self._kernel_log.start()
        failure = next((finding for finding in findings if finding.code is not None), None)
        if failure is None:
            self._report.set_phase(WorkerPhase.STANDBY)
            threading.Thread(target=self._check, name="preflight", daemon=True).start()
        else:
            self._give_up(failure.code or ExitCode.USER_ERROR, failure.sentence)
        try:
            code = await self._exit
            if code != ExitCode.FINISHED:  # what finished has listed its checkpoints already
                await asyncio.to_thread(self._workload.list_checkpoints, _LAST_LIST_SECONDS)
                self._report.observe()
            self._write_last_report(code)
            if self._pod.terminating:
                await self._client.flush(_FLUSH_SECONDS)
            return code
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._checks.cancel()
            self._compiler.stop()
            self._kernel_log.stop()
            self._standby_manager.close()
            loop.remove_signal_handler(signal.SIGCHLD)
            survivors = kill_descendants(_LAST_KILL_SECONDS)
            if survivors:
                _log.error("processes %s did not end", survivors)

    def _write_last_report(self, code: int) -> None:
        """Write the last heartbeat as the pod's termination message; without figures the kubelet adds the log's end."""
        text = ""
        if code == ExitCode.YIELDING:
            text = _ASKED_TO_END if self._pod.terminating else _UNANSWERED
        if self._report.generation and code in (ExitCode.FINISHED, ExitCode.YIELDING, self._report.verdict_code):
            text = encode_last_report(self._report.build_heartbeat(), text)
        if text:
            log_lines.write_termination_message(text)

    # From any thread.

    def log_context(self) -> Mapping[str, object]:
        """Return generation and attempt for log lines; empty before the first."""
        report = self._report
        return {"generation": report.generation, "attempt": report.attempt} if report.generation else {}

    # Called in the thread of the node's checks.

    def _check(self) -> None:
        sentence = self._checks.run()
        self._event_loop.post(lambda: self._handle_check_result(sentence))

    # Events, handled in the event loop.

    def _handle_membership(self, membership: Membership) -> None:
        node_rank = membership.find_node_rank(self._settings.pod_uid)
        _log.info(
            "generation %d: %d members, %s, node rank %s",
            membership.generation,
            len(membership.members),
            membership.transition,
            node_rank,
            extra={"generation": membership.generation},
        )
        self._membership = membership
        immediate = membership.transition is Transition.IMMEDIATE
        self._handle(pod.MembershipReceived(membership.generation, immediate=immediate, member=node_rank is not None))

    def _find_imported(self) -> ImportedModules | None:
        """Return the modules for the job's other pods, on the first member."""
        is_first = self._membership is not None and self._membership.find_node_rank(self._settings.pod_uid) == 0
        return self._imports.read() if is_first else None

    def _handle_acknowledgement(self, message: HeartbeatRequest) -> None:
        if message.phase is WorkerPhase.FINISHED:
            self._handle(pod.FinishAcknowledged(message.generation))

    def _handle_failed_job(self, message: HeartbeatRequest) -> None:
        if message.phase is WorkerPhase.FAILED and message.verdict:
            self._handle(pod.VerdictAcknowledged(message.generation))

    def _handle_coordinator_time(self, coordinator_time: float, sent_at: float, received_at: float) -> None:
        if PreflightCheck.CLOCK not in self._settings.checks:
            return
        result = compare_clocks(coordinator_time, sent_at, received_at)
        if result.passed and self._clock_passed:
            return
        if not result.passed and self._clock_passed is not False:
            _log.warning("%s", result.detail)
        self._clock_passed = result.passed
        self._report.record_check(result)

    def _handle_check_result(self, problem: str) -> None:
        if problem:
            self._give_up(ExitCode.DEVICE_FAULT, problem)
            return
        self._handle(pod.SimpleEvent.NODE_CHECKED)
        self._client.send_heartbeat_now()

    def _handle_end(self, local: LocalGeneration) -> None:
        self._runner = None
        self._handle(pod.GenerationEnded(local.outcome))

    def _give_up(self, code: int, sentence: str) -> None:
        self._handle(pod.SimpleEvent.NODE_UNFIT)
        self._report.set_pod_verdict(code, sentence)

    def _terminate(self) -> None:
        _log.info("asked to end; the ranks may save for %g s", self._grace_seconds)
        self._handle(pod.SimpleEvent.TERMINATE)

    @property
    def _grace_seconds(self) -> float:
        return self._runner.grace_seconds if self._runner is not None else self._settings.grace_seconds

    def _handle_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error("the agent failed", exc_info=task.exception())
            self._exit_with(_INTERNAL_ERROR)

    def _fail(self, failure: str) -> None:
        """End the pod, which must not stay idle."""
        _log.error("the agent failed:\n%s", failure)
        self._exit_with(_INTERNAL_ERROR)

    async def _observe(self) -> None:
        """Read the ranks' progress often until a restart has resumed; end if nobody acknowledges the verdict."""
        while True:
            self._workload.observe()
            self._report.observe()
            self._report.diagnoser.memory_kills.observe()
            is_recovering = self._report.recovering or self._report.phase is WorkerPhase.LOADING
            await asyncio.sleep(_RECOVERING_SECONDS if is_recovering else _TRAINING_SECONDS)
            is_unacknowledged = time.monotonic() - self._client.answered_at > _UNACKNOWLEDGED_SECONDS
            if is_unacknowledged and self._report.phase is WorkerPhase.FAILED:
                _log.error(
                    "no coordinator acknowledged the verdict for %.0f s; exiting with its code", _UNACKNOWLEDGED_SECONDS
                )
                self._exit_with(self._report.verdict_code or ExitCode.YIELDING)

    # Actions, performed in the event loop.

    def _handle(self, event: pod.Event) -> None:
        assert threading.current_thread() is threading.main_thread(), "only the main thread handles events"
        if self._exit.done():
            return
        self._pod, actions = pod.step(self._pod, event, time.monotonic())
        for action in actions:
            self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._pod.wake_at
        self._timer = None
        if deadline is not None:
            self._timer = self._event_loop.call_at(deadline, lambda: self._handle(pod.SimpleEvent.TICK))

    def _perform(self, action: pod.Action) -> None:
        match action:
            case pod.StartGeneration():
                self._start_generation()
            case pod.BecomeSpare(generation):
                self._report.progress_files = ()
                self._report.start_generation(generation, WorkerPhase.STANDBY)
                self._compiler.start(len(self._newest.members))
            case pod.StopCompiler():
                self._compiler.stop()
            case pod.LeaveGeneration(order, superseded_by):
                self._leave_generation(order, superseded_by)
            case pod.ReportGeneration(generation):
                self._report.set_generation(generation)
            case pod.ExitPod(code):
                self._exit_with((self._report.verdict_code or ExitCode.YIELDING) if code is None else code)

    @property
    def _newest(self) -> Membership:
        assert self._membership is not None, "a generation is known before it is begun"
        return self._membership

    def _start_generation(self) -> None:
        membership = self._newest
        node_rank = membership.find_node_rank(self._settings.pod_uid)
        assert node_rank is not None, "only a member takes part"
        self._report.start_generation(membership.generation, WorkerPhase.JOINING)
        self._report.record_generation_start(membership.cause)
        self._report.progress_files = _prepare_progress_files(self._settings, membership)
        self._runner = GenerationRunner(self._services, membership, node_rank, self._handle_end)
        self._runner.start()

    def _leave_generation(self, order: Order, superseded_by: int) -> None:
        if not superseded_by:
            grace = self._grace_seconds if order is Order.TERMINATE else 0.0
            deadline = time.monotonic() + grace + _SLACK_SECONDS
            self._event_loop.call_at(deadline, lambda: self._exit_with(ExitCode.YIELDING))
        else:
            # Later progress of the old ranks is not reported for the new generation.
            self._report.start_generation(superseded_by, WorkerPhase.JOINING)
        if self._runner is not None:
            is_member = self._newest.find_node_rank(self._settings.pod_uid) is not None
            self._runner.leave(order, superseded_by, memory_remains=bool(superseded_by) and is_member)

    def _exit_with(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(int(code))

    def _is_warm(self) -> bool:
        return self._pod.checked and not self._pod.unfit and self._standby_manager.warm


def _prepare_progress_files(settings: AgentSettings, membership: Membership) -> tuple[Path, ...]:
    """Return the paths of this generation's progress records; remove those of older generations."""
    directory = settings.progress_directory
    directory.mkdir(parents=True, exist_ok=True)
    files = tuple(
        find_progress_file(settings, membership.generation, rank) for rank in range(membership.processes_per_node)
    )
    for path in set(directory.glob("g*-r*")) - set(files):
        with contextlib.suppress(OSError):
            path.unlink()
    return files
