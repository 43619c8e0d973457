"""When a rank asks the store whether the run is still its own, on a clock that the test turns."""

import threading
import time
from collections.abc import Callable

import pytest

from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.root.commit_lease import LATE_SECONDS, OwnershipCheck
from trainium_trainer.storage.errors import StorageError

MANY = 1000
"""Steps."""


class Store:
    """Count requests; report another owner on request, and nothing while it is `stalled`."""

    def __init__(self) -> None:
        self.asked = 0
        self.lost = False
        self.flows = threading.Event()
        self.flows.set()
        self.answered = threading.Event()

    def ask(self) -> None:
        self.asked += 1
        lost = self.lost
        self.flows.wait()
        self.answered.set()
        if lost:
            raise StaleGenerationError("the run belongs to generation 2")


class Steps:
    """A rank whose steps take as long as the test requires."""

    def __init__(self, ask: Callable[[], None], timeout: float = 60.0) -> None:
        self._now = 0.0
        self._owner = OwnershipCheck(ask, timeout=timeout, clock=lambda: self._now)

    def take(self, seconds: float) -> None:
        since, self._now = self._now, self._now + seconds
        self._owner.confirm(since)

    def take_many(self, seconds: float) -> None:
        for _ in range(MANY):
            self.take(seconds)
            time.sleep(0.01)  # a thread that has an answer needs an instant to leave it


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.mark.parametrize("seconds", [0.01, 1.3, 5.0, 60.0])
def test_steps_of_any_length_ask_nothing_once_it_is_known_how_long_they_take(store: Store, seconds: float) -> None:
    rank = Steps(store.ask)
    for number in range(MANY):
        rank.take(seconds * (1.0 + 0.02 * (number % 3)))
    assert store.asked <= 3


@pytest.mark.parametrize("seconds", [0.01, 5.0, 60.0])
def test_a_step_that_took_longer_than_its_predecessors_asks_before_it_is_recorded(store: Store, seconds: float) -> None:
    rank = Steps(store.ask)
    for _ in range(20):
        rank.take(seconds)
    store.asked, store.lost = 0, True
    rank.take(seconds + 0.9 * LATE_SECONDS)
    assert store.asked == 0
    with pytest.raises(StaleGenerationError):
        rank.take(seconds + 1.1 * LATE_SECONDS)


def test_the_first_steps_ask_whatever_they_take(store: Store) -> None:
    """Nothing is usual yet: the first is as long as a compiler needs."""
    rank = Steps(store.ask)
    rank.take(300.0)
    store.lost = True
    with pytest.raises(StaleGenerationError):
        rank.take(60.0)


def test_occasional_long_steps_do_not_become_usual(store: Store) -> None:
    rank = Steps(store.ask)
    for number in range(60):
        rank.take(120.0 if number % 5 == 0 else 1.0)
    assert store.asked == 12
    store.lost = True
    with pytest.raises(StaleGenerationError):
        rank.take(60.0)


def test_a_store_that_does_not_answer_is_waited_for_once(store: Store) -> None:
    rank = Steps(store.ask, timeout=0.01)
    store.flows.clear()
    for _ in range(MANY):
        rank.take(1.0)
        rank.take(30.0)
    assert store.asked == 1
    store.flows.set()


def test_an_answer_that_comes_after_the_timeout_still_ends_the_rank(store: Store) -> None:
    rank = Steps(store.ask, timeout=0.01)
    store.lost = True
    store.flows.clear()
    rank.take(60.0)
    store.flows.set()
    store.answered.wait()
    with pytest.raises(StaleGenerationError):
        rank.take_many(1.0)


@pytest.mark.parametrize("error", [OSError("no route"), StorageError("the store is away")])
def test_a_store_that_fails_ends_no_step(error: Exception) -> None:
    asked: list[None] = []

    def ask() -> None:
        asked.append(None)
        raise error

    rank = Steps(ask)
    rank.take(60.0)
    rank.take(60.0)
    assert len(asked) == 2
