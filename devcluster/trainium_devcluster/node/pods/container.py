"""Start, watch, stop and restart one container of a pod.

Guarantees:
- At most one process runs at a time.
- `view()` always returns the current state.
- The end of the process is detected without polling.
- A stop sends SIGTERM, then kills at the end of the grace period, which may shrink while it runs.
"""

import asyncio
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
from trainium_devcluster.node.pods.logs import LogWriter, read_last_lines
from trainium_devcluster.node.pods.status import (
    ContainerKind,
    ContainerSnapshot,
    Running,
    State,
    Terminated,
    Waiting,
    exit_reason,
)
from trainium_devcluster.node.processes import container_exec
from trainium_devcluster.node.processes.command import ContainerCommand
from trainium_devcluster.node.processes.launcher_client import ExitStatus, Launcher, LaunchError, Process
from trainium_devcluster.processes.cleanup import remove_tree

_MAX_TERMINATION_MESSAGE = 4096
_START_ERROR = 128
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 10.0, 300.0

Emit = Callable[[EventSeverity, str, str, str], None]  # severity, reason, message, container


@dataclass(slots=True)
class Backoff:
    """The restart delay of a container, as a kubelet computes it: none, 10 s after the end, doubled up to 300 s.

    A run of twice the maximum resets it.
    """

    delay: float = 0.0
    """The current delay in seconds, 0 before the first restart."""
    _updated: float = 0.0

    def compute_remaining(self, finished_at: float, now: float) -> float:
        """Return the seconds until the container may restart, 0 for now; `finished_at` is its last end."""
        if self._is_expired(now):
            return 0.0
        return max(0.0, finished_at + self.delay - now)

    def record_restart(self, now: float) -> None:
        """Record a restart of the container."""
        self.delay = _FIRST_BACKOFF_SECONDS if self._is_expired(now) else min(_MAX_BACKOFF_SECONDS, self.delay * 2)
        self._updated = now

    def _is_expired(self, now: float) -> bool:
        return self.delay == 0.0 or now - self._updated > 2 * _MAX_BACKOFF_SECONDS


