"""The record of a demo's steps, of which some are computed again after a fault."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from trainium_devcluster.demos.metrics import StepLog

if TYPE_CHECKING:
    from pathlib import Path


def test_a_repeated_step_counts_as_lost_and_its_first_end_is_kept(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")

    def write(times: dict[int, float]) -> None:
        lines = ({"step": step, "time": time, "loss": 1.0} for step, time in times.items())
        log.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        log.refresh()

    write({1: 10.0, 2: 11.0, 3: 12.0})
    write({1: 10.0, 2: 20.0, 3: 21.0, 4: 22.0})  # resumed after step 1
    assert log.steps_lost_after(12.5) == 2
    assert (log.time_of(3), log.first_times[3]) == (21.0, 12.0)
    assert log.first_times[4] == log.time_of(4) == 22.0
