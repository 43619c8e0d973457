"""Change notifications of the shared state on a real store: latency, number of requests, loss of the publisher."""

import gc
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.unit.agent.fake_generation_store import build_membership
from trainium_agent.exits.restart_policy import GenerationState
from trainium_agent.rendezvous import (
    GenerationRendezvous,
    GenerationStoppedError,
)
from trainium_agent.shared_state import state_watcher
from trainium_agent.shared_state import store as generation_store
from trainium_agent.shared_state.server import StoreClient, StoreServer
from trainium_agent.shared_state.state_watcher import (
    StatePublisher,
    StateWatcher,
    WaitInterruptedError,
)
from trainium_agent.shared_state.store import GenerationStore, StoreLostError
from trainium_agent.workload.rank_port import reserve_port
from trainium_contract.exit_codes import ExitCode
from trainium_contract.wire.messages import Membership


class CountingStore(GenerationStore):
    """A store that counts its requests."""

    requests = 0

    def _request(self, *request: str | float) -> Any:
        self.requests += 1
        return super()._request(*request)


class RecordingWatcher:
    """A watcher of one agent, and the states that it reported."""

    def __init__(self, membership: Membership) -> None:
        self.received: queue.Queue[GenerationState] = queue.Queue()
        self.lost = threading.Event()
        self.watcher = StateWatcher(membership, self.received.put, self.lost.set)
        self.store = self.watcher._store = CountingStore(membership)
        self.watcher.start()


class GenerationAgents:
    """The store of a generation and its agents, in threads."""

    def __init__(self) -> None:
        self.server = StoreServer("127.0.0.1")
        self.membership = build_membership(self.server.port, nodes=3)
        self.store = GenerationStore(self.membership)
        self.store.connect()
        self.followers: list[RecordingWatcher] = []
        self.publishers: list[StatePublisher] = []
        self.handlers: list[GenerationRendezvous] = []
        self.threads: list[threading.Thread] = []

    def publish(self) -> StatePublisher:
        self.store.create_state(GenerationState())
        before = self.count_publications()
        publisher = StatePublisher(self.membership)
        publisher.start()
        self.publishers.append(publisher)
        self.until(lambda: self.count_publications() > before)
        return publisher

    def follower(self) -> RecordingWatcher:
        self.followers.append(RecordingWatcher(self.membership))
        return self.followers[-1]

    def rendezvous(self, node_rank: int) -> GenerationRendezvous:
        handler = GenerationRendezvous(
            self.membership,
            node_rank,
            initial=GenerationState(),
            waiting_for=lambda _missing: None,
            watcher=self.follower().watcher,
            reserve_port=reserve_port,
            pair_rounds={},
        )
        handler.store = CountingStore(self.membership)
        self.handlers.append(handler)
        return handler

    def join(self, handler: GenerationRendezvous) -> tuple[threading.Thread, list[object]]:
        """Start the rendezvous in a thread; return both and the list of its results."""
        results: list[object] = []

        def join() -> None:
            try:
                results.append(handler.join_next())
            except (WaitInterruptedError, GenerationStoppedError) as interruption:
                results.append(interruption)

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        self.threads.append(thread)
        return thread, results

    def end(self) -> None:
        """Stop all threads: none may be in the library when the interpreter exits."""
        for follower in self.followers:
            follower.watcher.stop()
            follower.watcher.interrupt()
        self.threads += [follower.watcher._thread for follower in self.followers]
        self.publishers += [handler._publisher for handler in self.handlers if handler._publisher is not None]
        for publisher in self.publishers:
            publisher.stop()
            self.threads.append(publisher._thread)
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive(), thread.name
        for handler in self.handlers:
            handler.shutdown()
        self.store.close()
        self.server.close()

    def raise_attempt(self) -> None:
        """Raise the attempt as an agent that ends before it has notified any other."""
        self.store.update_state(lambda state: GenerationState(attempt=state.attempt + 1))

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        give_up_at = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < give_up_at, "never seen"
            time.sleep(0.005)

    def count_publications(self) -> int:
        return self.store.count(self.store.format_key("publications"))


@pytest.fixture
def agents() -> Iterator[GenerationAgents]:
    agents = GenerationAgents()
    yield agents
    agents.end()


