"""What the fuzzer calls a finding: an error, a logged error, a task that failed, a case that takes too long."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.fuzz.player import Player
from tests.testing.fuzz.promises import LONGEST_LINE, promise

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("somebody")


class Target:
    """Does what the case says."""

    name = "any"
    expected = frozenset({"expected"})
    storable = False

    def seeds(self) -> list[Any]:
        return [{}]

    def values(self) -> dict[str, list[Any]]:
        return {}

    async def play(self, case: Any) -> None:
        match case:
            case {"raise": str(what)}:
                raise ValueError(what)
            case {"break": int(number)}:
                promise(False, f"{number} are too many")
            case {"log": str(who), "line": str(line)}:
                logging.getLogger(who).error(line)
            case {"forget": _}:
                task = asyncio.create_task(self.play({"raise": "nobody waits for it"}))
                await asyncio.sleep(1)
                del task
                asyncio.get_running_loop().call_exception_handler({"message": "a callback failed"})
            case {"sleep": float(seconds)}:
                await asyncio.sleep(seconds)
            case {"compute": int(steps)}:
                while steps:
                    steps -= 1
            case _:
                pass


@pytest.fixture
def player() -> Iterator[Player]:
    with Player(Target(), slow_seconds=0.2) as made:
        yield made


@pytest.mark.parametrize("case", [{}, {"log": "expected", "line": "as it should"}, {"sleep": 30_000.0}, None, 7])
def test_a_case_that_keeps_its_promises_is_none(player: Player, case: Any) -> None:
    assert player.play(case) is None


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ({"raise": "an error"}, "ValueError-test_player.play"),
        ({"break": 7}, "BrokenPromiseError-promises.promise-"),
        ({"log": "another", "line": "an error"}, "BrokenPromiseError-promises.heard-"),
        ({"log": "another", "line": "x" * (LONGEST_LINE + 1)}, "BrokenPromiseError-promises.heard-"),
        ({"forget": 1}, "ValueError-test_player.play-"),
        ({"compute": 50_000_000}, "slow-"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_case_that_breaks_one_is_a_finding_and_the_next_does_not_hear_of_it(
    player: Player, case: Any, key: str
) -> None:
    found = player.play(case)
    assert found is not None
    assert found.key.startswith(key)
    assert player.play({}) is None


def test_one_defect_has_one_name_whatever_the_numbers_in_its_sentence(player: Player) -> None:
    first, second = player.play({"break": 7}), player.play({"break": 12_345})
    assert first is not None
    assert second is not None
    assert first.key == second.key


def test_a_case_that_is_nested_beyond_reading_is_none_and_counted(player: Player) -> None:
    case: Any = 1
    for _ in range(5_000):
        case = [case]
    assert player.play(case) is None
    assert player.rejected == 1
