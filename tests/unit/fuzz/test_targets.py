"""Test the operator with hostile input: valid cases, and the same after random changes.

`make fuzz` runs `hostile_test` with more inputs, guided by coverage.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.testing.fuzz.invariants import LONGEST_LINE, InvariantError, require
from tests.testing.fuzz.runner import TARGETS, run_case
from tests.testing.suite.any_json import collect_values, mutated_values
from tests.testing.suite.trials import trials

CASES = {"coordinator": 500, "cluster": 250, "spec": 200}
MOST_MUTATIONS = 5


def hostile_test(name: str) -> Callable[[], None]:
    """Return a property test that mutates the seeds of a target."""
    target = TARGETS[name]()
    seeds = target.seeds()
    values_by_key = collect_values(seeds, target.values())

    @settings(max_examples=trials(CASES[name]), suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(seeds).flatmap(lambda seed: mutated_values(seed, MOST_MUTATIONS, values_by_key)))
    def test(case: Any) -> None:
        run_case(target, case)

    return test


@pytest.mark.parametrize("name", TARGETS)
def test_valid_cases_are_handled(name: str) -> None:
    target = TARGETS[name]()
    for case in target.seeds():
        run_case(target, case)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_cases_are_handled(name: str) -> None:
    hostile_test(name)()


class EchoTarget:
    """A target whose cases request an error, a log line or a failed callback."""

    expected = frozenset({"expected"})
    storable = False

    def seeds(self) -> list[Any]:
        return [{}]

    def values(self) -> dict[str, list[Any]]:
        return {}

    async def run_case(self, case: Any) -> None:
        match case:
            case {"raise": str(message)}:
                raise ValueError(message)
            case {"break": int(number)}:
                require(False, f"{number} are too many")
            case {"log": str(logger), "line": str(line)}:
                logging.getLogger(logger).error(line)
            case {"callback": str(message)}:
                asyncio.get_running_loop().call_exception_handler({"message": message})
            case _:
                await asyncio.sleep(30_000.0)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ({"raise": "an error"}, ValueError),
        ({"break": 7}, InvariantError),
        ({"log": "another", "line": "an error"}, InvariantError),
        ({"log": "another", "line": "x" * (LONGEST_LINE + 1)}, InvariantError),
        ({"callback": "failed"}, InvariantError),
    ],
)
def test_an_error_a_logged_error_and_a_failed_callback_fail_a_case_and_not_the_next(
    case: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        run_case(EchoTarget(), case)
    run_case(EchoTarget(), {})
    run_case(EchoTarget(), {"log": "expected", "line": "as it should"})
