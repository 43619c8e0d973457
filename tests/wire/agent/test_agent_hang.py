"""Hung ranks and bad nodes under real agents with real collectives: blame, restart, pair test and bandwidth test."""

import json
import os
import re
import signal

import pytest

from tests.testing.suite.timeouts import scaled
from tests.wire.agent.agent_world import AgentJob, is_alive

STEPS_AHEAD = 60
LIMITS = {
    "stepFloorSeconds": 1.5,
    "stepFactor": 2,
    "initSeconds": 60,
    "compileSeconds": 60,
    "loadSeconds": 60,
    "saveSeconds": 60,
}


async def train(world: AgentJob, *names: str, processes: int = 1, **extra: str) -> None:
    entry = {"TRAINIUM_RANK_ENTRY": "fake_lockstep:main", "TRAINIUM_HANG_LIMITS": json.dumps(LIMITS)}
    await world.train(*names, processes=processes, step=5, **entry, **extra)


def block_rank(world: AgentJob, how: str, rank: int, seconds: str = "") -> None:
    world.command(f"{how}-{rank}", seconds)


def hide(world: AgentJob, ranks: int) -> None:
    """Block all ranks before the same step, a few seconds ahead, so that each has read the command by then."""
    step = world.jobs.last("a").progress.step + STEPS_AHEAD
    for rank in range(ranks):
        block_rank(world, "hide", rank, str(step))


def failures(world: AgentJob, *names: str) -> dict[str, list[int]]:
    return {name: [failure.exit_code for failure in world.jobs.last(name).failures] for name in names}


async def test_a_stopped_rank_is_blamed_and_all_restart_in_place(world: AgentJob) -> None:
    await train(world, "a", "b", "c")
    os.kill(world.starts(rank=1)[0]["pid"], signal.SIGSTOP)
    await world.training("a", "b", "c", attempt=1)
    assert failures(world, "a", "b", "c") == {"a": [], "b": [77], "c": []}
    (failure,) = world.jobs.last("b").failures
    assert failure.message.startswith("rank 1 of pod b made no progress for ")
    assert "stopped by a signal" in failure.message
    assert "cannot answer" in failure.message
    assert {name: world.jobs.last(name).restarts[-1].cause.value for name in "abc"} == {
        "a": "PeerLost",
        "b": "Hang",
        "c": "PeerLost",
    }
    peers = [rank for name in "ac" for beat in world.jobs.heartbeats[name] for rank in beat.stuck if rank.stack]
    assert all(rank.waiting and "all_reduce" in rank.stack for rank in peers), "ranks whose stack is known wait"
    await world.until(lambda: not world.jobs.last("a").stuck, "no rank is stuck any more")
    assert not is_alive(world.starts(rank=1)[0]["pid"])
    assert not world.starts(attempt=2)
    restart = world.jobs.last("b").restarts[-1]
    assert 1.5 <= restart.detected_at - restart.failed_at < 8


async def test_a_rank_that_sleeps_outside_collectives_is_blamed_with_its_stack(world: AgentJob) -> None:
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


async def test_a_hang_of_all_ranks_blames_none(world: AgentJob) -> None:
    await train(world, "a", "b", "c")
    hide(world, 3)
    await world.training("a", "b", "c", attempt=1)
    assert failures(world, "a", "b", "c") == {"a": [], "b": [], "c": []}
    assert {world.jobs.last(name).restarts[-1].cause.value for name in "abc"} == {"Hang"}


async def test_a_long_save_is_no_hang_of_the_waiting_ranks(world: AgentJob) -> None:
    await train(world, "a", "b")
    block_rank(world, "save", 1, "5")
    await world.until(
        lambda: any(beat.stuck for beat in world.jobs.heartbeats["a"]), "a reports that its rank is stuck"
    )
    before = world.jobs.last("a").progress.step
    await world.training("a", "b", attempt=0, step=before + 20)
    assert not world.starts(attempt=1)
    await world.until(lambda: not world.jobs.last("a").stuck, "no rank is stuck any more")


async def test_a_hang_beyond_the_restart_limit_is_a_verdict(world: AgentJob) -> None:
    await train(world, "a", "b", TRAINIUM_MAX_IN_PLACE_RESTARTS="0")
    block_rank(world, "sleep", 1)
    assert (await world.verdict("b")).exit_code == 77
    await world.phase("Failed", "a")
    assert world.jobs.last("a").verdict is None


NODES = ("a", "b", "c", "d")


