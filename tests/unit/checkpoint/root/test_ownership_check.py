"""Check the ownership of the run at the store when a step took long, with a fake clock."""

import threading
import time
from collections.abc import Callable

import pytest

from trainium_trainer.checkpoint.errors import StaleGenerationError
from trainium_trainer.checkpoint.root.ownership_check import LATE_SECONDS, OwnershipCheck
from trainium_trainer.storage.errors import StorageError

STEPS = 1000


class OwnerStore:
    """Count requests; report another owner while `lost`; answer only while `available`."""

    def __init__(self) -> None:
        self.requests = 0
        self.lost = False
        self.available = threading.Event()
        self.available.set()
        self.answered = threading.Event()

    def ask(self) -> None:
        self.requests += 1
        lost = self.lost
        self.available.wait()
        self.answered.set()
        if lost:
            raise StaleGenerationError("the run belongs to generation 2")


class FakeRank:
    """A rank whose steps take the given seconds of the fake clock."""

    def __init__(self, ask: Callable[[], None], timeout: float = 60.0) -> None:
        self._now = 0.0
        self._check = OwnershipCheck(ask, timeout=timeout, clock=lambda: self._now)

    def step(self, seconds: float) -> None:
        since, self._now = self._now, self._now + seconds
        self._check.confirm(since)

    def step_many(self, seconds: float) -> None:
        for _ in range(STEPS):
            self.step(seconds)
            time.sleep(0.01)  # let the thread deliver its answer


@pytest.fixture
def store() -> OwnerStore:
    return OwnerStore()


@pytest.mark.parametrize("seconds", [0.01, 1.3, 5.0, 60.0])
def test_steps_of_usual_length_ask_nothing(store: OwnerStore, seconds: float) -> None:
    rank = FakeRank(store.ask)
    for number in range(STEPS):
        rank.step(seconds * (1.0 + 0.02 * (number % 3)))
    assert store.requests <= 3


@pytest.mark.parametrize("seconds", [0.01, 5.0, 60.0])
def test_a_step_that_took_longer_than_its_predecessors_asks_before_it_is_recorded(
    store: OwnerStore, seconds: float
) -> None:
    rank = FakeRank(store.ask)
    for _ in range(20):
        rank.step(seconds)
    store.requests, store.lost = 0, True
    rank.step(seconds + 0.9 * LATE_SECONDS)
    assert store.requests == 0
    with pytest.raises(StaleGenerationError):
        rank.step(seconds + 1.1 * LATE_SECONDS)


def test_the_first_steps_ask_however_long_they_take(store: OwnerStore) -> None:
    """The first step includes the compilation, so its length is not the usual one."""
    rank = FakeRank(store.ask)
    rank.step(300.0)
    store.lost = True
    with pytest.raises(StaleGenerationError):
        rank.step(60.0)


def test_occasional_long_steps_do_not_become_usual(store: OwnerStore) -> None:
    rank = FakeRank(store.ask)
    for number in range(60):
        rank.step(120.0 if number % 5 == 0 else 1.0)
    assert store.requests == 12
    store.lost = True
    with pytest.raises(StaleGenerationError):
        rank.step(60.0)


def test_a_store_that_does_not_answer_is_waited_for_once(store: OwnerStore) -> None:
    rank = FakeRank(store.ask, timeout=0.01)
    store.available.clear()
    for _ in range(STEPS):
        rank.step(1.0)
        rank.step(30.0)
    assert store.requests == 1
    store.available.set()


def test_an_answer_that_comes_after_the_timeout_still_ends_the_rank(store: OwnerStore) -> None:
    rank = FakeRank(store.ask, timeout=0.01)
    store.lost = True
    store.available.clear()
    rank.step(60.0)
    store.available.set()
    store.answered.wait()
    with pytest.raises(StaleGenerationError):
        rank.step_many(1.0)


@pytest.mark.parametrize("error", [OSError("no route"), StorageError("the store is away")])
def test_a_store_that_fails_ends_no_step(error: Exception) -> None:
    requests: list[None] = []

    def ask() -> None:
        requests.append(None)
        raise error

    rank = FakeRank(ask)
    rank.step(60.0)
    rank.step(60.0)
    assert len(requests) == 2
