"""Processes that hang, with real agents and real collectives; no operator takes part."""

from __future__ import annotations

import json
import os
import signal

from agent_world import World, is_alive

STEPS_AHEAD = 60
LIMITS = {
    "stepFloorSeconds": 1.5,
    "stepFactor": 2,
    "initSeconds": 60,
    "compileSeconds": 60,
    "loadSeconds": 60,
    "saveSeconds": 60,
}


async def train(world: World, *names: str, processes: int = 1, **extra: str) -> None:
    entry = {"TRAINIUM_RANK_ENTRY": "fake_lockstep:main", "TRAINIUM_HANG_LIMITS": json.dumps(LIMITS)}
    await world.train(*names, processes=processes, step=5, **entry, **extra)


def block_rank(world: World, how: str, rank: int, seconds: str = "") -> None:
    world.command(f"{how}-{rank}", seconds)


def hide(world: World, ranks: int) -> None:
    """Block all ranks before the same step, a few seconds ahead, so that each has read the command by then."""
    step = world.jobs.last("a").progress.step + STEPS_AHEAD
    for rank in range(ranks):
        block_rank(world, "hide", rank, str(step))


def failures(world: World, *names: str) -> dict[str, list[int]]:
    return {name: [failure.exit_code for failure in world.jobs.last(name).failures] for name in names}


async def test_a_stopped_rank_is_named_and_all_restart_in_place(world: World) -> None:
    await train(world, "a", "b", "c")
    os.kill(world.starts(rank=1)[0]["pid"], signal.SIGSTOP)
    await world.training("a", "b", "c", attempt=1)
    assert failures(world, "a", "b", "c") == {"a": [], "b": [77], "c": []}
    (failure,) = world.jobs.last("b").failures
    assert failure.message.startswith("rank 1 of pod b stood still for ")
    assert "stopped by a signal" in failure.message
    assert "cannot answer" in failure.message
    assert {name: world.jobs.last(name).restarts[-1].cause.value for name in "abc"} == {
        "a": "PeerLost",
        "b": "Hang",
        "c": "PeerLost",
    }
    waiting = [rank for name in "ac" for beat in world.jobs.heartbeats[name] for rank in beat.stuck]
    assert all(rank.waiting and "all_reduce" in rank.stack for rank in waiting), "the others are known to wait"
    await world.until(lambda: not world.jobs.last("a").stuck, "nothing stands still any more")
    assert not is_alive(world.starts(rank=1)[0]["pid"])
    assert not world.starts(attempt=2)
    restart = world.jobs.last("b").restarts[-1]
    assert 1.5 <= restart.detected_at - restart.failed_at < 8


async def test_a_rank_that_sleeps_in_its_own_work_is_named_with_its_stack(world: World) -> None:
    await train(world, "a", "b", processes=2)
    block_rank(world, "sleep", 3)
    await world.training("a", "b", attempt=1)
    assert failures(world, "a", "b") == {"a": [], "b": [77]}
    (failure,) = world.jobs.last("b").failures
    assert failure.rank == 3
    assert "not waiting for peers" in failure.message
    assert "own_work" in failure.message
    assert "[rank 3]   File " in world.agents["b"].log
    assert "all_reduce" in world.agents["b"].log, "the stack of a rank that waits is in the log too"


async def test_ranks_that_all_wait_restart_without_a_culprit(world: World) -> None:
    await train(world, "a", "b", "c")
    hide(world, 3)
    await world.training("a", "b", "c", attempt=1)
    assert failures(world, "a", "b", "c") == {"a": [], "b": [], "c": []}
    assert {world.jobs.last(name).restarts[-1].cause.value for name in "abc"} == {"Hang"}


async def test_a_long_save_of_one_rank_is_no_hang_of_those_who_wait(world: World) -> None:
    await train(world, "a", "b")
    block_rank(world, "save", 1, "5")
    await world.until(
        lambda: any(beat.stuck for beat in world.jobs.heartbeats["a"]), "a says that its rank stands still"
    )
    before = world.jobs.last("a").progress.step
    await world.training("a", "b", attempt=0, step=before + 20)
    assert not world.starts(attempt=1)
    await world.until(lambda: not world.jobs.last("a").stuck, "nothing stands still any more")


async def test_a_rank_that_hangs_again_and_again_is_given_up_with_a_verdict(world: World) -> None:
    await train(world, "a", "b", TRAINIUM_MAX_IN_PLACE_RESTARTS="0")
    block_rank(world, "sleep", 1)
    await world.until(lambda: world.jobs.last("b").verdict is not None, "b gives up")
    assert world.jobs.last("b").verdict.exit_code == 77
    await world.phase("Failed", "a")
    assert world.jobs.last("a").verdict is None
