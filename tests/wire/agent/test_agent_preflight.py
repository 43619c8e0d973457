"""The node's own checks in a real agent: before it may join, and without delaying it much."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from trainium_contract.spec.health import PreflightCheck as Check

if TYPE_CHECKING:
    from agent_world import World


async def test_a_worker_is_ready_when_its_own_checks_have_passed(world: World) -> None:
    world.start(
        "a",
        TRAINIUM_PREFLIGHT="Devices,Memory,Disk,Clock,Matmul,Loopback",
        TRAINIUM_PREFLIGHT_SECONDS="60",
        TRAINIUM_PROCESSES_PER_NODE="2",
    )
    await world.ready("a")
    beat = world.jobs.last("a")
    assert beat is not None
    outcomes = {result.check: result for result in beat.checks}
    assert outcomes[Check.MATMUL].passed
    assert outcomes[Check.LOOPBACK].detail == ""
    assert outcomes.keys() >= {Check.DEVICES, Check.MEMORY, Check.DISK, Check.MATMUL, Check.LOOPBACK}
    assert all(not earlier.ready for earlier in world.jobs.heartbeats["a"] if Check.MATMUL not in dict_of(earlier))
    await world.jobs.publish(["a"], processes=2)
    await world.training("a", step=3)


@pytest.mark.parametrize(("minimum", "passes"), [("0.01", True), ("900000", False)])
async def test_the_bandwidth_within_a_node_is_measured_and_one_below_the_bound_is_unfit(
    world: World, minimum: str, *, passes: bool
) -> None:
    world.start(
        "a",
        TRAINIUM_PREFLIGHT="Loopback,Bandwidth",
        TRAINIUM_PREFLIGHT_SECONDS="60",
        TRAINIUM_MINIMUM_BANDWIDTH_GBPS=minimum,
        TRAINIUM_PROCESSES_PER_NODE="2",
    )
    await world.until(lambda: (beat := world.jobs.last("a")) is not None and bool(beat.checks), "the check")
    beat = world.jobs.last("a")
    assert beat is not None
    (check,) = beat.checks
    assert (check.check, check.passed) == (Check.LOOPBACK, passes)
    if passes:
        assert re.fullmatch(r"[\d.]+ Gbit/s among 2 processes", check.detail)
        await world.ready("a")
        return
    await world.until(lambda: (beat := world.jobs.last("a")) is not None and beat.verdict is not None, "the verdict")
    beat = world.jobs.last("a")
    assert beat is not None
    assert beat.verdict is not None
    assert re.fullmatch(
        r"node node-a: an all-reduce among the processes of the node reaches [\d.]+ Gbit/s, below 900000",
        beat.verdict.message,
    )


async def test_a_node_that_computes_wrong_numbers_is_unfit_and_starts_no_rank(world: World) -> None:
    world.start(
        "a",
        TRAINIUM_PREFLIGHT="Matmul",
        TRAINIUM_PROCESSES_PER_NODE="2",
        TRAINIUM_CHECK_ENTRY="fake_check:main",
    )
    await world.until(lambda: (beat := world.jobs.last("a")) is not None and beat.verdict is not None, "the verdict")
    beat = world.jobs.last("a")
    assert beat is not None
    assert beat.verdict is not None
    assert beat.verdict.exit_code == 80
    assert beat.verdict.message == "node node-a: a matrix product is wrong on core 1"
    assert not beat.ready
    await world.jobs.publish(["a"], processes=2)
    await world.until(lambda: (last := world.jobs.last("a")) is not None and last.generation == 1, "it knows")
    assert world.starts() == []


def dict_of(beat: object) -> set[Check]:
    return {result.check for result in beat.checks}
