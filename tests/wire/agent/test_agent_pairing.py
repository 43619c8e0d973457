"""A node that hides among four is found by real exchanges between their agents; the victims are not blamed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from test_agent_hang import LIMITS, hide

from tests.testing.suite.timeouts import scaled

if TYPE_CHECKING:
    from agent_world import World

NODES = ("a", "b", "c", "d")


async def two_collective_hangs(world: World, *spares: str, seconds: float = 8) -> None:
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
async def test_a_node_that_hides_is_found_and_replaced_and_its_victims_stay(
    world: World, fault: str, code: int
) -> None:
    world.command("pair-fault-c", fault)
    await two_collective_hangs(world, "spare", seconds=3 if fault == "drop" else 8)
    await world.until(lambda: world.jobs.last("c").phase == "Failed", "c withdraws", seconds=60)
    verdict = world.jobs.last("c").verdict
    assert verdict.exit_code == code
    assert "node-c" in verdict.message
    (check,) = world.jobs.last("c").checks
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
async def test_healthy_nodes_pass_the_test_and_continue_in_the_same_attempt(world: World) -> None:
    await two_collective_hangs(world)
    await world.training(*NODES, attempt=2)
    assert all(world.jobs.last(name).checks[0].passed for name in NODES)
    assert not any(world.jobs.last(name).failures for name in NODES)


def with_bandwidth(world: World, *names: str) -> None:
    world.start(
        *names,
        TRAINIUM_PAIR_ENTRY="fake_pairing:main",
        TRAINIUM_PAIR_SECONDS=str(scaled(10)),
        TRAINIUM_PREFLIGHT="Bandwidth",
        TRAINIUM_MINIMUM_BANDWIDTH_GBPS="0.25",
    )


@pytest.mark.timeout(120)
async def test_a_node_below_the_bandwidth_does_not_train_and_the_slowest_link_is_named(world: World) -> None:
    world.command("pair-fault-c", "throttle 0.1")
    with_bandwidth(world, *NODES, "spare")
    await world.ready(*NODES, "spare")
    await world.jobs.publish([*NODES])
    await world.until(lambda: world.jobs.last("c").phase == "Failed", "c withdraws", seconds=60)
    verdict = world.jobs.last("c").verdict
    assert verdict.exit_code == 82
    assert "check Bandwidth: node node-c cannot exchange with any peer at 0.25 Gbit/s" in verdict.message
    for name in ("a", "b", "d"):
        await world.until(lambda: world.jobs.last(name).checks, f"{name} reports the check")  # noqa: B023 - awaited here
        (check,) = world.jobs.last(name).checks
        assert (check.check, check.passed) == ("Bandwidth", True)
        assert "the slowest link is that of " in check.detail
        assert "node-c" in check.detail
        assert "Gbit/s, below 0.25" in check.detail
    assert not world.starts(attempt=0), "no rank started before"
    await world.jobs.publish(["a", "b", "spare", "d"])
    await world.training("a", "b", "spare", "d", generation=2)


@pytest.mark.timeout(120)
async def test_a_slow_link_is_named_and_blamed_on_neither_node(world: World) -> None:
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
