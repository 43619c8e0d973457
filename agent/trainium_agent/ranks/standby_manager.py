"""Keep a standby alive in the agent, and start ranks from it.

Guarantees:
- Only the main thread creates a standby, because the kernel ends it with the thread that created it.
- A failed standby is replaced; a start waits until the new one is warm, which is a cold start.
- If the modules of a program cannot be imported ahead (a thread is left, the import fails or takes too long), the log
  gives the reason, and the program's own command is executed at each start.
- No exit is missed, whichever threads start processes.
- A start that is repeated on a new standby runs once: what the lost standby had forked ends before it runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_agent.linux import kernel
from trainium_agent.ranks import standby
from trainium_agent.ranks.output import OutputSource
from trainium_agent.ranks.processes import RankProcess, Reaper, kill_all
from trainium_contract.wire import worker_env
from trainium_contract.worker_process.process_tree import list_descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_agent.ranks.output import OutputPump
    from trainium_agent.ranks.standby import StandbyPlan

_log = logging.getLogger(__name__)
_WARM_UP_SECONDS = 300.0
_START_SECONDS = 30.0
_RESPAWN_SECONDS = 30.0


def _format_output_source(request: standby.StartRequest, rank: int, attempt: int, label: str) -> OutputSource:
    """Return the source of the output; a process with a label is not a rank."""
    if label:
        return OutputSource(label)
    generation = request.environment.get(worker_env.ENV_GENERATION)
    return OutputSource(f"rank {rank}", rank, None if generation is None else int(generation), attempt)


class StandbyLostError(RuntimeError):
    """The standby ended or does not answer."""


class ModuleMissingError(RuntimeError):
    """The standby has not imported a module that an entry point needs."""


def _build_interpreter_command(plan: StandbyPlan) -> list[str]:
    """Return the command that runs the standby's module: in the plan's interpreter, or as this process was started."""
    if plan.python:
        # Only for these imports: the agent's packages must not shadow the image's.
        folder = str(Path(standby.__file__).parents[2])
        program = f"""import sys
if sys.version_info < (3, 10):
    sys.exit("trainium-standby: importing modules ahead needs Python 3.10 or newer")
