"""Processes of ranks and of the background compiler: start, exit, signals, and concurrent threads."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from trainium_agent import background_compile
from trainium_agent.background_compile import BackgroundCompiler
from trainium_agent.ranks.output import OutputTail
from trainium_agent.ranks.processes import RankProcess, Reaper
from trainium_agent.ranks.standby import StandbyPlan, StartRequest
from trainium_agent.ranks.standby_manager import ForkedRank, Standby, StandbyLostError, StandbyManager
from trainium_contract.exit_codes import exit_code_from_returncode


def test_a_compiler_stopped_during_the_start_leaves_no_process() -> None:
    """The event loop orders the end while the thread has started a process but not yet recorded it."""
    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    ended: list[str] = []
    under_way = threading.Event()
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exec sleep 60"], os.environ, setpgroup=0)

    class SlowManager:
        warm = True

        def start(self, _: object, **__: object) -> RankProcess:
            process = RankProcess(0, 0, -1, pid, OutputTail(""))
            under_way.wait()
            compiler.stop()

            def wait() -> None:
                process.record_exit(exit_code_from_returncode(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

            threading.Thread(target=wait).start()
            return process

    compiler = BackgroundCompiler(
        SimpleNamespace(background_sizes=(1, 2), processes_per_node=1),
        SlowManager(),
        post=posted.put,
        on_compiled=lambda size: ended.append(f"{size.nodes} nodes"),
        on_end=lambda: ended.append("over"),
    )
    compiler.start(1)
    under_way.set()
    posted.get(timeout=30)()
    assert ended == ["over"], "nothing was compiled, and the end was reported once"
    assert posted.empty()


def test_the_exit_of_a_process_that_ends_during_its_start_is_reported() -> None:
    reaper = Reaper()
    long_ranks, ended_pids = [], []

    class ShortRankStandby:
        pid = 100
        lost = False

        def start(self, request: StartRequest, _: int, descriptors: tuple[int, ...]) -> ForkedRank:
            assert not descriptors
            pid = 101 if request.title == "short" else 102
            if pid == 101:
                reaper._unclaimed[pid] = 7  # as `reap` leaves the exit of a child that is not watched yet
                thread.start()
                thread.join(0.2)
            return ForkedRank(pid, os.open(os.devnull, os.O_WRONLY))

    def start(title: str) -> RankProcess:
        request = StartRequest((), {}, title)
        return manager.start(
            request, local_rank=0, rank=0, attempt=0, on_exit=lambda process: ended_pids.append(process.pid)
        )

    pump = SimpleNamespace(open=lambda source, _: (os.open(os.devnull, os.O_WRONLY), OutputTail(source.prefix)))
    manager = StandbyManager(SimpleNamespace(), ShortRankStandby(), reaper, pump, lambda _: None)
    thread = threading.Thread(target=lambda: long_ranks.append(start("long")))
    short = start("short")
    thread.join(10)
    assert (short.exit_code, ended_pids) == (7, [101])
    assert long_ranks[0].alive


def test_a_rank_that_failed_before_its_signal_was_not_asked_to_end() -> None:
    """Two ranks fail at once: the second is signalled before its exit is collected."""
    processes = []
    for script in ("exit 70", "sleep 60"):
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", script], os.environ, setpgroup=0)
        processes.append(RankProcess(0, 0, 0, pid, OutputTail("")))
    failed, alive = processes
    os.waitid(os.P_PID, failed.pid, os.WEXITED | os.WNOWAIT)
    for process in processes:
        process.signal(signal.SIGKILL)
        process.record_exit(exit_code_from_returncode(os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])))
    assert (failed.exit_requested, failed.exit_code) == (False, 70)
    assert (alive.exit_requested, alive.exit_code) == (True, 128 + signal.SIGKILL)


def test_a_collected_standby_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: signalled.append(pid))
    reaper = Reaper()
    standbys = [Standby(pid, SimpleNamespace()) for pid in (101, 102)]
    for standby in standbys:
        StandbyManager(StandbyPlan(), standby, reaper, SimpleNamespace(), lambda _: None)
    reaper._watched[101](9)  # as `reap` calls it, before the kernel may give the pid to another process
    for standby in standbys:
        standby.kill()
    assert signalled == [102]


REAPING = """
import os, time
from trainium_agent.ranks import processes
from trainium_agent.ranks.processes import Reaper

def child(code):
    pid = os.fork()
    if pid == 0:
        os._exit(code)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid

reaper, seen = Reaper(), []
early, late = child(3), child(4)
reaper.watch(late, seen.append)
reaper.reap()
assert seen == [4], seen
reaper.watch(early, seen.append)
assert seen == [4, 3], "it had ended before the watch"
stranger = child(5)
reaper.reap()
reaper.clear_unclaimed()
reaper.watch(stranger, seen.append)
assert seen == [4, 3], "the kernel may have reused its pid"

processes._UNCLAIMED = 2
first, second, third = child(6), child(7), child(8)
reaper.reap()
kept = []
for pid in (first, second, third):
    reaper.watch(pid, kept.append)
