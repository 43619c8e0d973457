"""Notifications on a real store: a waiting agent asks next to nothing, sees changes at once, depends on no caller."""

from __future__ import annotations

import gc
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from shared_store import membership_at

from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.generation import state_watcher
from trainium_agent.generation import store as generation_store
from trainium_agent.generation.server import StoreClient, StoreServer
from trainium_agent.generation.state_watcher import LONGEST_TURN_SECONDS, StatePublisher, StateWatcher
from trainium_agent.generation.store import GenerationStore, StoreLostError
from trainium_agent.rendezvous import (
    GenerationRendezvous,
    GenerationStoppedError,
    RendezvousInterruptedError,
)
from trainium_agent.workload.program import ReservedPort
from trainium_contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_contract.wire.messages import Membership

SOON = 0.5
"""Sooner than the next turn that only the clock calls; on a busy machine too."""


class Counting(GenerationStore):
    """Counts what it asks."""

    asked = 0

    def _ask(self, *request: str | float) -> Any:
        self.asked += 1
        return super()._ask(*request)


class Follower:
    """One agent's watcher and its reports."""

    def __init__(self, membership: Membership) -> None:
        self.received: queue.Queue[GenerationState] = queue.Queue()
        self.lost = threading.Event()
        self.watcher = StateWatcher(membership, self.received.put, self.lost.set)
        self.store = self.watcher._store = Counting(membership)
        self.watcher.start()


class Party:
    """The store of a generation, and agents around it."""

    def __init__(self) -> None:
        self.server = StoreServer("127.0.0.1")
        self.membership = membership_at(self.server.port, nodes=3)
        self.store = GenerationStore(self.membership)
        self.store.connect()
        self.followers: list[Follower] = []
        self.callers: list[StatePublisher] = []
        self.handlers: list[GenerationRendezvous] = []
        self.threads: list[threading.Thread] = []
        self.over = threading.Event()

    def caller(self) -> StatePublisher:
        self.store.begin(GenerationState())
        before = self.store.count(self.store.key("turns"))
        caller = StatePublisher(self.membership)
        caller.start()
        self.callers.append(caller)
        self.until(lambda: self.store.count(self.store.key("turns")) > before)
        return caller

    def follower(self) -> Follower:
        self.followers.append(Follower(self.membership))
        return self.followers[-1]

    def rendezvous(self, node_rank: int, reported: threading.Event | None = None) -> GenerationRendezvous:
        handler = GenerationRendezvous(
            self.membership,
            node_rank,
            initial=GenerationState(),
            interrupted=lambda: self.over.is_set() or (reported is not None and reported.is_set()),
            waiting_for=lambda _missing: None,
            watcher=self.follower().watcher,
            reserve_port=ReservedPort,
            pair_rounds={},
        )
        handler.store = Counting(self.membership)
        self.handlers.append(handler)
        return handler

    def joins(self, handler: GenerationRendezvous) -> tuple[threading.Thread, list[object]]:
        """Its rendezvous in a thread, and what that gave."""
        results: list[object] = []

        def join() -> None:
            try:
                results.append(handler.next_rendezvous())
            except (RendezvousInterruptedError, GenerationStoppedError) as interruption:
                results.append(interruption)

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        self.threads.append(thread)
        return thread, results

    def end(self) -> None:
        """No thread may be in the library when the interpreter ends."""
        self.over.set()
        for follower in self.followers:
            follower.watcher.stop()
            follower.watcher.nudge()
        self.threads += [follower.watcher._thread for follower in self.followers]
        self.callers += [handler._caller for handler in self.handlers if handler._caller is not None]
        for caller in self.callers:
            caller.stop()
            self.threads.append(caller._thread)
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), thread.name
        for handler in self.handlers:
            handler.shutdown()
        self.store.close()
        self.server.close()

    def raise_attempt(self) -> None:
        """Raise the attempt as an agent does that dies before it can notify any other."""
        self.store.change(lambda state: GenerationState(attempt=state.attempt + 1))

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> float:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + seconds, "never seen"
            time.sleep(0.005)
        return time.monotonic() - began