@pytest.fixture
def without_periodic_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agents learn of a change within a test only if it is published, or they poll."""
    monkeypatch.setattr(state_watcher, "MAX_PUBLISH_INTERVAL_SECONDS", 600.0)


@pytest.mark.usefixtures("without_periodic_notifications")
def test_an_unpublished_change_is_seen_before_the_next_periodic_notification(agents: GenerationAgents) -> None:
    agents.publish()
    followers = [agents.follower() for _ in range(8)]
    for follower in followers:
        assert follower.received.get(timeout=20).attempt == 0
    time.sleep(0.2)
    agents.raise_attempt()
    for follower in followers:
        assert follower.received.get(timeout=20).attempt == 1


def test_a_watcher_sends_one_request_for_each_notification(
    agents: GenerationAgents, capfd: pytest.CaptureFixture[str]
) -> None:
    agents.publish()
    follower = agents.follower()
    follower.received.get(timeout=20)
    requests, publications = follower.store.requests, agents.count_publications()
    agents.until(lambda: agents.count_publications() >= publications + 3)
    assert 2 <= follower.store.requests - requests <= agents.count_publications() - publications + 1
    assert not follower.lost.is_set()
    assert "waitForInput" not in capfd.readouterr().err  # the client of the library writes it when a wait times out


def test_old_notifications_are_deleted(agents: GenerationAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_watcher, "_KEPT", 3)
    publisher, store = agents.publish(), agents.store
    for _ in range(8):
        number = agents.count_publications()
        publisher.notify()
        agents.until(lambda number=number: agents.count_publications() > number)
    newest = agents.count_publications()
    agents.until(lambda: not store.has(store.format_key("publication", newest - 3)))
    assert store.has(*(store.format_key("publication", newest - age) for age in range(3)))


def test_a_state_without_publisher_is_followed_by_polling(agents: GenerationAgents) -> None:
    agents.store.create_state(GenerationState())
    follower = agents.follower()
    assert follower.received.get(timeout=20).attempt == 0
    agents.raise_attempt()
    assert follower.received.get(timeout=20).attempt == 1


def test_watchers_poll_between_two_publishers(agents: GenerationAgents) -> None:
    publisher = agents.publish()
    follower = agents.follower()
    follower.received.get(timeout=20)
    publisher.stop()
    time.sleep(0.3)
    before = follower.store.requests
    agents.raise_attempt()
    assert follower.received.get(timeout=20).attempt == 1
    agents.until(lambda: follower.store.requests > before + 6)  # it polls
    assert not follower.lost.is_set()
    last = agents.count_publications()
    agents.publish()
    agents.until(lambda: follower.watcher._previous_publication > last)  # it waits for notifications again
    requests, publications = follower.store.requests, agents.count_publications()
    time.sleep(1.0)
    assert follower.store.requests - requests <= agents.count_publications() - publications + 2
    agents.raise_attempt()
    assert follower.received.get(timeout=20).attempt == 2


def test_watchers_poll_after_a_publisher_falls_silent(
    agents: GenerationAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_store, "_WAIT_SECONDS", 1.0)
    agents.store.create_state(GenerationState())
    agents.store.count(agents.store.format_key("publications"), 7)  # as a publisher whose thread died
    follower = agents.follower()
    assert follower.received.get(timeout=20).attempt == 0
    assert follower.lost.wait(5)
    agents.raise_attempt()
    assert follower.received.get(timeout=5).attempt == 1
    before = follower.store.requests
    agents.until(lambda: follower.store.requests > before + 10)  # it polls, and waits for no notification


def test_an_unsigned_notification_is_rejected(agents: GenerationAgents) -> None:
    agents.store.create_state(GenerationState())
    agents.store.count(agents.store.format_key("publications"), 1)
    follower = agents.follower()
    assert follower.received.get(timeout=20).stopped is None
    stranger = StoreClient(socket.create_connection(("127.0.0.1", agents.server.port)))
    forged = GenerationState(stopped=int(ExitCode.USER_ERROR)).encode()
    stranger.send(("set", agents.store.format_key("publication", 2), forged), lambda: 5.0)
    assert follower.lost.wait(5)
    agents.publish()
    agents.raise_attempt()
    assert follower.received.get(timeout=20) == GenerationState(attempt=1)


@pytest.mark.usefixtures("without_periodic_notifications")
def test_the_last_agent_that_joins_starts_all_that_wait_with_few_requests(agents: GenerationAgents) -> None:
    handlers = [agents.rendezvous(rank) for rank in range(3)]
    first, second = agents.join(handlers[0]), agents.join(handlers[1])
    time.sleep(3.0)
    assert second[0].is_alive()
    store = handlers[1].store
    assert isinstance(store, CountingStore)
    assert store.requests < 30, store.requests  # polling every 10 ms would need hundreds
    last = agents.join(handlers[2])
    for thread, results in (first, second, last):
        thread.join(20)
        assert len(results) == 1
        assert not isinstance(results[0], Exception)


@pytest.mark.usefixtures("without_periodic_notifications")
def test_an_agent_that_waits_for_an_ended_attempt_joins_the_next(agents: GenerationAgents) -> None:
    handlers = [agents.rendezvous(rank) for rank in range(2)]  # a third never joins
    for handler in handlers:
        agents.join(handler)
    joined = [agents.store.format_key(0, "joined", rank) for rank in range(2)]
    agents.until(lambda: agents.store.has(*joined))
    time.sleep(0.3)
    agents.raise_attempt()
    joined_next = [agents.store.format_key(1, "joined", rank) for rank in range(2)]
    agents.until(lambda: agents.store.has(*joined_next))


@pytest.mark.usefixtures("without_periodic_notifications")
def test_a_waiting_agent_sees_the_stop_of_its_generation(agents: GenerationAgents) -> None:
    waiting = [agents.join(agents.rendezvous(rank)) for rank in range(2)]
    agents.until(lambda: agents.store.has(*(agents.store.format_key(0, "joined", rank) for rank in range(2))))
    time.sleep(0.3)
    agents.store.update_state(lambda _: GenerationState(stopped=int(ExitCode.USER_ERROR)))
    for thread, results in waiting:
        thread.join(20)
        assert isinstance(results[0], GenerationStoppedError)


@pytest.mark.usefixtures("without_periodic_notifications")
def test_a_waiting_agent_can_be_interrupted(agents: GenerationAgents) -> None:
    agents.publish()
    handler = agents.rendezvous(1)
    thread, results = agents.join(handler)
    agents.until(lambda: agents.store.has(agents.store.format_key(0, "joined", 1)))
    time.sleep(0.3)
    handler._watcher.interrupt()
    thread.join(20)
    assert isinstance(results[0], WaitInterruptedError)


def test_a_rendezvous_completes_without_notifications(agents: GenerationAgents) -> None:
    agents.publish()
    handler = agents.rendezvous(1)
    handler._watcher = StateWatcher(agents.membership, lambda _: None, lambda: None)  # never started
    thread, results = agents.join(handler)
    agents.until(lambda: agents.store.has(agents.store.format_key(0, "joined", 1)))
    agents.store.set(agents.store.format_key(0, "port"), "29500 0")
    agents.store.set(agents.store.format_key(0, "go"))
    thread.join(5)
    assert len(results) == 1


@pytest.mark.parametrize("timeout", [5.0, 0.2], ids=["the server times out", "the client times out first"])
def test_a_failed_request_leaves_no_connection_and_no_thread(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    """The garbage collector is off: in an idle agent, it runs once in hours."""
    monkeypatch.setattr(generation_store, "_WAIT_SECONDS", 1.0)
    monkeypatch.setattr(generation_store, "_HURRIED_SECONDS", timeout)
    server = StoreServer("127.0.0.1")
    process, threads = psutil.Process(), threading.active_count()

    def connections() -> int:
        sockets = process.net_connections("tcp")
        return sum(
            bool(connection.raddr) and server.port in (connection.laddr.port, connection.raddr.port)
            for connection in sockets
        )

    gc.collect()
    before = connections()
    gc.disable()
    try:
        for _ in range(3):
            store = GenerationStore(build_membership(server.port, nodes=3), hurried=lambda: True)
            store.connect()
            with pytest.raises(StoreLostError):
                store.get(store.format_key("nothing"))
            del store
        deadline = time.monotonic() + 30
        while connections() > before or threading.active_count() > threads:
            assert time.monotonic() < deadline, (connections(), before, threading.enumerate())
            time.sleep(0.05)
    finally:
        gc.enable()
        server.close()
