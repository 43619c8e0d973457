"""A node that hides among four is found by real exchanges between their agents; the victims are not blamed."""

from __future__ import annotations

import json
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
