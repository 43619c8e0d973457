"""The reward logs that the benchmark of rollout servers compares."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollouts.rewards import WINDOW, RewardLog, compute_max_difference, read_rewards, smooth_curve


def line(step: int, start: float, time: float, reward: float = 0.5, ranks: int = 2) -> dict[str, Any]:
    return {"step": step, "rewards": [reward, reward + 0.5], "ranks": ranks, "start": start, "time": time}


LOG = RewardLog((line(1, 0, 1), line(2, 0, 2), line(3, 0, 3), line(2, 5, 9), line(3, 5, 10), line(4, 5, 10.5)))


def test_the_newest_computation_of_a_step_counts() -> None:
    log = RewardLog((line(1, 0, 1, reward=0.0), line(1, 2, 3, reward=0.5)))
    assert log.compute_curve() == {1: 0.75}
    assert log.list_unequal_repetitions() == [1]
    assert LOG.list_unequal_repetitions() == []
    other_size = RewardLog((line(1, 0, 1, ranks=2), line(1, 2, 3, reward=0.0, ranks=1)))
    assert other_size.list_unequal_repetitions() == [], "sums of another size round otherwise"


def test_a_restart_has_repeated_steps_and_a_pause_until_the_first_new_one() -> None:
    assert LOG.count_recomputed(4) == 2
    assert LOG.has_restarted(4)
    assert not LOG.has_restarted(6)
    assert LOG.find_longest_pause(4) == 7.5, "from the end of step 3 to that of step 4"
    assert LOG.find_longest_pause(10.5) == 0


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    assert read_rewards(tmp_path).newest == 0
    (tmp_path / "rewards.jsonl").write_text(json.dumps(line(1, 0, 1)) + '\n{"step": 2, "rew')
    assert read_rewards(tmp_path).newest == 1


def test_curves_are_compared_over_windows_of_equal_length() -> None:
    curve = {step: float(step) for step in range(1, WINDOW + 2)}
    assert smooth_curve(curve) == pytest.approx([(WINDOW + 1) / 2, (WINDOW + 3) / 2])
    assert compute_max_difference([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert compute_max_difference([1.0], [1.0, 2.0]) == float("inf")