assert kept == [8], "only some unknown processes are remembered"
reaper.reap()

group = os.fork()
if group == 0:
    os.setpgid(0, 0)
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)
reaper.watch(group, seen.append)
reaper.reap()
assert seen == [4, 3, 0]
read_end, write_end = os.pipe()
daemon = os.fork()
if daemon == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.2)
        os.write(write_end, b"alive")
    os._exit(0)
os.close(write_end)
os.waitid(os.P_PID, daemon, os.WEXITED | os.WNOWAIT)
reaper.reap()
assert os.read(read_end, 5) == b"alive", "only a process that was watched ends with its group"
running = os.fork()
if running == 0:
    time.sleep(600)
reaper.reap()
assert processes.kill_descendants(20.0) == []
print("done")
"""


def test_the_reaper_reports_each_exit_once_and_kills_process_groups() -> None:
    done = subprocess.run([sys.executable, "-c", REAPING], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class FakeCompilerManager:
    """A manager whose processes end at once, each with the next code, or raise it if it is an error."""

    def __init__(self, *codes: int | Exception, warm: bool = True) -> None:
        self.warm = warm
        self._codes = iter(codes)
        self.sizes: list[int] = []
        self.go = threading.Event()
        self.go.set()

    def start(self, request: Any, **_: Any) -> Any:
        self.go.wait(30)
        self.sizes.append(int(request.argv[1]))
        code = next(self._codes)
        if isinstance(code, Exception):
            raise code
        process = RankProcess(0, 0, -1, 0, OutputTail(""))
        process.record_exit(code)
        return process


class IdleSpare:
    """A compiler of an idle spare, with its event loop."""

    def __init__(self, manager: FakeCompilerManager, sizes: tuple[int, ...] = (2, 4, 8)) -> None:
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.reported: list[int] = []
        self.ends = 0
        self.compiler = BackgroundCompiler(
            SimpleNamespace(background_sizes=sizes, processes_per_node=1),
            manager,
            post=self.posted.put,
            on_compiled=lambda size: self.reported.append(size.nodes),
            on_end=self._end,
        )

    def _end(self) -> None:
        self.ends += 1

    def run_until_end(self) -> None:
        ends = self.ends
        while self.ends == ends:
            self.posted.get(timeout=30)()


def test_every_size_is_compiled_once_and_reported() -> None:
    manager = FakeCompilerManager(0, 0, 0)
    spare = IdleSpare(manager)
    spare.compiler.start(4)
    spare.run_until_end()
    assert sorted(manager.sizes) == [2, 4, 8]
    assert sorted(spare.reported) == [2, 4, 8]
    spare.compiler.start(4)
    spare.run_until_end()
    assert len(manager.sizes) == 3, "nothing is left"


def test_a_failed_size_is_not_reported_or_retried() -> None:
    manager = FakeCompilerManager(0, 70, 0)
    spare = IdleSpare(manager)
    spare.compiler.start(4)
    spare.run_until_end()
    assert len(manager.sizes) == 3
    assert spare.reported == [size for size in manager.sizes if size != manager.sizes[1]]


def test_a_lost_standby_ends_the_compilation_and_the_next_start_resumes_it(caplog: pytest.LogCaptureFixture) -> None:
    manager = FakeCompilerManager(StandbyLostError("the standby process ended"), 0, 0, 0)
    spare = IdleSpare(manager)
    spare.compiler.start(4)
    spare.run_until_end()
    assert spare.reported == []
    assert "could not be compiled: the standby process ended" in caplog.text
    spare.compiler.start(4)
    spare.run_until_end()
    assert sorted(spare.reported) == [2, 4, 8]


def test_a_compilation_stopped_before_the_standby_is_warm_compiles_nothing() -> None:
    manager = FakeCompilerManager(warm=False)
    spare = IdleSpare(manager)
    spare.compiler.stop()  # nothing is under way yet
    spare.compiler.start(4)
    spare.compiler.stop()
    spare.run_until_end()
    assert (manager.sizes, spare.reported) == ([], [])


def test_a_compilation_waits_for_a_warm_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "_POLL_SECONDS", 0.001)

    class Warming(FakeCompilerManager):
        observations = 0

        @property
        def warm(self) -> bool:
            self.observations += 1
            return self.observations > 3

        @warm.setter
        def warm(self, _: bool) -> None: ...

    manager = Warming(0)
    spare = IdleSpare(manager, (4,))
    spare.compiler.start(4)
    spare.run_until_end()
    assert spare.reported == [4]


def test_the_next_size_is_the_one_nearest_to_the_current_size() -> None:
    manager = FakeCompilerManager(0, 0, 0)
    manager.go.clear()
    spare = IdleSpare(manager)
    spare.compiler.start(8)
    spare.compiler.start(4)  # a node failed: the others train on fewer
    manager.go.set()
    spare.run_until_end()
    assert sorted(manager.sizes) == [2, 4, 8]
    assert spare.ends == 1, "one compilation ran"
