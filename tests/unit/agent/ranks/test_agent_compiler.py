"""Compilation by an idle spare: its sizes, those that fail, a cold standby, and orders meanwhile."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trainium_agent import background_compile
from trainium_agent.background_compile import BackgroundCompiler
from trainium_agent.ranks.standby_keeper import StandbyLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Keeper:
    """Starts processes that end at once, each with the next of these codes; an error instead where one is given."""

    def __init__(self, *codes: int | Exception, warm: bool = True) -> None:
        self.warm = warm
        self._codes = iter(codes)
        self.sizes: list[int] = []
        self.go = threading.Event()
        self.go.set()

    def start(self, request: Any, *, on_exit: Callable[[Any], None], **_: Any) -> Any:
        self.go.wait(30)
        self.sizes.append(int(request.argv[1]))
        code = next(self._codes)
        if isinstance(code, Exception):
            raise code
        process = SimpleNamespace(exit_code=code, signal=lambda _: None)
        on_exit(process)
        return process


class Spare:
    """The event loop of a spare that waits."""

    def __init__(self, keeper: Keeper, sizes: tuple[int, ...] = (2, 4, 8)) -> None:
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.reported: list[int] = []
        self.ends = 0
        self.compiler = BackgroundCompiler(
            SimpleNamespace(background_sizes=sizes, processes_per_node=1), keeper, post=self.posted.put,
            on_compiled=lambda size: self.reported.append(size.nodes), on_end=self._end,
        )  # fmt: skip

    def _end(self) -> None:
        self.ends += 1

    def until_the_end(self) -> None:
        ends = self.ends
        while self.ends == ends:
            self.posted.get(timeout=30)()


def test_every_size_is_compiled_once_and_reported() -> None:
    keeper = Keeper(0, 0, 0)
    spare = Spare(keeper)
    spare.compiler.start(4)
    spare.until_the_end()
    assert sorted(keeper.sizes) == [2, 4, 8]
    assert sorted(spare.reported) == [2, 4, 8]
    spare.compiler.start(4)
    spare.until_the_end()
    assert len(keeper.sizes) == 3, "nothing is left"


def test_a_size_that_fails_is_not_reported_and_not_tried_again() -> None:
    keeper = Keeper(0, 70, 0)
    spare = Spare(keeper)
    spare.compiler.start(4)
    spare.until_the_end()
    assert len(keeper.sizes) == 3
    assert spare.reported == [size for size in keeper.sizes if size != keeper.sizes[1]]


def test_a_standby_that_is_lost_ends_the_try_and_the_next_one_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper(StandbyLostError("the standby process ended"), 0, 0, 0)
    spare = Spare(keeper)
    spare.compiler.start(4)
    spare.until_the_end()
    assert spare.reported == []
    assert "could not be compiled: the standby process ended" in caplog.text
    spare.compiler.start(4)
    spare.until_the_end()
    assert sorted(spare.reported) == [2, 4, 8]


def test_a_spare_that_is_called_while_its_standby_is_cold_has_compiled_nothing() -> None:
    keeper = Keeper(warm=False)
    spare = Spare(keeper)
    spare.compiler.stop()  # nothing is under way yet
    spare.compiler.start(4)
    spare.compiler.stop()
    spare.until_the_end()
    assert (keeper.sizes, spare.reported) == ([], [])


def test_a_compilation_waits_for_a_standby_that_becomes_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "_POLL_SECONDS", 0.001)

    class Warming(Keeper):
        observations = 0

        @property
        def warm(self) -> bool:
            self.observations += 1
            return self.observations > 3

        @warm.setter
        def warm(self, _: bool) -> None: ...

    keeper = Warming(0)
    spare = Spare(keeper, (4,))
    spare.compiler.start(4)
    spare.until_the_end()
    assert spare.reported == [4]


def test_the_next_size_is_the_likeliest_for_those_who_train_now() -> None:
    keeper = Keeper(0, 0, 0)
    keeper.go.clear()
    spare = Spare(keeper)
    spare.compiler.start(8)
    spare.compiler.start(4)  # a node is gone: the others train on fewer
    keeper.go.set()
    spare.until_the_end()
    assert sorted(keeper.sizes) == [2, 4, 8]
    assert spare.ends == 1, "there was one try"
