"""The reward logs that the benchmark of rollout servers compares."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollouts.rewards import (
    WINDOW,
    compute_max_difference,
    compute_reward_curve,
    list_unequal_repetitions,
    read_rewards,
    smooth_curve,
)
from trainium_devcluster.jobs.ledger import Ledger


def line(step: int, start: float, time: float, reward: float = 0.5, ranks: int = 2) -> dict[str, Any]:
    return {"step": step, "rewards": [reward, reward + 0.5], "ranks": ranks, "start": start, "time": time}


def ledger_of(folder: Path, *lines: dict[str, Any]) -> Ledger:
    (folder / "rewards.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return read_rewards(folder)


def test_the_newest_computation_of_a_step_counts(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, line(1, 0, 1, reward=0.0), line(1, 2, 3, reward=0.5))
    assert compute_reward_curve(ledger) == {1: 0.75}
    assert list_unequal_repetitions(ledger) == [1]
    assert list_unequal_repetitions(ledger_of(tmp_path, line(1, 0, 1), line(1, 2, 3))) == []
    other_size = ledger_of(tmp_path, line(1, 0, 1, ranks=2), line(1, 2, 3, reward=0.0, ranks=1))
    assert list_unequal_repetitions(other_size) == [], "sums of another size round otherwise"


def test_a_restart_has_repeated_steps_and_a_pause_until_the_first_new_one(tmp_path: Path) -> None:
    lines = (line(1, 0, 1), line(2, 0, 2), line(3, 0, 3), line(2, 5, 9), line(3, 5, 10), line(4, 5, 10.5))
    ledger = ledger_of(tmp_path, *lines)
    assert ledger.count_recomputed(4) == 2
    assert ledger.find_first_new_step(4) == 10.5
    assert ledger.find_first_new_step(6) is None
    assert ledger.find_longest_pause(4) == 7.5, "from the end of step 3 to that of step 4"
    assert ledger.find_longest_pause(10.5) == 0


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    assert read_rewards(tmp_path).newest_step == 0
    (tmp_path / "rewards.jsonl").write_text(json.dumps(line(1, 0, 1)) + '\n{"step": 2, "rew')
    assert read_rewards(tmp_path).newest_step == 1


def test_curves_are_compared_over_windows_of_equal_length() -> None:
    curve = {step: float(step) for step in range(1, WINDOW + 2)}
    assert smooth_curve(curve) == pytest.approx([(WINDOW + 1) / 2, (WINDOW + 3) / 2])
    assert compute_max_difference([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert compute_max_difference([1.0], [1.0, 2.0]) == float("inf")
