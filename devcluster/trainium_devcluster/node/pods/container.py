"""One container of a pod: started, watched, stopped, started again.

Invariants: at most one process at a time; `view()` is always what is true; the process's end is noticed without
polling; a stop runs the preStop hook, then sends the stop signal, then kills, within the grace period, which may
shrink while it runs.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainium_devcluster.node.api.events import EventSeverity
from trainium_devcluster.node.api.objects import Json, parse_time
from trainium_devcluster.node.pods import probe_actions, probes
from trainium_devcluster.node.pods.backoff import Backoff
from trainium_devcluster.node.pods.logs import LogWriter, last_lines
from trainium_devcluster.node.pods.status import (
    ContainerKind,
    ContainerView,
    Running,
    State,
    Terminated,
    Waiting,
    exit_reason,
)
from trainium_devcluster.node.processes import container_exec
from trainium_devcluster.node.processes.launcher_client import Command, Exit, Launcher, LaunchError, Process
from trainium_devcluster.processes.cleanup import remove_tree

_log = logging.getLogger(__name__)

_MAX_TERMINATION_MESSAGE = 4096
_MIN_GRACE = 2.0  # seconds that a container has after its preStop hook used up the grace period
_START_ERROR = 128

Emit = Callable[[EventSeverity, str, str, str], None]  # severity, reason, message, container


@dataclass(slots=True, eq=False)
class Container:
    """One container. `changed` is called whenever `view()` may have changed."""

    spec: Json
    kind: ContainerKind
    folder: Path
    launcher: Launcher
    changed: Callable[[], None]
    emit: Emit
    make_target: Callable[[Json, probe_actions.Execute], probe_actions.CheckTarget]
    state: State = field(default_factory=lambda: Waiting("ContainerCreating"))
    last: Terminated | None = None
    default_grace: float = 30.0
    restart_count: int = 0
    ready: bool = False
    started: bool = False
    process: Process | None = None
    backoff: Backoff = field(default_factory=Backoff)
    _attempt: int = 0
    _began: bool = False
    _announced: float = 0.0
    _base: Command | None = None
    _log: LogWriter | None = None
    _id: str = ""
    _watcher: asyncio.Task[None] | None = None
    _prober: asyncio.Task[None] | None = None
    _stopping: asyncio.Task[None] | None = None
    _deadline: float = 0.0
    _deadline_changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The container's name."""
        return str(self.spec["name"])

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None

    @property
    def has_started(self) -> bool:
        """Whether it was ever started."""
        return self._began

    def view(self) -> ContainerView:
        """Return the status of the container."""
        mounted = tuple(
            {
                "name": m["name"],
                "mountPath": m["mountPath"],
                **({"readOnly": True, "recursiveReadOnly": "Disabled"} if m.get("readOnly") else {}),
            }
            for m in self.spec.get("volumeMounts") or []
        )
        return ContainerView(
            self.name, self.spec.get("image", ""), self.kind, self.state, self.last, self.restart_count, self.ready,
            self.started, self._id, mounted,
        )  # fmt: skip

    def adopt(self, status: Json, *, rebooted_at: float) -> None:
        """Continue from the status that a former node process left; what ran then died with it (255, Unknown)."""
        self.restart_count = int(status.get("restartCount") or 0)
        self._id = status.get("containerID", "")
        self._attempt = self.restart_count + 1 if self._id else 0
        ended = (status.get("state") or {}).get("terminated")
        before = (status.get("lastState") or {}).get("terminated")
        if running := (status.get("state") or {}).get("running"):
            since = parse_time(running["startedAt"])
            self.state = Terminated(255, "Unknown", "", since, rebooted_at, self._id)
            self._began = True
        elif ended:
            self.state = _terminated(ended)
            self._began = True
            self.ready = self.kind is ContainerKind.INIT and ended["exitCode"] == 0
        elif before:
            self._began = True
        if before:
            self.last = _terminated(before)

    def log_path(self, *, previous: bool = False) -> Path | None:
        """Return the log of the current run or of the previous one; None if there is none."""
        attempt = self._attempt - (1 if previous else 0)
        path = self.folder / f"{attempt}.log"
        return path if attempt >= 1 and path.exists() else None

    def wait_for(self, reason: str, message: str = "") -> None:
        """Set the reason why it does not run."""
        if isinstance(self.state, Terminated):
            self.last = self.state
        waiting = Waiting(reason, message)
        if self.state != waiting:
            self.state = waiting
            self.changed()

    def backed_off(self, delay: float) -> bool:
        """Return whether this is the first time that it waits for this long; so that one event reports it."""
        first, self._announced = self._announced != delay, delay
        return first

    async def start(self, command: Command, termination_log: str) -> None:
        """Start it; returns when the command runs and its postStart hook, if any, has ended."""
        if isinstance(self.state, Terminated):
            self.last = self.state
        if self._began:
            self.restart_count += 1
        self._began = True
        self._attempt += 1
        self._id = f"process://{os.urandom(16).hex()}"
        self._drop_old_logs()
        self._base = command
        self.ready = self.started = False
        log = self._log = LogWriter(self.folder / f"{self._attempt}.log")
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        out, err = log.pipe("stdout"), log.pipe("stderr")
        self.emit(EventSeverity.NORMAL, "Created", "Container created", self.name)
        began = time.time()
        try:
            process = self.process = self.launcher.start(command, null, out, err)
        finally:
            for fd in (null, out, err):
                os.close(fd)
        self._watcher = asyncio.create_task(self._watch(process, log, began, termination_log, command.scratch))
        try:
            await asyncio.shield(process.running)
        except LaunchError as error:
            self.emit(EventSeverity.WARNING, "Failed", f"Error: {_not_started(error)}", self.name)
            await asyncio.shield(self._watcher)
            return
        if self.process is process:
            self.state = Running(time.time())
            self.emit(EventSeverity.NORMAL, "Started", "Container started", self.name)
            self.changed()
            await self._after_start(process)

    async def _after_start(self, process: Process) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("postStart")
        if hook:
            outcome = await probe_actions.perform(hook, self._target(), None)
            if not outcome.success:
                self.emit(
                    EventSeverity.WARNING, "FailedPostStartHook", f"PostStartHook failed: {outcome.message}", self.name
                )
                self.stop_soon(_MIN_GRACE, "FailedPostStartHook")
                return
        if self.process is process:
            self._prober = asyncio.create_task(probes.run_probes(self.spec, self._check, self._callbacks()))

    async def _watch(self, process: Process, log: LogWriter, began: float, termination_log: str, scratch: str) -> None:
        """Wait for the end of the process and turn it into a state."""
        ended: Exit = await asyncio.shield(process.exited)
        await asyncio.wait([process.running])
        if self._prober is not None:
            self._prober.cancel()
            self._prober = None
        await log.close()
        # The first state that is seen must be the right one: a pod that ended is not looked at again.
        if error := process.running.exception():
            end = Terminated(_START_ERROR, "StartError", _not_started(error), 0.0, ended.at, self._id)
        else:
            message = self._termination_message(ended, Path(termination_log), log)
            end = Terminated(ended.code, exit_reason(ended.code), message, began, ended.at, self._id)
        self.process = None
        self.ready = self.kind is ContainerKind.INIT and end.exit_code == 0
        self.started = False
        self.state = end
        remove_tree(Path(scratch))
        self.changed()

    def _termination_message(self, ended: Exit, path: Path, log: LogWriter) -> str:
        try:
            text = path.read_bytes()[:_MAX_TERMINATION_MESSAGE].decode(errors="replace")
        except OSError:
            text = ""
        if not text and ended.code != 0 and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            text = last_lines(log.path)
        return text

    def _callbacks(self) -> probes.ProbeCallbacks:
        return probes.ProbeCallbacks(self._has_started, self._set_ready, self._unhealthy, self._failed)

    def _has_started(self) -> None:
        self.started = True
        self.changed()

    def _set_ready(self, ready: bool) -> None:
        if self.kind is not ContainerKind.INIT:
            self.ready = ready
            self.changed()

    def _unhealthy(self, kind: probes.ProbeKind, message: str) -> None:
        self.emit(EventSeverity.WARNING, "Unhealthy", f"{kind.value.capitalize()} probe failed: {message}", self.name)

    def _failed(self, kind: probes.ProbeKind, probe: Json) -> None:
        message = f"Container {self.name} failed {kind.value} probe, will be restarted"
        self.emit(EventSeverity.NORMAL, "Killing", message, self.name)
        grace = probe.get("terminationGracePeriodSeconds")
        self.stop_soon(float(grace) if grace is not None else None, "probe")

    async def _check(self, probe: Json, timeout: float) -> probe_actions.ProbeResult:
        return await probe_actions.perform(probe, self._target(), timeout)

    def _target(self) -> probe_actions.CheckTarget:
        return self.make_target(self.spec, self.execute)

    async def execute(self, argv: list[str], timeout: float | None) -> container_exec.InsideResult:
        """Run a command inside the container."""
        process, base = self.process, self._base
        if process is None or base is None:
            return container_exec.InsideResult(container_exec.NOT_EXECUTABLE, "the container is not running")
        return await container_exec.run(process, argv, base, timeout)

    def exec_command(self, argv: list[str]) -> Command | None:
        """Return the command that runs `argv` inside the container; None if it does not run."""
        if self.process is None or self._base is None:
            return None
        return container_exec.command_inside(self.process, argv, self._base)

    def stop_soon(self, grace: float | None, why: str) -> None:
        """Begin to stop it in the background, with the pod's grace period when none is given."""
        seconds = self.default_grace if grace is None else grace
        self._begin_stop(time.monotonic() + seconds, why)

    async def stop(self, deadline: float) -> None:
        """Stop it by `deadline` (monotonic seconds) and wait until it has ended; joins a stop that is under way."""
        if self.process is not None:
            await asyncio.shield(self._begin_stop(deadline, "pod"))

    def shrink_deadline(self, deadline: float) -> None:
        """End a stop that is under way earlier than planned."""
        if deadline < self._deadline:
            self._deadline = deadline
            self._deadline_changed.set()

    def _begin_stop(self, deadline: float, why: str) -> asyncio.Task[None]:
        if self._stopping is not None and not self._stopping.done():
            self.shrink_deadline(deadline)
        else:
            self._deadline = deadline
            self._stopping = asyncio.create_task(self._stop(), name=f"stop {self.name}: {why}")
        return self._stopping

    async def _stop(self) -> None:
        process = self.process
        if process is None:
            return
        if self._prober is not None:
            self._prober.cancel()
            self._prober = None
        await self._pre_stop(process)
        # A hook that took all the time leaves the container a moment to react to the signal.
        self._deadline = max(
            self._deadline, time.monotonic() + (_MIN_GRACE if self._deadline < time.monotonic() else 0)
        )
        name = (self.spec.get("lifecycle") or {}).get("stopSignal") or "SIGTERM"
        process.signal(getattr(signal, name, signal.SIGTERM))
        await self._until_deadline(process)
        process.signal(signal.SIGKILL)
        await asyncio.shield(process.exited)
        if self._watcher is not None:
            await asyncio.shield(self._watcher)

    async def _pre_stop(self, process: Process) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if not hook or process.exited.done():
            return
        action = asyncio.create_task(probe_actions.perform(hook, self._target(), None))
        ended = asyncio.create_task(self._until_deadline(process))
        await asyncio.wait({action, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not action.done():
            self.emit(
                EventSeverity.WARNING, "FailedPreStopHook", "PreStopHook did not end within the grace period", self.name
            )
        elif not action.result().success:
            self.emit(
                EventSeverity.WARNING, "FailedPreStopHook", f"PreStopHook failed: {action.result().message}", self.name
            )
        for task in (action, ended):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _until_deadline(self, process: Process) -> None:
        """Return when the process has ended or the deadline has come, whichever is first."""
        while (left := self._deadline - time.monotonic()) > 0 and not process.exited.done():
            self._deadline_changed.clear()
            shrunk = asyncio.ensure_future(self._deadline_changed.wait())
            either: set[asyncio.Future[Any]] = {process.exited, shrunk}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            shrunk.cancel()

    def give_up(self) -> None:
        """End the container with its pod: one that never started is reported as a kubelet does."""
        if not isinstance(self.state, Waiting):
            return
        if self.last is not None:
            self.state = self.last
        else:
            message = "The container could not be located when the pod was terminated"
            self.state = Terminated(137, "ContainerStatusUnknown", message, 0.0, 0.0, "")
        self.ready = False
        self.started = False

    def _drop_old_logs(self) -> None:
        for path in self.folder.glob("*.log"):
            if path.stem.isdigit() and int(path.stem) < self._attempt - 1:
                path.unlink()
                path.with_suffix(".old").unlink(missing_ok=True)


def _not_started(error: BaseException) -> str:
    return f"failed to start container: {error}"


def _terminated(body: Json) -> Terminated:
    return Terminated(
        int(body["exitCode"]), body.get("reason", ""), body.get("message", ""), parse_time(body["startedAt"]),
        parse_time(body["finishedAt"]), body.get("containerID", ""), int(body.get("signal") or 0),
    )  # fmt: skip