@pytest.fixture
def party() -> Iterator[Party]:
    party = Party()
    yield party
    party.end()


def test_a_change_that_its_author_published_to_nobody_is_seen_by_all_before_the_clock_calls(party: Party) -> None:
    party.caller()
    followers = [party.follower() for _ in range(8)]
    for follower in followers:
        assert follower.received.get(timeout=20).attempt == 0
    time.sleep(0.2)
    began = time.monotonic()
    party.raise_attempt()
    for follower in followers:
        assert follower.received.get(timeout=20).attempt == 1
    assert time.monotonic() - began < SOON


def test_who_follows_asks_once_a_turn(party: Party, capfd: pytest.CaptureFixture[str]) -> None:
    party.caller()
    follower = party.follower()
    follower.received.get(timeout=20)
    before = follower.store.asked
    time.sleep(3 * LONGEST_TURN_SECONDS)
    assert 2 <= follower.store.asked - before <= 4
    assert not follower.lost.is_set()
    assert "waitForInput" not in capfd.readouterr().err  # the library's client writes it where a wait runs out


def test_old_turns_are_forgotten(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_watcher, "_KEPT", 3)
    caller, store = party.caller(), party.store
    for _ in range(8):
        number = store.count(store.key("turns"))
        caller.notify()
        party.until(lambda number=number: store.count(store.key("turns")) > number)
    newest = store.count(store.key("turns"))
    party.until(lambda: not store.has(store.key("turn", newest - 3)))
    assert store.has(*(store.key("turn", newest - age) for age in range(3)))


def test_a_generation_whose_first_agent_calls_no_turns_is_followed_all_the_same(party: Party) -> None:
    party.store.begin(GenerationState())
    follower = party.follower()
    assert follower.received.get(timeout=20).attempt == 0
    party.raise_attempt()
    assert follower.received.get(timeout=SOON).attempt == 1


def test_a_caller_that_leaves_is_done_without_until_another_comes(party: Party) -> None:
    caller = party.caller()
    follower = party.follower()
    follower.received.get(timeout=20)
    caller.stop()
    time.sleep(0.3)
    before = follower.store.asked
    party.raise_attempt()
    assert follower.received.get(timeout=SOON).attempt == 1
    time.sleep(0.3)
    assert follower.store.asked > before + 6, "it asks at intervals"
    assert not follower.lost.is_set()
    party.caller()
    time.sleep(0.3)
    before = follower.store.asked
    time.sleep(LONGEST_TURN_SECONDS)
    assert follower.store.asked - before <= 3
    party.raise_attempt()
    assert follower.received.get(timeout=SOON).attempt == 2


def test_a_caller_that_falls_silent_is_noticed_and_done_without(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_store, "_WAIT_SECONDS", 1.0)
    party.store.begin(GenerationState())
    party.store.count(party.store.key("turns"), 7)  # as a caller whose thread died
    follower = party.follower()
    assert follower.received.get(timeout=20).attempt == 0
    assert follower.lost.wait(5)
    party.raise_attempt()
    assert follower.received.get(timeout=5).attempt == 1
    before = follower.store.asked
    time.sleep(1.5)
    assert follower.store.asked > before + 10, "it waits for no turn again"


def test_a_turn_that_a_stranger_writes_is_not_believed(party: Party) -> None:
    party.store.begin(GenerationState())
    party.store.count(party.store.key("turns"), 1)
    follower = party.follower()
    assert follower.received.get(timeout=20).stopped is None
    stranger = StoreClient(socket.create_connection(("127.0.0.1", party.server.port)))
    forged = GenerationState(stopped=int(ExitCode.USER_ERROR)).encode()
    stranger.ask(("set", party.store.key("turn", 2), forged), lambda: 5.0)
    assert follower.lost.wait(5)
    party.caller()
    party.raise_attempt()
    assert follower.received.get(timeout=20) == GenerationState(attempt=1)


