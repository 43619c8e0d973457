"""Hung ranks and bad nodes under real agents with real collectives: blame, restart, pair test and bandwidth test."""

import json
import os
import re
import signal

import pytest

from tests.testing.suite.processes import has_ended
from tests.testing.suite.timeouts import scaled
from tests.wire.agent.agent_job import AgentJob

STEPS_AHEAD = 60
LIMITS = {
    "stepFloorSeconds": 1.5,
    "stepFactor": 2,
    "initSeconds": 60,
    "compileSeconds": 60,
    "loadSeconds": 60,
    "saveSeconds": 60,
}


async def train_lockstep(job: AgentJob, *names: str, processes: int = 1, **extra: str) -> None:
    entry = {"TRAINIUM_RANK_ENTRY": "fake_lockstep:main", "TRAINIUM_HANG_LIMITS": json.dumps(LIMITS)}
    await job.train(*names, processes=processes, step=5, **entry, **extra)


def block_rank(job: AgentJob, command: str, rank: int, seconds: str = "") -> None:
    job.command_ranks(f"{command}-{rank}", seconds)


def block_all_ranks(job: AgentJob, ranks: int) -> None:
    """Block all ranks before the same step, a few seconds ahead, so that each has read the command by then."""
    step = job.last_heartbeat("a").progress.step + STEPS_AHEAD
    for rank in range(ranks):
        block_rank(job, "hide", rank, str(step))


def failures(job: AgentJob, *names: str) -> dict[str, list[int]]:
    return {name: [failure.exit_code for failure in job.last_heartbeat(name).failures] for name in names}


async def test_a_stopped_rank_is_blamed_and_all_restart_in_place(job: AgentJob) -> None:
    await train_lockstep(job, "a", "b", "c")
    os.kill(job.rank_starts(rank=1)[0]["pid"], signal.SIGSTOP)
    await job.until_training("a", "b", "c", attempt=1)
    assert failures(job, "a", "b", "c") == {"a": [], "b": [77], "c": []}
    (failure,) = job.last_heartbeat("b").failures
    assert failure.message.startswith("rank 1 of pod b made no progress for ")
    assert "stopped by a signal" in failure.message
    assert "cannot answer" in failure.message
    assert {name: job.last_heartbeat(name).restarts[-1].cause.value for name in "abc"} == {
        "a": "PeerLost",
        "b": "Hang",
        "c": "PeerLost",
    }
    peers = [
        rank
        for name in "ac"
        for heartbeat in job.coordinator.heartbeats[name]
        for rank in heartbeat.stuck
        if rank.stack
    ]
    assert all(rank.waiting and "all_reduce" in rank.stack for rank in peers), "ranks whose stack is known wait"
    await job.until(lambda: not job.last_heartbeat("a").stuck, "no rank is stuck")
    assert has_ended(job.rank_starts(rank=1)[0]["pid"])
    assert not job.rank_starts(attempt=2)
    restart = job.last_heartbeat("b").restarts[-1]
    assert 1.5 <= restart.detected_at - restart.failed_at < 8


async def test_a_rank_that_sleeps_outside_collectives_is_blamed_with_its_stack(job: AgentJob) -> None:
    await train_lockstep(job, "a", "b", processes=2)
    block_rank(job, "sleep", 3)
    await job.until_training("a", "b", attempt=1)
    assert failures(job, "a", "b") == {"a": [], "b": [77]}
    (failure,) = job.last_heartbeat("b").failures
    assert failure.rank == 3
    assert "not waiting for peers" in failure.message
    assert "own_work" in failure.message
    assert "[rank 3]   File " in job.agents["b"].log
    assert "all_reduce" in job.agents["b"].log, "the log has the stack of a waiting rank"


async def test_a_hang_of_all_ranks_blames_none(job: AgentJob) -> None:
    await train_lockstep(job, "a", "b", "c")
    block_all_ranks(job, 3)
    await job.until_training("a", "b", "c", attempt=1)
    assert failures(job, "a", "b", "c") == {"a": [], "b": [], "c": []}
    assert {job.last_heartbeat(name).restarts[-1].cause.value for name in "abc"} == {"Hang"}


async def test_a_long_save_is_no_hang_of_the_waiting_ranks(job: AgentJob) -> None:
    await train_lockstep(job, "a", "b")
    block_rank(job, "save", 1, "5")
    await job.until(
        lambda: any(heartbeat.stuck for heartbeat in job.coordinator.heartbeats["a"]),
        "a reports that its rank is stuck",
    )
    before = job.last_heartbeat("a").progress.step
    await job.until_training("a", "b", attempt=0, step=before + 20)
    assert not job.rank_starts(attempt=1)
    await job.until(lambda: not job.last_heartbeat("a").stuck, "no rank is stuck")


async def test_a_hang_beyond_the_restart_limit_is_a_verdict(job: AgentJob) -> None:
    await train_lockstep(job, "a", "b", TRAINIUM_MAX_IN_PLACE_RESTARTS="0")
    block_rank(job, "sleep", 1)
    assert (await job.until_verdict("b")).exit_code == 77
    await job.until_phase("Failed", "a")
    assert job.last_heartbeat("a").verdict is None


