"""What the loop's thread, the generations' thread and the helpers' threads of an agent do in the same moment."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trainium_contract.exit_codes import exit_code_of_wait_status
from trainium_contract.faults.causes import Cause
from trainium_contract.spec.recovery import HangSpec
from trainium_contract.wire.messages import Member, Membership, StuckRank, TrainerPhase, Transition
from trainium_trainer.agent.background_compile import BackgroundCompiler
from trainium_trainer.agent.hang.detection import Calibration, Standstill
from trainium_trainer.agent.hang.response import HangResponse
from trainium_trainer.agent.linux import stacks
from trainium_trainer.agent.ranks.output import Tail
from trainium_trainer.agent.ranks.processes import RankProcess, Reaper
from trainium_trainer.agent.ranks.standby_keeper import Standby, StandbyKeeper
from trainium_trainer.agent.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def membership(generation: int) -> Membership:
    member = Member(
        pod_uid="uid", pod_name="a", pod_ip="127.0.0.1", node_name="node", node_rank=0, rendezvous_port=1, seals=True
    )
    return Membership(
        generation=generation,
        transition=Transition.IMMEDIATE,
        cause=Cause.RESIZE,
        members=(member,),
        processes_per_node=1,
    )


def supervisor(report: object) -> Supervisor:
    """The parts of one that lead from a membership to a generation; the first one runs."""
    made = Supervisor.__new__(Supervisor)
    made._settings = SimpleNamespace(pod_uid="uid")
    made._report = report
    made._checks = SimpleNamespace(unfit="")
    made._changed = threading.Condition()
    made._newest = membership(1)
    made._running = SimpleNamespace(order=lambda *_: None)
    made._unfit = made._terminating = False
    return made


def test_a_generation_is_begun_after_the_end_of_the_one_before_was_told() -> None:
    told: list[str] = []
    begun = threading.Event()

    def enter(generation: int, _: object) -> None:
        begun.wait(0.2)  # the other thread has all the time to begin it
        told.append(f"over for {generation}")

    one = supervisor(SimpleNamespace(enter_generation=enter))

    def generations() -> None:
        assert one._next_membership(1) == membership(2)
        told.append("begun 2")
        begun.set()

    other = threading.Thread(target=generations)
    other.start()
    one._on_membership(membership(2))
    other.join(10)
    assert told == ["over for 2", "begun 2"]


def test_a_pod_that_ends_while_its_compiler_is_stopped_ends_in_order() -> None:
    class Stopped(BackgroundCompiler):
        looks = 0
        run = SimpleNamespace(cancelled=False)

        @property
        def _run(self) -> Any:
            self.looks += 1
            return self.run if self.looks == 1 else None

        @_run.setter
        def _run(self, _: object) -> None:
            """As it is."""

    cancelled: list[bool] = []
    compiler = Stopped(SimpleNamespace(background_sizes=(1,)), SimpleNamespace(), lambda _: None)
    compiler.run.cancel = lambda: cancelled.append(True)
    compiler.cancel()
    assert cancelled == [True]


def test_a_process_that_ends_at_once_is_missed_by_nobody_while_others_are_started() -> None:
    reaper = Reaper()
    first, ends = [], []

    class Prompt:
        pid = 100
        lost = False

        def start(self, request: object, _: int) -> int:
            pid = 101 if request == "short" else 102
            if pid == 101:
                reaper._unclaimed[pid] = 7  # as `reap` leaves the exit of a child that nobody watches yet
                other.start()
                other.join(0.2)
            return pid

    def start(what: str) -> RankProcess:
        return keeper.start(what, local_rank=0, rank=0, attempt=0, on_exit=lambda ended: ends.append(ended.pid))

    pump = SimpleNamespace(open=lambda prefix: (os.open(os.devnull, os.O_WRONLY), Tail(prefix)))
    keeper = StandbyKeeper(SimpleNamespace(), Prompt(), reaper, pump, lambda _: None)
    other = threading.Thread(target=lambda: first.append(start("long")))
    short = start("short")
    other.join(10)
    assert (short.exit_code, ends) == (7, [101])
    assert first[0].alive


def test_a_rank_that_failed_by_itself_is_not_one_that_was_told_to_end() -> None:
    """Of two that fail in one moment one is seen first, and the other is told to end before its exit is collected."""
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


class Moving(Standstill):
    """A standstill; whenever its rank is asked for, the watch's thread finds that all ranks move again."""

    __slots__ = ()
    watch_thread: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == "rank" and Moving.watch_thread is not None:
            other = threading.Thread(target=Moving.watch_thread)
            other.start()
            other.join(0.05)
        return super().__getattribute__(name)


def test_a_rank_that_moves_again_while_its_stack_is_told_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ranks:
        def __iter__(self) -> Iterator[object]:
            return iter([SimpleNamespace(rank=3, alive=True, pid=1, local_rank=0)])

        def progress_file(self, _: int) -> None:
            return None

    told: list[tuple[StuckRank, ...]] = []
    response = HangResponse(
        SimpleNamespace(hang=HangSpec(), pod_name="a"), membership(1), 0, ranks=Ranks(),
        report=SimpleNamespace(stuck=told.append), calibration=Calibration(), store=lambda: None,
        on_overdue=lambda: None,
    )  # fmt: skip
    still = Moving(3, TrainerPhase.STEP, 7, seconds=9.0, limit=5.0, waiting=False)
    response._watch = SimpleNamespace(look=lambda: (still,))
    monkeypatch.setattr(stacks, "ask", lambda _: {3: stacks.Stacks(why_not="no stack: it is stopped")})
    monkeypatch.setattr(Moving, "watch_thread", response._none_overdue)
    response._testify()
    monkeypatch.undo()
    assert [(each.rank, each.stack) for each in told[-1]] == [(3, "no stack: it is stopped")]
