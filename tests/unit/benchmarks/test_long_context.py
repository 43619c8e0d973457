"""The memory of a rank at 32,768 tokens, alone and with the sequence divided, as the benchmark measures it."""

from __future__ import annotations

import pytest

from benchmarks.training_speed.long_context import MEMORY_GOAL, measure_memory


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_long_sequence_that_is_divided_takes_less_than_half_of_the_memory() -> None:
    assert measure_memory(degree=4)["ratio"] < MEMORY_GOAL