NODES = ("a", "b", "c", "d")


async def cause_two_collective_hangs(job: AgentJob, *spares: str, seconds: float = 8) -> None:
    extra = {
        "TRAINIUM_RANK_ENTRY": "fake_lockstep:main",
        "TRAINIUM_PAIR_ENTRY": "fake_pairing:main",
        "TRAINIUM_PAIR_SECONDS": str(scaled(seconds)),
        "TRAINIUM_PREFLIGHT": "Pairwise",
        "TRAINIUM_HANG_LIMITS": json.dumps(LIMITS),
    }
    job.start(*NODES, *spares, **extra)
    await job.until_ready(*NODES, *spares)
    await job.coordinator.publish([*NODES])
    for attempt in (0, 1):
        await job.until_training(*NODES, attempt=attempt, step=5)
        before = job.last_heartbeat("a").progress.step
        await job.until_training(*NODES, attempt=attempt, step=before + 3)
        block_all_ranks(job, len(NODES))


@pytest.mark.timeout(150)  # the test waits for a silent node, twice
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("miscompute", 80),
        *(pytest.param(fault, 82, marks=pytest.mark.long) for fault in ("drop", "slow", "wrong")),
    ],
)
async def test_a_bad_node_is_found_after_two_hangs_and_replaced(job: AgentJob, fault: str, code: int) -> None:
    job.command_ranks("pair-fault-c", fault)
    await cause_two_collective_hangs(job, "spare", seconds=3 if fault == "drop" else 8)
    heartbeat = await job.until_heartbeat("c", lambda heartbeat: heartbeat.phase == "Failed", "it withdraws")
    assert heartbeat.verdict.exit_code == code
    assert "node-c" in heartbeat.verdict.message
    (check,) = heartbeat.checks
    assert (check.check, check.passed) == ("Pairwise", False)
    others = [name for name in NODES if name != "c"]
    await job.until(
        lambda: all(job.last_heartbeat(name).waiting_for == (2,) for name in others), "the others wait for node rank 2"
    )
    for name in others:
        assert job.last_heartbeat(name).verdict is None
        assert not job.last_heartbeat(name).failures
        assert [check.passed for check in job.last_heartbeat(name).checks] == [True]
    assert not job.rank_starts(attempt=2)
    await job.coordinator.publish(["a", "b", "spare", "d"])
    await job.until_training("a", "b", "spare", "d", generation=2)


@pytest.mark.timeout(90)
async def test_healthy_nodes_pass_the_pair_test_and_continue(job: AgentJob) -> None:
    await cause_two_collective_hangs(job)
    await job.until_training(*NODES, attempt=2)
    assert all(job.last_heartbeat(name).checks[0].passed for name in NODES)
    assert not any(job.last_heartbeat(name).failures for name in NODES)


def start_with_bandwidth_check(job: AgentJob, *names: str) -> None:
    job.start(
        *names,
        TRAINIUM_PAIR_ENTRY="fake_pairing:main",
        TRAINIUM_PAIR_SECONDS=str(scaled(10)),
        TRAINIUM_PREFLIGHT="Bandwidth",
        TRAINIUM_MINIMUM_BANDWIDTH_GBPS="0.25",
    )


@pytest.mark.timeout(120)
async def test_a_node_below_the_minimum_bandwidth_is_replaced(job: AgentJob) -> None:
    job.command_ranks("pair-fault-c", "throttle 0.1")
    start_with_bandwidth_check(job, *NODES, "spare")
    await job.until_ready(*NODES, "spare")
    await job.coordinator.publish([*NODES])
    verdict = await job.until_verdict("c")
    assert verdict.exit_code == 82
    assert "check Bandwidth: node node-c cannot exchange with any peer at 0.25 Gbit/s" in verdict.message
    for name in ("a", "b", "d"):
        (check,) = (await job.until_heartbeat(name, lambda heartbeat: heartbeat.checks, "the check")).checks
        assert (check.check, check.passed) == ("Bandwidth", True)
        assert "the slowest link is that of " in check.detail
        assert "node-c" in check.detail
        assert "Gbit/s, below 0.25" in check.detail
    assert not job.rank_starts(attempt=0), "no rank started before"
    await job.coordinator.publish(["a", "b", "spare", "d"])
    await job.until_training("a", "b", "spare", "d", generation=2)


@pytest.mark.timeout(120)
async def test_a_slow_link_is_reported_and_blamed_on_no_node(job: AgentJob) -> None:
    start_with_bandwidth_check(job, *NODES)
    job.command_ranks("pair-fault-b", f"throttle 0.1 {job.agents['a'].ip}")
    await job.until_ready(*NODES)
    await job.coordinator.publish([*NODES])
    await job.until_training(*NODES)
    for name in NODES:
        (check,) = job.last_heartbeat(name).checks
        assert check.passed
        assert re.search(r"the slowest link is that of node-a and node-b: 0\.(0|1 )", check.detail)
    (check,) = job.last_heartbeat("d").checks
    bandwidth = float(check.detail.partition("with node rank 2: ")[2].partition(" Gbit/s")[0])
    assert bandwidth > 0.25, "measured on sockets"