@dataclass(slots=True, eq=False)
class Container:
    """Runs one container; calls `changed` whenever `view()` may have changed."""

    spec: Json
    kind: ContainerKind
    folder: Path
    launcher: Launcher
    changed: Callable[[], None]
    emit: Emit
    create_probe_target: Callable[[Json, probe_actions.Execute], probe_actions.ProbeTarget]
    state: State = field(default_factory=lambda: Waiting("ContainerCreating"))
    last_termination: Terminated | None = None
    default_grace: float = 30.0
    restart_count: int = 0
    ready: bool = False
    started: bool = False
    process: Process | None = None
    backoff: Backoff = field(default_factory=Backoff)
    _attempt: int = 0
    _started_once: bool = False
    _reported_backoff: float = 0.0
    _command: ContainerCommand | None = None
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
        """Whether its process runs."""
        return self.process is not None

    @property
    def has_started(self) -> bool:
        """Whether it was ever started."""
        return self._started_once

    def view(self) -> ContainerSnapshot:
        """Return the status of the container."""
        mounted = tuple(
            {
                "name": m["name"],
                "mountPath": m["mountPath"],
                **({"readOnly": True, "recursiveReadOnly": "Disabled"} if m.get("readOnly") else {}),
            }
            for m in self.spec.get("volumeMounts") or []
        )
        return ContainerSnapshot(
            self.name,
            self.spec.get("image", ""),
            self.kind,
            self.state,
            self.last_termination,
            self.restart_count,
            self.ready,
            self.started,
            self._id,
            mounted,
        )

    def restore(self, status: Json, *, rebooted_at: float) -> None:
        """Continue from the status of a previous node process; containers that ran ended with it (255, Unknown)."""
        self.restart_count = int(status.get("restartCount") or 0)
        self._id = status.get("containerID", "")
        self._attempt = self.restart_count + 1 if self._id else 0
        ended = (status.get("state") or {}).get("terminated")
        before = (status.get("lastState") or {}).get("terminated")
        if running := (status.get("state") or {}).get("running"):
            since = parse_time(running["startedAt"])
            self.state = Terminated(255, "Unknown", "", since, rebooted_at, self._id)
            self._started_once = True
        elif ended:
            self.state = _parse_terminated(ended)
            self._started_once = True
            self.ready = self.kind is ContainerKind.INIT and ended["exitCode"] == 0
        elif before:
            self._started_once = True
        if before:
            self.last_termination = _parse_terminated(before)

    def log_path(self, *, previous: bool = False) -> Path | None:
        """Return the log of the current run or of the previous one; None if there is none."""
        attempt = self._attempt - (1 if previous else 0)
        path = self.folder / f"{attempt}.log"
        return path if attempt >= 1 and path.exists() else None

    def set_waiting(self, reason: str, message: str = "") -> None:
        """Set the reason why the container does not run."""
        if isinstance(self.state, Terminated):
            self.last_termination = self.state
        waiting = Waiting(reason, message)
        if self.state != waiting:
            self.state = waiting
            self.changed()

    def is_new_backoff(self, delay: float) -> bool:
        """Return whether it waits this long for the first time, so that only one event reports it."""
        first, self._reported_backoff = self._reported_backoff != delay, delay
        return first

    async def start(self, command: ContainerCommand, termination_log: str) -> None:
        """Start the container; return when the command runs."""
        if isinstance(self.state, Terminated):
            self.last_termination = self.state
        if self._started_once:
            self.restart_count += 1
        self._started_once = True
        self._attempt += 1
        self._id = f"process://{os.urandom(16).hex()}"
        self._remove_old_logs()
        self._command = command
        self.ready = self.started = False
        log = LogWriter(self.folder / f"{self._attempt}.log")
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        out, err = log.open_pipe("stdout"), log.open_pipe("stderr")
        self.emit(EventSeverity.NORMAL, "Created", "Container created", self.name)
        started_at = time.time()
        try:
            process = self.process = self.launcher.start(command, null, out, err)
        finally:
            for fd in (null, out, err):
                os.close(fd)
        self._watcher = asyncio.create_task(self._watch(process, log, started_at, termination_log, command.scratch))
        try:
            await asyncio.shield(process.running)
        except LaunchError as error:
            self.emit(EventSeverity.WARNING, "Failed", f"Error: {_start_error(error)}", self.name)
            await asyncio.shield(self._watcher)
            return
        if self.process is process:
            self.state = Running(time.time())
            self.emit(EventSeverity.NORMAL, "Started", "Container started", self.name)
            self.changed()
            self._prober = asyncio.create_task(probes.run_probes(self.spec, self._check, self._create_callbacks()))

    async def _watch(
        self, process: Process, log: LogWriter, started_at: float, termination_log: str, scratch: str
    ) -> None:
        """Wait for the end of the process and record the state."""
        ended: ExitStatus = await asyncio.shield(process.exited)
        await asyncio.wait([process.running])
        if self._prober is not None:
            self._prober.cancel()
            self._prober = None
        await log.close()
        # The first reported state must be final, because a pod that ended is not read again.
        if error := process.running.exception():
            end = Terminated(_START_ERROR, "StartError", _start_error(error), 0.0, ended.at, self._id)
        else:
            message = self._read_termination_message(ended, Path(termination_log), log)
            end = Terminated(ended.code, exit_reason(ended.code), message, started_at, ended.at, self._id)
        self.process = None
        self.ready = self.kind is ContainerKind.INIT and end.exit_code == 0
        self.started = False
        self.state = end
        remove_tree(Path(scratch))
        self.changed()

    def _read_termination_message(self, ended: ExitStatus, path: Path, log: LogWriter) -> str:
        try:
            text = path.read_bytes()[:_MAX_TERMINATION_MESSAGE].decode(errors="replace")
        except OSError:
            text = ""
        if not text and ended.code != 0 and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            text = read_last_lines(log.path)
        return text

    def _create_callbacks(self) -> probes.ProbeCallbacks:
        return probes.ProbeCallbacks(
            self._on_startup_succeeded, self._on_ready_changed, self._on_unhealthy, self._on_probe_failed
        )

    def _on_startup_succeeded(self) -> None:
        self.started = True
        self.changed()

    def _on_ready_changed(self, ready: bool) -> None:
        if self.kind is not ContainerKind.INIT:
            self.ready = ready
            self.changed()

    def _on_unhealthy(self, kind: probes.ProbeKind, message: str) -> None:
        self.emit(EventSeverity.WARNING, "Unhealthy", f"{kind.value.capitalize()} probe failed: {message}", self.name)

    def _on_probe_failed(self, kind: probes.ProbeKind, probe: Json) -> None:
        message = f"Container {self.name} failed {kind.value} probe, will be restarted"
        self.emit(EventSeverity.NORMAL, "Killing", message, self.name)
        grace = probe.get("terminationGracePeriodSeconds")
        self.stop_in_background(float(grace) if grace is not None else None, "probe")

    async def _check(self, probe: Json, timeout: float) -> probe_actions.ProbeResult:
        return await probe_actions.run_action(probe, self.create_probe_target(self.spec, self.execute), timeout)

    async def execute(self, argv: list[str], timeout: float) -> container_exec.ExecResult:
        """Run a command inside the container."""
        process, base = self.process, self._command
        if process is None or base is None:
            return container_exec.ExecResult(container_exec.NOT_EXECUTABLE, "the container is not running")
        return await container_exec.run(process, argv, base, timeout)

    def build_exec_command(self, argv: list[str]) -> ContainerCommand | None:
        """Return the command that runs `argv` inside the container; None if it does not run."""
        if self.process is None or self._command is None:
            return None
        return container_exec.build_exec_command(self.process, argv, self._command)

    def stop_in_background(self, grace: float | None, reason: str) -> None:
        """Start to stop the container in the background, by default with the pod's grace period."""
        seconds = self.default_grace if grace is None else grace
        self._begin_stop(time.monotonic() + seconds, reason)

    async def stop(self, deadline: float) -> None:
        """Stop the container by `deadline` (monotonic seconds) and wait for its end; joins a stop in progress."""
        if self.process is not None:
            await asyncio.shield(self._begin_stop(deadline, "pod"))

    def shorten_deadline(self, deadline: float) -> None:
        """Set the deadline of a stop in progress to `deadline` if that is earlier."""
        if deadline < self._deadline:
            self._deadline = deadline
            self._deadline_changed.set()

    def _begin_stop(self, deadline: float, reason: str) -> asyncio.Task[None]:
        if self._stopping is not None and not self._stopping.done():
            self.shorten_deadline(deadline)
        else:
            self._deadline = deadline
            self._stopping = asyncio.create_task(self._stop(), name=f"stop {self.name}: {reason}")
        return self._stopping

    async def _stop(self) -> None:
        process = self.process
        if process is None:
            return
        if self._prober is not None:
            self._prober.cancel()
            self._prober = None
        process.signal(signal.SIGTERM)
        await self._wait_until_deadline(process)
        process.signal(signal.SIGKILL)
        await asyncio.shield(process.exited)
        if self._watcher is not None:
            await asyncio.shield(self._watcher)

    async def _wait_until_deadline(self, process: Process) -> None:
        """Wait for the end of the process or the deadline."""
        while (left := self._deadline - time.monotonic()) > 0 and not process.exited.done():
            self._deadline_changed.clear()
            shrunk = asyncio.ensure_future(self._deadline_changed.wait())
            either: set[asyncio.Future[Any]] = {process.exited, shrunk}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            shrunk.cancel()

    def end_unstarted(self) -> None:
        """End the container with its pod; report one that never started as a kubelet does."""
        if not isinstance(self.state, Waiting):
            return
        if self.last_termination is not None:
            self.state = self.last_termination
        else:
            message = "The container could not be located when the pod was terminated"
            self.state = Terminated(137, "ContainerStatusUnknown", message, 0.0, 0.0, "")
        self.ready = False
        self.started = False

    def _remove_old_logs(self) -> None:
        for path in self.folder.glob("*.log"):
            if path.stem.isdigit() and int(path.stem) < self._attempt - 1:
                path.unlink()
                path.with_suffix(".old").unlink(missing_ok=True)


def _start_error(error: BaseException) -> str:
    return f"failed to start container: {error}"


def _parse_terminated(body: Json) -> Terminated:
    return Terminated(
        int(body["exitCode"]),
        body.get("reason", ""),
        body.get("message", ""),
        parse_time(body["startedAt"]),
        parse_time(body["finishedAt"]),
        body.get("containerID", ""),
        int(body.get("signal") or 0),
    )
