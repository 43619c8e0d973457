"""The ledger on real agents and processes: what they report becomes the stages of a real recovery."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testing.cluster.jobs import Job


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_real_recovery_is_split_into_its_stages_and_the_ledger_adds_up(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.until_step(10, 150)
    job.kill_rank(1)
    stages = job.until_recovered()["stages"]
    # A load that is over at the agent's next look at the ranks counts as a part of the restart.
    assert stages["restart"] + stages["load"] > 0, "the processes are started again, and load"
    assert stages["decide"] == 0, "a restart in place needs no decision"
    job.until_phase("Completed")
    goodput = job.status()["goodput"]
    lost = sum(goodput["lostSeconds"].values())
    assert goodput["productiveSeconds"] + lost == pytest.approx(goodput["wallSeconds"], abs=0.05)
    assert sum(goodput["lostByStage"].values()) == pytest.approx(lost, abs=0.05)
    assert sum(size["steps"] for size in goodput["sizes"]) == 60
    assert 0 < goodput["ratio"] <= goodput["uptimeRatio"] <= 1
