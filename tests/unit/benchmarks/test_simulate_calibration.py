"""The simulator against the medians of the fault table, which real processes made."""

from __future__ import annotations

import pytest

from benchmarks.simulate.calibrate import ALLOWED, ROWS, Compared, compare


@pytest.fixture(scope="module")
def compared() -> dict[str, Compared]:
    return {each.number: each for each in compare()}


@pytest.mark.parametrize("number", [row.number for row in ROWS])
def test_simulated_recoveries_take_as_long_as_real_ones(compared: dict[str, Compared], number: str) -> None:
    assert abs(compared[number].off) <= ALLOWED, compared[number]
