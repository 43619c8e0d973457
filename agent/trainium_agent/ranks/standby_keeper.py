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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_agent.ranks import standby
from trainium_agent.ranks.output import Speaker
from trainium_agent.ranks.processes import RankProcess, Reaper
from trainium_agent.ranks.standby import StartRequest
from trainium_contract.wire import worker_env

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from trainium_agent.ranks.output import OutputPump
    from trainium_agent.settings import AgentSettings

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
    def fork(cls, settings: AgentSettings) -> Standby:
        """Fork one from this process, which must have a single thread; returns in the agent only."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            sys.exit(standby.serve(theirs, agent_pid, settings.rank_entry, str(settings.config_path)))
        theirs.close()
        return cls(pid, ours)

    @classmethod
    def spawn(cls, settings: AgentSettings) -> Standby:
        """Start one that imports everything again; safe in a process with threads."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = 3
        arguments = [
            sys.executable,
            "-m",
            "trainium_agent.ranks.standby",
            str(descriptor),
            str(os.getpid()),
            settings.rank_entry,
            str(settings.config_path),
        ]
        # dup2 to the same number would leave close-on-exec set, so the source is moved out of the way.
        source = os.dup(theirs.fileno()) if theirs.fileno() == descriptor else theirs.fileno()
        pid = os.posix_spawn(
            sys.executable, arguments, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, source, descriptor)]
        )
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
        settings: AgentSettings,
        first: Standby,
        reaper: Reaper,
        pump: OutputPump,
        run_in_main_thread: Callable[[Callable[[], None]], object],
    ) -> None:
        self._settings = settings
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
        label: str = "",
    ) -> RankProcess:
        """Start a rank; `on_exit` is called from the reaper's thread. `label` begins each line of its output.

        Raises StandbyLostError when two standbys in a row were lost while starting it.
        """
        write_end, tail = self._pump.open(_speaker(request, rank, attempt, label))
        with self._starting:
            try:
                self._reaper.forget_unclaimed()
                pid = self._start_on_any(request, write_end)
            finally:
                os.close(write_end)
            process = RankProcess(local_rank, rank, attempt, pid, tail)

            def ended(code: int) -> None:
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
                self._run_in_main_thread(lambda: self._adopt(Standby.spawn(self._settings)))

        self._reaper.watch(fresh.pid, ended)


_ROLE = "trainer"


def progress_file(settings: AgentSettings, generation: int, local_rank: int) -> Path:
    """Where a local rank writes its progress."""
    return settings.progress_directory / f"g{generation}-r{local_rank}"


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """The layout of an attempt: it follows from the membership, and the port of its store from node 0."""

    generation: int
    attempt: int
    node_rank: int
    nodes: int
    on_a_node: int
    master_ip: str
    master_port: int
    """Of the store that the agent of node rank 0 serves for the ranks."""

    def rank(self, local_rank: int) -> int:
        """Ranks are counted node by node."""
        return self.node_rank * self.on_a_node + local_rank

    @property
    def world(self) -> int:
        """All ranks."""
        return self.nodes * self.on_a_node


def start_ranks(
    settings: AgentSettings,
    keeper: StandbyKeeper,
    layout: AttemptLayout,
    run_id: str,
    on_exit: Callable[[RankProcess], None],
) -> tuple[RankProcess, ...]:
    """Start one attempt's ranks. Raises StandbyLostError; `on_exit` is called from any thread."""
    started = []
    for local_rank in range(layout.on_a_node):
        rank = layout.rank(local_rank)
        request = StartRequest(
            ("train", "--config", str(settings.config_path)),
            _environment(settings, layout, local_rank, run_id),
            f"trainium-rank {rank} of {layout.world}",
        )
        started.append(keeper.start(request, local_rank=local_rank, rank=rank, attempt=layout.attempt, on_exit=on_exit))
    return tuple(started)


def _environment(settings: AgentSettings, layout: AttemptLayout, local_rank: int, run_id: str) -> Mapping[str, str]:
    """Return the environment that torch's `env://` rendezvous and programs written for its launcher read."""
    rank, world = str(layout.rank(local_rank)), str(layout.world)
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(layout.on_a_node),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(layout.nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": _ROLE,
        "MASTER_ADDR": layout.master_ip,
        "MASTER_PORT": str(layout.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(layout.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_in_place_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        worker_env.ENV_GENERATION: str(layout.generation),
        worker_env.ENV_ATTEMPT: str(layout.attempt),
        worker_env.ENV_PROGRESS_FILE: os.fspath(progress_file(settings, layout.generation, local_rank)),
    }