def test_all_begin_together_however_late_the_last_one_is_and_waiting_is_cheap(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        state_watcher, "LONGEST_TURN_SECONDS", 4.0
    )  # so that the clock calls none when the last one joins
    handlers = [party.rendezvous(rank) for rank in range(3)]
    first, second = party.joins(handlers[0]), party.joins(handlers[1])
    time.sleep(3.2)
    assert second[0].is_alive()
    store = handlers[1].store
    assert isinstance(store, Counting)
    assert store.asked < 30, store.asked  # polled each 10 ms it would be hundreds
    began = time.monotonic()
    last = party.joins(handlers[2])
    for thread, results in (first, second, last):
        thread.join(20)
        assert len(results) == 1
        assert not isinstance(results[0], Exception)
    assert time.monotonic() - began < SOON


def test_who_waits_for_an_attempt_that_is_over_joins_the_next_at_once(party: Party) -> None:
    handlers = [party.rendezvous(rank) for rank in range(2)]  # a third never comes
    for handler in handlers:
        party.joins(handler)
    joined = [party.store.key(0, "joined", rank) for rank in range(2)]
    party.until(lambda: party.store.has(*joined))
    time.sleep(0.3)
    party.raise_attempt()
    again = [party.store.key(1, "joined", rank) for rank in range(2)]
    assert party.until(lambda: party.store.has(*again)) < SOON


def test_a_waiting_agent_learns_at_once_that_the_generation_stopped(party: Party) -> None:
    waiting = [party.joins(party.rendezvous(rank)) for rank in range(2)]
    party.until(lambda: party.store.has(*(party.store.key(0, "joined", rank) for rank in range(2))))
    time.sleep(0.3)
    began = time.monotonic()
    party.store.change(lambda _: GenerationState(stopped=int(ExitCode.USER_ERROR)))
    for thread, results in waiting:
        thread.join(20)
        assert isinstance(results[0], GenerationStoppedError)
    assert time.monotonic() - began < SOON


def test_a_waiting_agent_leaves_at_once_when_asked_to(party: Party) -> None:
    party.caller()
    reported = threading.Event()
    handler = party.rendezvous(1, reported)
    thread, results = party.joins(handler)
    party.until(lambda: party.store.has(party.store.key(0, "joined", 1)))
    time.sleep(0.3)
    began = time.monotonic()
    reported.set()
    handler._watcher.nudge()
    thread.join(20)
    assert time.monotonic() - began < 0.2
    assert isinstance(results[0], RendezvousInterruptedError)


def test_a_rendezvous_goes_on_when_its_watcher_receives_nothing(party: Party) -> None:
    party.caller()
    handler = party.rendezvous(1)
    handler._watcher = StateWatcher(party.membership, lambda _: None, lambda: None)  # never started
    thread, results = party.joins(handler)
    party.until(lambda: party.store.has(party.store.key(0, "joined", 1)))
    party.store.set(party.store.key(0, "port"), "29500")
    party.store.set(party.store.key(0, "go"))
    thread.join(5)
    assert len(results) == 1


@pytest.mark.parametrize("timeout", [5.0, 0.2], ids=["the server gives up", "we give up first"])
def test_a_call_that_fails_leaves_no_connection_and_no_thread_behind(
    monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """Without the collector: a quiet agent makes so little that it runs once in hours."""
    monkeypatch.setattr(generation_store, "_WAIT_SECONDS", 1.0)
    monkeypatch.setattr(generation_store, "_HURRIED_SECONDS", timeout)
    server = StoreServer("127.0.0.1")
    process, threads = psutil.Process(), threading.active_count()

    def connections() -> int:
        held = process.net_connections("tcp")
        return sum(bool(each.raddr) and server.port in (each.laddr.port, each.raddr.port) for each in held)

    gc.collect()
    before = connections()
    gc.disable()
    try:
        for _ in range(3):
            store = GenerationStore(membership_at(server.port, nodes=3), hurried=lambda: True)
            store.connect()
            with pytest.raises(StoreLostError):
                store.get(store.key("nothing"))
            del store
        deadline = time.monotonic() + 30
        while connections() > before or threading.active_count() > threads:
            assert time.monotonic() < deadline, (connections(), before, threading.enumerate())
            time.sleep(0.05)
    finally:
        gc.enable()
        server.close()
