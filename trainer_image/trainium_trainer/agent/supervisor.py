"""The life of a worker pod: one generation after another until the job is finished or the pod ends.

Invariants: at most one generation has ranks at any time; a newer membership always wins; when `run` returns, no process
that the agent started is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
import traceback
from importlib.metadata import version
from typing import TYPE_CHECKING

from trainium_contract.exit_codes import ExitCode
from trainium_contract.spec.health import PreflightCheck
from trainium_contract.wire.messages import HeartbeatRequest, Membership, Transition, WorkerPhase
from trainium_trainer.agent.background_compile import BackgroundCompiler
from trainium_trainer.agent.checks.node_checks import NodeChecks
from trainium_trainer.agent.checks.preflight import clock_result
from trainium_trainer.agent.coordinator.client import CoordinatorClient
from trainium_trainer.agent.coordinator.report import ReadProgress, Report
from trainium_trainer.agent.elastic import GenerationAgent
from trainium_trainer.agent.exits.kernel_log import KernelLog
from trainium_trainer.agent.generation.shutdown import Order, Outcome
from trainium_trainer.agent.hang.detection import Calibration
from trainium_trainer.agent.ranks.output import OutputPump
from trainium_trainer.agent.ranks.processes import Reaper, kill_descendants
from trainium_trainer.agent.ranks.standby_keeper import Standby, StandbyKeeper

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, not in __all__

    from trainium_contract.wire.messages import CheckResult
    from trainium_trainer.agent.checks.preflight import Finding
    from trainium_trainer.agent.settings import AgentSettings

_log = logging.getLogger(__name__)
_RECOVERING_SECONDS = 0.02
_TRAINING_SECONDS = 0.5
_ACKNOWLEDGE_SECONDS = 10.0
_FORSAKEN_SECONDS = 300.0
_LAST_KILL_SECONDS = 5.0
_SLACK_SECONDS = 5.0
_LAST_WORD_SECONDS = 2.0
"""For telling the coordinator what was saved last; out of the margin between grace and kill."""
_INTERNAL_ERROR = 70


class Supervisor:
    """Everything that runs in the agent's process, wired together."""

    def __init__(self, settings: AgentSettings, standby: Standby, store: TCPStore, read_progress: ReadProgress) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._store = store  # serves for as long as the pod lives
        self._reaper = Reaper()
        self._report = Report(settings, read_progress, self._wake)
        self._keeper = StandbyKeeper(settings, standby, self._reaper, OutputPump(), self._loop.call_soon_threadsafe)
        self._background = BackgroundCompiler(settings, self._keeper, self._report.compiled)
        self._checks = NodeChecks(settings, self._keeper, report=self._report.checked)
        self._report.standby_warm = self._is_warm
        self._kernel_log = KernelLog(settings.kernel_log, self._report.signs.kernel)
        self._client = CoordinatorClient(
            settings,
            store.port,
            version("trainium-trainer"),
            heartbeat=self._report.heartbeat,
            on_membership=self._on_membership,
            on_acknowledged=self._on_acknowledged,
            on_welcome=self._on_welcome,
        )
        self._changed = threading.Condition()
        self._newest: Membership | None = None
        self._calibration = Calibration()
        self._running: GenerationAgent | None = None
        self._terminating = False
        self._unfit = False
        self._clock_passed: bool | None = None
        self._finish_known = 0
        """Newest generation of which the coordinator knows that this pod has finished."""
        self._exit: asyncio.Future[int] = self._loop.create_future()

    async def run(self, findings: Iterable[Finding], checked: Iterable[CheckResult] = ()) -> int:
        """Live, after these quick checks; the exit code of the pod."""
        for result in checked:
            self._report.checked(result)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reaper.reap)
        self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
        self._loop.add_signal_handler(signal.SIGINT, self._terminate)
        self._reaper.reap()
        tasks = [asyncio.create_task(self._client.run()), asyncio.create_task(self._observe())]
        for task in tasks:
            task.add_done_callback(self._on_task_end)
        self._kernel_log.start()
        unfit = next((finding for finding in findings if finding.code is not None), None)
        if unfit is None:
            self._report.enter(WorkerPhase.STANDBY)
            threading.Thread(target=self._check, name="preflight", daemon=True).start()
            threading.Thread(target=self._live, name="generations", daemon=True).start()
        else:
            self._unfit = True
            self._report.give_up_with(unfit.code or ExitCode.USER_ERROR, unfit.sentence)
        try:
            code = await self._exit
            if self._terminating:
                await self._client.say_last(_LAST_WORD_SECONDS)
            return code
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._checks.cancel()
            self._background.cancel()
            self._kernel_log.stop()
            self._keeper.close()
            self._loop.remove_signal_handler(signal.SIGCHLD)
            left = kill_descendants(_LAST_KILL_SECONDS)
            if left:
                _log.error("processes %s did not end", left)

    # In the loop's thread.

    def _on_membership(self, membership: Membership) -> None:
        _log.info(
            "generation %d: %d members, %s, node rank %s",
            membership.generation,
            len(membership.members),
            membership.transition,
            membership.rank_of(self._settings.pod_uid),
        )
        immediate = membership.transition is Transition.IMMEDIATE
        with self._changed:
            self._newest = membership
            running = self._running
            if running is not None:
                # With the lock: once the other thread has begun this generation, what it says of it must stand.
                self._report.enter_generation(membership.generation, WorkerPhase.JOINING)
            self._changed.notify_all()
        if self._unfit or self._checks.unfit:
            self._report.know(membership.generation)
        if running is not None:
            running.order(Order.IMMEDIATE if immediate else Order.GRACEFUL, membership.generation)

    def _on_acknowledged(self, message: HeartbeatRequest) -> None:
        if message.phase is WorkerPhase.FINISHED:
            with self._changed:
                self._finish_known = max(self._finish_known, message.generation)
                self._changed.notify_all()

    def _on_welcome(self, theirs: float, asked: float, answered: float) -> None:
        result = clock_result(theirs, asked, answered) if PreflightCheck.CLOCK in self._settings.checks else None
        if result is None or (result.passed and self._clock_passed):
            return
        if not result.passed and self._clock_passed is not False:
            _log.warning("%s", result.detail)
        self._clock_passed = result.passed
        self._report.checked(result)

    def _terminate(self) -> None:
        _log.info("asked to end; the ranks may save for %.0f s", self._settings.grace_seconds)
        with self._changed:
            self._terminating = True
            running = self._running
            self._changed.notify_all()
        if running is not None:
            running.order(Order.TERMINATE)
            self._loop.call_later(self._settings.grace_seconds + _SLACK_SECONDS, self._leave, ExitCode.YIELDING)
        else:
            self._leave(self._report.verdict_code or ExitCode.FINISHED)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error("the agent failed", exc_info=task.exception())
            self._leave(_INTERNAL_ERROR)

    async def _observe(self) -> None:
        """Follow the ranks' progress closely while a restart has not resumed, and end when nobody cares any more."""
        while True:
            self._report.observe()
            close = self._report.recovering or self._report.phase is WorkerPhase.LOADING
            await asyncio.sleep(_RECOVERING_SECONDS if close else _TRAINING_SECONDS)
            forsaken = time.monotonic() - self._client.answered_at > _FORSAKEN_SECONDS
            if forsaken and self._report.phase is WorkerPhase.FAILED:
                _log.error("no coordinator has taken the verdict for %.0f s; leaving with it", _FORSAKEN_SECONDS)
                self._leave(self._report.verdict_code or ExitCode.YIELDING)

    # From any thread.

    def _is_warm(self) -> bool:
        return self._checks.done.is_set() and not self._checks.unfit and self._keeper.warm

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._client.heartbeat_now)

    def _leave(self, code: int) -> None:
        def resolve() -> None:
            if not self._exit.done():
                self._exit.set_result(int(code))

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(resolve)

    # In the thread of the node's checks.

    def _check(self) -> None:
        self._checks.run()
        if self._checks.unfit:
            self._report.give_up_with(ExitCode.DEVICE_FAULT, self._checks.unfit)
        else:
            self._wake()

    # In the thread of the generations.

    def _live(self) -> None:
        try:
            self._leave(self._generations())
        except BaseException:  # noqa: BLE001 - the pod must end rather than sit idle
            _log.error("the agent failed:\n%s", traceback.format_exc())
            self._leave(_INTERNAL_ERROR)

    def _generations(self) -> int:
        """Take part in one generation after another; the exit code of the pod."""
        done = 0
        yielded = False
        while True:
            membership = self._next_membership(done)
            if membership is None:
                return ExitCode.YIELDING if yielded else ExitCode.FINISHED
            done = membership.generation
            self._checks.done.wait(self._settings.check_seconds)  # they hold the devices
            if self._checks.unfit:
                continue
            node_rank = membership.rank_of(self._settings.pod_uid)
            if node_rank is None:
                self._report.follow(())
                self._report.enter_generation(membership.generation, WorkerPhase.STANDBY)
                self._background.start(len(membership.members))
                continue
            self._background.stop()
            agent = self._begin(membership, node_rank)
            if agent is None:
                continue
            try:
                agent.run()
            finally:
                with self._changed:
                    self._running = None
            yielded = agent.yielded
            if agent.outcome is Outcome.FINISHED and self._nothing_follows(membership.generation):
                return ExitCode.FINISHED

    def _next_membership(self, done: int) -> Membership | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._terminating or (self._newest is not None and self._newest.generation > done)
            )
            return None if self._terminating else self._newest

    def _begin(self, membership: Membership, node_rank: int) -> GenerationAgent | None:
        """Prepare a generation; None when a newer one has been published meanwhile."""
        self._report.enter_generation(membership.generation, WorkerPhase.JOINING)
        self._report.follow(_fresh_progress_files(self._settings.progress_directory, membership))
        agent = GenerationAgent(self._settings, membership, node_rank, self._keeper, self._report, self._calibration)
        with self._changed:
            if self._terminating or (self._newest is not None and self._newest.generation > membership.generation):
                return None
            self._running = agent
        return agent

    def _nothing_follows(self, generation: int) -> bool:
        """Wait until the coordinator knows that this pod is finished; False when a newer generation came instead."""

        def newer() -> bool:
            return self._newest is not None and self._newest.generation > generation

        with self._changed:
            self._changed.wait_for(
                lambda: self._finish_known >= generation or self._terminating or newer(), _ACKNOWLEDGE_SECONDS
            )
            return not newer()


def _fresh_progress_files(directory: Path, membership: Membership) -> tuple[Path, ...]:
    """Paths of this generation's progress records; those of older generations are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    files = tuple(directory / f"g{membership.generation}-r{rank}" for rank in range(membership.processes_per_node))
    for left_over in set(directory.glob("g*-r*")) - set(files):
        with contextlib.suppress(OSError):
            left_over.unlink()
    return files
