"""The fuzzer's short version: the same two thousand hostile cases with each change; `make fuzz` plays others."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.testing.fuzz.hostile import decoded, encoded
from tests.testing.fuzz.mutation import Mutator
from tests.testing.fuzz.player import Finding, Player
from tests.testing.fuzz.targets import TARGETS
from tests.testing.suite.trials import trials

SEED = 1
CASES = {"coordinator": 1200, "cluster": 600, "spec": 400}


def told(case: Any, found: Finding | None) -> str:
    return "" if found is None else f"{found.text}\nthe case: {encoded(case).decode()[:20_000]}"


@pytest.mark.parametrize("name", TARGETS)
def test_the_cases_that_all_others_are_made_of_break_no_promise(name: str) -> None:
    target = TARGETS[name]()
    with Player(target) as player:
        for case in target.seeds():
            found = player.play(decoded(encoded(case)))
            assert found is None, told(case, found)


@pytest.mark.parametrize("name", TARGETS)
def test_no_hostile_case_breaks_a_promise(name: str) -> None:
    target = TARGETS[name]()
    seeds = [encoded(case) for case in target.seeds()]
    mutator, dice = Mutator(target.seeds(), target.values()), random.Random(SEED)
    with Player(target, slow_seconds=60.0) as player:  # a tenth of that is a finding for `make fuzz`
        for _ in range(trials(CASES[name])):
            case = mutator.changed(decoded(dice.choice(seeds)), dice)
            found = player.play(case)
            assert found is None, told(case, found)
