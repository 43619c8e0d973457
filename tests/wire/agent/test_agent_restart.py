from __future__ import annotations

import os
import signal
import time


def kill_rank(world, rank: int, **which: int) -> tuple[int, float]:
    pid = world.starts(rank=rank, **which)[-1]["pid"]
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return pid, at


async def test_a_killed_rank_restarts_all_ranks_in_place_and_no_agent(world):
    world.start("a", "b", "c", "d")
    await world.registered("a", "b", "c", "d")
    await world.ready("a", "b", "c", "d")
    await world.jobs.publish(["a", "b", "c", "d"])
    await world.training("a", "b", "c", "d", step=5)
    agents = {name: agent.pid for name, agent in world.agents.items()}

    _, killed_at = kill_rank(world, 2)

    await world.training("a", "b", "c", "d", attempt=1)
    again = world.starts(attempt=1)
    assert sorted(row["rank"] for row in again) == [0, 1, 2, 3]
    print("kill to main():", [round(row["at"] - killed_at, 3) for row in again])
    assert {name: agent.pid for name, agent in world.agents.items() if agent.code is None} == agents
    assert [row["ppid"] for row in sorted(again, key=lambda row: row["rank"])] == [*agents.values()]
    assert {row["nice"] for row in again} == {0}
    await world.until(lambda: world.jobs.last("c").restarts[-1].resumed_at, "the restart resumed")
    failure = world.jobs.last("c").failures[-1]
    assert (failure.exit_code, failure.rank, failure.attempt) == (137, 2, 0)
    assert not world.jobs.last("a").failures
    for name in agents:
        restarts = world.jobs.last(name).restarts
        assert len(restarts) == 1
        assert restarts[0].cause == "Crash"
        assert restarts[0].resume_step is not None
