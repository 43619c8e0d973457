"""The agent's side of the standby: keeps one alive and asks it for ranks.

Invariants: a standby is only ever created from the main thread (the kernel ends it with the thread that made it); a
standby that is lost is replaced, and until the new one is warm a start waits for it, which is a cold start; no exit is
missed, however many threads start processes.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_agent.linux import kernel
from trainium_agent.ranks import standby
from trainium_agent.ranks.output import Speaker
from trainium_agent.ranks.processes import RankProcess, Reaper
from trainium_contract.wire import worker_env

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_agent.ranks.output import OutputPump
    from trainium_agent.ranks.standby import StandbyPlan

_log = logging.getLogger(__name__)
_WARM_UP_SECONDS = 300.0
_START_SECONDS = 30.0
_RESPAWN_SECONDS = 30.0


def _speaker(request: standby.StartRequest, rank: int, attempt: int, label: str) -> Speaker:
    """Return the source of the output; a process with a label is no rank."""
    if label:
        return Speaker(label)
    generation = request.environment.get(worker_env.ENV_GENERATION)
    return Speaker(f"rank {rank}", rank, None if generation is None else int(generation), attempt)


class StandbyLostError(RuntimeError):
    """The standby ended or does not answer."""


def _interpreter(plan: StandbyPlan) -> list[str]:
    """Return the command that runs the standby's module: in the plan's interpreter, or as this process was started."""
    if plan.python:
        # Only for these imports: the agent's packages must not take the place of the image's.
        folder = str(Path(standby.__file__).parents[2])
        program = f"import sys; sys.path.insert(0, {folder!r}); from trainium_agent.ranks import standby; "
        return [plan.python, "-c", f"{program}del sys.path[0]; standby.main()"]
    started = Path("/proc/self/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    # Through the loader that was copied into the container, where there is one: it comes before the interpreter.
    prefix = started[: started.index("-m")] if "-m" in started else [sys.executable]
    return [*prefix, "-m", standby.__name__]


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

    @classmethod
    def spawn(cls, plan: StandbyPlan) -> Standby:
        """Start one that imports everything again; safe in a process with threads. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = 3
        arguments = [*_interpreter(plan), str(descriptor), str(os.getpid()), plan.encode()]
        # dup2 to the same number would leave close-on-exec set, so the source is moved out of the way.
        source = os.dup(theirs.fileno()) if theirs.fileno() == descriptor else theirs.fileno()
        try:
            pid = os.posix_spawnp(
                arguments[0], arguments, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, source, descriptor)]
            )
        finally:
            if source != theirs.fileno():
                os.close(source)
            theirs.close()
        return cls(pid, ours)

    @property
    def warm(self) -> bool:
        """Whether it has imported everything; never blocks."""
        if not (self._warm.is_set() or self._lost.is_set()) and self._lock.acquire(blocking=False):
            try:
                if standby.is_readable(self._channel, 0):
                    self._await_ready(0.0)
            except StandbyLostError:
                return False
            finally:
                self._lock.release()
        return self._warm.is_set() and not self._lost.is_set()

    def start(self, request: standby.StartRequest, output: int) -> int:
        """Fork a rank; its pid.

        Raises StandbyLostError when the standby ended or does not answer in time.
        """
        with self._lock:
            try:
                # Before it is warm, too: a waiting request ends the low priority of its imports.
                socket.send_fds(self._channel, [request.encode()], [output])
            except OSError as error:
                self._lose()
                raise StandbyLostError(f"the standby process is gone ({error})") from error
            self._await_ready(_WARM_UP_SECONDS)
            return int(self._receive(_START_SECONDS)["pid"])

    def kill(self) -> None:
        """End it, unless its exit was seen: then the pid may be a stranger's."""
        self._lose()
        with self._ending:
            if not self._ended:
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> None:
        """Record its exit; the pid is released to the kernel after this."""
        with self._ending:
            self._ended = True
        self._lose()

    def _lose(self) -> None:
        self._lost.set()

    def _await_ready(self, seconds: float) -> None:
        if self._warm.is_set():
            return
        threads = self._receive(seconds)["threads"]
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
            self._lose()
            raise StandbyLostError("the standby process ended" if readable else f"no answer in {seconds:.0f} s")
        message: dict[str, Any] = json.loads(packet)
        return message


class StandbyKeeper:
    """Holds the pod's standby, replaces it when it is lost, and starts ranks from it."""

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
        """Held until the reaper watches what was started: another start forgets whom nobody watches."""
        self._closed = threading.Event()
        self._adopt(first)

    @property
    def warm(self) -> bool:
        """Whether a rank can be started without importing anything."""
        return self._present().warm

    @property
    def pid(self) -> int:
        """Pid of the present standby."""
        return self._present().pid

    def start(
        self,
        request: standby.StartRequest,
        *,
        local_rank: int,
        rank: int,
        attempt: int,
        on_exit: Callable[[RankProcess], None],
        on_line: Callable[[bytes], None] | None = None,
        label: str = "",
    ) -> RankProcess:
        """Start a rank; `on_exit` is called from the reaper's thread, `on_line` from the output's.

        `label` begins each line of its output.

        Raises StandbyLostError when two standbys in a row were lost while starting it.
        """
        write_end, tail = self._pump.open(_speaker(request, rank, attempt, label), on_line)
        with self._starting:
            try:
                self._reaper.forget_unclaimed()
                pid = self._start_on_any(request, write_end)
            finally:
                os.close(write_end)
            process = RankProcess(local_rank, rank, attempt, pid, tail)

            def ended(code: int) -> None:
                if code == 0:
                    process.left = tuple(map(kernel.name_of, self._reaper.unwatched()))
                process.ended(code)
                on_exit(process)

            self._reaper.watch(pid, ended)
        return process

    def close(self) -> None:
        """End the standby for good."""
        self._closed.set()
        self._present().kill()

    def _start_on_any(self, request: standby.StartRequest, write_end: int) -> int:
        first = self._present()
        try:
            return first.start(request, write_end)
        except StandbyLostError as loss:
            _log.warning("%s; a new one starts cold", loss)
            first.kill()
        self._await_other_than(first)
        return self._present().start(request, write_end)

    def _present(self) -> Standby:
        with self._changed:
            return self._standby

    def _await_other_than(self, lost: Standby) -> None:
        deadline = time.monotonic() + _RESPAWN_SECONDS
        with self._changed:
            while self._standby is lost:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise StandbyLostError("no new standby could be started")

    def _adopt(self, fresh: Standby) -> None:
        with self._changed:
            self._standby = fresh
            self._changed.notify_all()

        def ended(code: int) -> None:
            fresh.ended()
            if not self._closed.is_set():
                _log.warning("the standby process ended with code %d; starting another", code)
                self._run_in_main_thread(lambda: self._adopt(Standby.spawn(self._plan)))

        self._reaper.watch(fresh.pid, ended)