sys.path = [{folder!r}, *filter(None, sys.path)]
from trainium_agent.ranks import standby
del sys.path[0]
standby.main()"""
        return [plan.python, "-c", program]
    started = Path("/proc/self/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    # Through the loader that was copied into the container, if any: it precedes the interpreter.
    prefix = started[: started.index("-m")] if "-m" in started else [sys.executable]
    return [*prefix, "-m", standby.__name__]


def _parse_pid(answer: dict[str, Any], request: standby.StartRequest) -> int:
    if answer["pid"] is None:
        raise ModuleMissingError(request.entry)
    return int(answer["pid"])


@dataclass(frozen=True, slots=True)
class ForkedRank:
    """A rank that runs nothing before `run`, and ends without it when the agent closes the pipe."""

    pid: int
    permission: int
    """The write end of the pipe from which the rank reads."""

    def run(self) -> None:
        """Let the rank run; it may have been killed already."""
        try:
            os.write(self.permission, b"1")
        except BrokenPipeError:
            pass
        finally:
            os.close(self.permission)


class Standby:
    """One standby process and the channel to it."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._lock = threading.Lock()
        self._warm = threading.Event()
        self._ending = threading.Lock()
        self._ended = False
        self._lost = threading.Event()
        self.spawned_at = time.monotonic()
        """Seconds of the monotonic clock."""
        self.refusal = ""
        """Why ranks must not be forked from it; empty if they may."""

    @classmethod
    def spawn(cls, plan: StandbyPlan) -> Standby:
        """Start a standby that imports everything again; safe in a process with threads. Raises OSError."""
        agent_end, standby_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = 3
        arguments = [*_build_interpreter_command(plan), str(descriptor), str(os.getpid()), plan.encode()]
        # dup2 to the same number would leave close-on-exec set, so the source gets another number first.
        source = os.dup(standby_end.fileno()) if standby_end.fileno() == descriptor else standby_end.fileno()
        try:
            environment = {**os.environ, **plan.environment}
            pid = os.posix_spawnp(
                arguments[0], arguments, environment, file_actions=[(os.POSIX_SPAWN_DUP2, source, descriptor)]
            )
        finally:
            if source != standby_end.fileno():
                os.close(source)
            standby_end.close()
        return cls(pid, agent_end)

    @property
    def became_warm(self) -> bool:
        """Whether its imports were complete at any time."""
        return self._warm.is_set()

    @property
    def warm(self) -> bool:
        """Whether all imports are complete; does not block."""
        if not (self._warm.is_set() or self._lost.is_set()) and self._lock.acquire(blocking=False):
            try:
                if standby.is_readable(self._channel, 0):
                    self._await_ready(0.0)
            except StandbyLostError:
                return False
            finally:
                self._lock.release()
        return self._warm.is_set() and not self._lost.is_set()

    def start(self, request: standby.StartRequest, output: int, descriptors: Sequence[int] = ()) -> ForkedRank:
        """Fork a rank, which inherits the descriptors.

        Raises StandbyLostError if the standby ended or does not answer in time, and ModuleMissingError.
        """
        read_end, permission = os.pipe()
        try:
            with self._lock:
                try:
                    # Also before it is warm: a waiting request ends the low priority of the imports.
                    socket.send_fds(self._channel, [request.encode()], [output, read_end, *descriptors])
                except OSError as error:
                    self._lost.set()
                    raise StandbyLostError(f"the standby process has ended ({error})") from error
                self._await_ready(_WARM_UP_SECONDS)
                return ForkedRank(_parse_pid(self._receive(_START_SECONDS), request), permission)
        except BaseException:
            os.close(permission)  # a rank that was forked nevertheless ends
            raise
        finally:
            os.close(read_end)

    def kill(self) -> None:
        """Kill the standby, unless its exit was collected: then the pid may belong to another process."""
        self._lost.set()
        with self._ending:
            if not self._ended:
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signal.SIGKILL)

    def record_end(self) -> None:
        """Record the exit; the kernel may reuse the pid afterwards."""
        with self._ending:
            self._ended = True
        self._lost.set()

    def _await_ready(self, seconds: float) -> None:
        if self._warm.is_set():
            return
        report = self._receive(seconds)
        threads = report["threads"]
        if threads and report.get("module"):
            self.refusal = f"module {report['module']} left threads {', '.join(threads)}, which a fork would lose"
            self._lost.set()
            raise StandbyLostError(self.refusal)
        self._warm.set()
        if threads:
            _log.warning("the standby was left with threads %s; a rank forked from it may hang", ", ".join(threads))

    def _receive(self, seconds: float) -> dict[str, Any]:
        if self._lost.is_set():
            raise StandbyLostError("the standby process has ended")
        try:
            readable = standby.is_readable(self._channel, seconds)
            packet = self._channel.recv(standby.PACKET_BYTES) if readable else b""
        except OSError:
            readable, packet = True, b""
        if not packet:
            self._lost.set()
            raise StandbyLostError("the standby process ended" if readable else f"no answer in {seconds:.0f} s")
        message: dict[str, Any] = json.loads(packet)
        return message


