"""The event loop and the threads beside it in the same moment."""

from __future__ import annotations

import os
import queue
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

from trainium_agent.background_compile import BackgroundCompiler
from trainium_agent.ranks.output import Tail
from trainium_agent.ranks.processes import RankProcess, Reaper
from trainium_agent.ranks.standby import StartRequest
from trainium_agent.ranks.standby_keeper import Standby, StandbyKeeper
from trainium_contract.exit_codes import exit_code_of_wait_status

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def test_a_compiler_that_is_stopped_while_its_process_starts_leaves_none() -> None:
    """The order comes from the event loop at a moment when its thread has started a process and nobody knows of it."""
    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    ended: list[str] = []
    under_way = threading.Event()
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exec sleep 60"], os.environ, setpgroup=0)

    class Keeper:
        warm = True

        def start(self, _: object, *, on_exit: Callable[[RankProcess], None], **__: object) -> RankProcess:
            process = RankProcess(0, 0, -1, pid, Tail(""))
            under_way.wait()
            compiler.stop()

            def wait() -> None:
                process.ended(exit_code_of_wait_status(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                on_exit(process)

            threading.Thread(target=wait).start()
            return process

    compiler = BackgroundCompiler(
        SimpleNamespace(background_sizes=(1, 2), processes_per_node=1), Keeper(), post=posted.put,
        on_compiled=lambda size: ended.append(f"{size.nodes} nodes"), on_end=lambda: ended.append("over"),
    )  # fmt: skip
    compiler.start(1)
    under_way.set()
    posted.get(timeout=30)()
    assert ended == ["over"], "nothing was compiled, and it ended once"
    assert posted.empty()


def test_a_process_that_ends_at_once_is_missed_by_nobody_while_others_are_started() -> None:
    reaper = Reaper()
    first, ends = [], []

    class Prompt:
        pid = 100
        lost = False

        def start(self, request: StartRequest, _: int) -> int:
            pid = 101 if request.title == "short" else 102
            if pid == 101:
                reaper._unclaimed[pid] = 7  # as `reap` leaves the exit of a child that nobody watches yet
                other.start()
                other.join(0.2)
            return pid

    def start(what: str) -> RankProcess:
        request = StartRequest((), {}, what)
        return keeper.start(request, local_rank=0, rank=0, attempt=0, on_exit=lambda ended: ends.append(ended.pid))

    pump = SimpleNamespace(open=lambda speaker, _: (os.open(os.devnull, os.O_WRONLY), Tail(speaker.prefix)))
    keeper = StandbyKeeper(SimpleNamespace(), Prompt(), reaper, pump, lambda _: None)
    other = threading.Thread(target=lambda: first.append(start("long")))
    short = start("short")
    other.join(10)
    assert (short.exit_code, ends) == (7, [101])
    assert first[0].alive


def test_a_rank_that_failed_by_itself_is_not_one_that_was_asked_to_end() -> None:
    """Two fail in one moment: one is seen first, and the other is asked to end before its exit is collected."""
    processes = []
    for script in ("exit 70", "sleep 60"):
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", script], os.environ, setpgroup=0)
        processes.append(RankProcess(0, 0, 0, pid, Tail("")))
    failed, alive = processes
    os.waitid(os.P_PID, failed.pid, os.WEXITED | os.WNOWAIT)
    for process in processes:
        process.signal(signal.SIGKILL)
        process.ended(exit_code_of_wait_status(os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])))
    assert (failed.asked, failed.exit_code) == (False, 70)
    assert (alive.asked, alive.exit_code) == (True, 128 + signal.SIGKILL)


def test_a_standby_that_was_seen_to_end_is_not_signalled_by_the_thread_that_misses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: signalled.append(pid))
    reaper = Reaper()
    standbys = [Standby(pid, SimpleNamespace()) for pid in (101, 102)]
    for standby in standbys:
        StandbyKeeper(SimpleNamespace(), standby, reaper, SimpleNamespace(), lambda _: None)
    reaper._watched[101](9)  # as `reap` calls it, before the kernel may give the pid to another process
    for standby in standbys:
        standby.kill()
    assert signalled == [102]