async def two_collective_hangs(world: AgentJob, *spares: str, seconds: float = 8) -> None:
    extra = {
        "TRAINIUM_RANK_ENTRY": "fake_lockstep:main",
        "TRAINIUM_PAIR_ENTRY": "fake_pairing:main",
        "TRAINIUM_PAIR_SECONDS": str(scaled(seconds)),
        "TRAINIUM_PREFLIGHT": "Pairwise",
        "TRAINIUM_HANG_LIMITS": json.dumps(LIMITS),
    }
    world.start(*NODES, *spares, **extra)
    await world.ready(*NODES, *spares)
    await world.jobs.publish([*NODES])
    for attempt in (0, 1):
        await world.training(*NODES, attempt=attempt, step=5)
        before = world.jobs.last("a").progress.step
        await world.training(*NODES, attempt=attempt, step=before + 3)
        hide(world, len(NODES))


@pytest.mark.timeout(150)  # the test waits for a silent node, twice
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("miscompute", 80),
        *(pytest.param(fault, 82, marks=pytest.mark.long) for fault in ("drop", "slow", "wrong")),
    ],
)
async def test_a_bad_node_is_found_after_two_hangs_and_replaced(world: AgentJob, fault: str, code: int) -> None:
    world.command("pair-fault-c", fault)
    await two_collective_hangs(world, "spare", seconds=3 if fault == "drop" else 8)
    beat = await world.heartbeat("c", lambda beat: beat.phase == "Failed", "it withdraws")
    assert beat.verdict.exit_code == code
    assert "node-c" in beat.verdict.message
    (check,) = beat.checks
    assert (check.check, check.passed) == ("Pairwise", False)
    others = [name for name in NODES if name != "c"]
    await world.until(
        lambda: all(world.jobs.last(name).waiting_for == (2,) for name in others), "the others wait for node rank 2"
    )
    for name in others:
        assert world.jobs.last(name).verdict is None
        assert not world.jobs.last(name).failures
        assert [each.passed for each in world.jobs.last(name).checks] == [True]
    assert not world.starts(attempt=2)
    await world.jobs.publish(["a", "b", "spare", "d"])
    await world.training("a", "b", "spare", "d", generation=2)


@pytest.mark.timeout(90)
async def test_healthy_nodes_pass_the_pair_test_and_continue(world: AgentJob) -> None:
    await two_collective_hangs(world)
    await world.training(*NODES, attempt=2)
    assert all(world.jobs.last(name).checks[0].passed for name in NODES)
    assert not any(world.jobs.last(name).failures for name in NODES)


def with_bandwidth(world: AgentJob, *names: str) -> None:
    world.start(
        *names,
        TRAINIUM_PAIR_ENTRY="fake_pairing:main",
        TRAINIUM_PAIR_SECONDS=str(scaled(10)),
        TRAINIUM_PREFLIGHT="Bandwidth",
        TRAINIUM_MINIMUM_BANDWIDTH_GBPS="0.25",
    )


@pytest.mark.timeout(120)
async def test_a_node_below_the_minimum_bandwidth_is_replaced(world: AgentJob) -> None:
    world.command("pair-fault-c", "throttle 0.1")
    with_bandwidth(world, *NODES, "spare")
    await world.ready(*NODES, "spare")
    await world.jobs.publish([*NODES])
    verdict = await world.verdict("c")
    assert verdict.exit_code == 82
    assert "check Bandwidth: node node-c cannot exchange with any peer at 0.25 Gbit/s" in verdict.message
    for name in ("a", "b", "d"):
        (check,) = (await world.heartbeat(name, lambda beat: beat.checks, "the check")).checks
        assert (check.check, check.passed) == ("Bandwidth", True)
        assert "the slowest link is that of " in check.detail
        assert "node-c" in check.detail
        assert "Gbit/s, below 0.25" in check.detail
    assert not world.starts(attempt=0), "no rank started before"
    await world.jobs.publish(["a", "b", "spare", "d"])
    await world.training("a", "b", "spare", "d", generation=2)


@pytest.mark.timeout(120)
async def test_a_slow_link_is_reported_and_blamed_on_no_node(world: AgentJob) -> None:
    with_bandwidth(world, *NODES)
    world.command("pair-fault-b", f"throttle 0.1 {world.agents['a'].ip}")
    await world.ready(*NODES)
    await world.jobs.publish([*NODES])
    await world.training(*NODES)
    for name in NODES:
        (check,) = world.jobs.last(name).checks
        assert check.passed
        assert re.search(r"the slowest link is that of node-a and node-b: 0\.(0|1 )", check.detail)
    (check,) = world.jobs.last("d").checks
    own = float(check.detail.partition("with node rank 2: ")[2].partition(" Gbit/s")[0])
    assert own > 0.25, "measured on sockets"