class StandbyManager:
    """Holds the pod's standby, replaces it when it ends, and starts ranks from it."""

    def __init__(
        self,
        plan: StandbyPlan,
        first: Standby,
        reaper: Reaper,
        pump: OutputPump,
        run_in_main_thread: Callable[[Callable[[], None]], object],
    ) -> None:
        self._plan = plan
        self._reaper = reaper
        self._pump = pump
        self._run_in_main_thread = run_in_main_thread
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        """Held until the reaper watches the new process, because another start drops exit codes of unwatched processes.
        """
        self._closed = threading.Event()
        self._set_standby(first)

    @property
    def warm(self) -> bool:
        """Whether a rank can be started without importing anything that can be imported ahead."""
        current = self._get_current()
        is_warm = current.warm
        too_late = self._plan.python and time.monotonic() > current.spawned_at + _WARM_UP_SECONDS
        if current.refusal or (too_late and not current.became_warm):
            current.kill()
        return is_warm

    def start(
        self,
        request: standby.StartRequest,
        *,
        local_rank: int = 0,
        rank: int = 0,
        attempt: int = -1,
        on_exit: Callable[[RankProcess], None] = lambda _process: None,
        on_line: Callable[[bytes], None] | None = None,
        label: str = "",
        descriptors: Sequence[int] = (),
    ) -> RankProcess:
        """Start a rank, or another process, which has no attempt; `label` then starts each line of its output.

        `on_exit` is called from the reaper's thread, `on_line` from the output's. Raises StandbyLostError if two
        standbys in a row ended during the start, and ModuleMissingError.
        """
        write_end, tail = self._pump.open(_format_output_source(request, rank, attempt, label), on_line)
        with self._starting:
            try:
                self._reaper.clear_unclaimed()
                forked = self._start_on_any(request, write_end, descriptors)
            finally:
                os.close(write_end)
            process = RankProcess(local_rank, rank, attempt, forked.pid, tail)

            def ended(code: int) -> None:
                if code == 0:
                    process.leftover_processes = tuple(map(kernel.read_process_name, self._reaper.list_unwatched()))
                process.record_exit(code)
                on_exit(process)

            self._reaper.watch(forked.pid, ended)
            forked.run()
        return process

    def end_leftovers(self, seconds: float) -> list[str]:
        """Kill every process that ended processes have left behind; return the names of those left after `seconds`.

        A process that this manager still runs, its children and the standby stay.
        """
        return [kernel.read_process_name(pid) for pid in kill_all(self._list_leftovers, seconds)]

    def _list_leftovers(self) -> list[int]:
        with self._starting, self._changed:  # until it is watched, a new process looks like a leftover
            roots = self._reaper.list_unwatched()
        return [pid for root in roots for pid in (root, *list_descendants(root))]

    def close(self) -> None:
        """End the standby for good."""
        self._closed.set()
        self._get_current().kill()

    def _start_on_any(self, request: standby.StartRequest, write_end: int, descriptors: Sequence[int]) -> ForkedRank:
        first = self._get_current()
        try:
            return first.start(request, write_end, descriptors)
        except StandbyLostError as loss:
            _log.warning("%s; a new one starts cold", loss)
            first.kill()
        self._wait_for_replacement(first)
        return self._get_current().start(request, write_end, descriptors)

    def _get_current(self) -> Standby:
        with self._changed:
            return self._standby

    def _wait_for_replacement(self, lost: Standby) -> None:
        deadline = time.monotonic() + _RESPAWN_SECONDS
        with self._changed:
            while self._standby is lost:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise StandbyLostError("no new standby could be started")

    def _replace_standby(self) -> None:
        with self._changed:
            self._set_standby(Standby.spawn(self._plan))

    def _set_standby(self, fresh: Standby) -> None:
        with self._changed:
            self._standby = fresh
            self._changed.notify_all()

        def ended(code: int) -> None:
            fresh.record_end()
            if self._closed.is_set():
                return
            if self._plan.python and not fresh.became_warm:
                reason = fresh.refusal or f"the process that imports them ended with code {code}"
                _log.warning("the program's modules cannot be imported ahead (%s); its ranks start cold", reason)
                self._plan = standby.StandbyPlan()
            else:
                _log.warning("the standby process ended with code %d; starting another", code)
            self._run_in_main_thread(self._replace_standby)

        self._reaper.watch(fresh.pid, ended)
