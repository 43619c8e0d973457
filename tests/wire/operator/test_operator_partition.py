"""Minutes in which the operator, or the API server, does not reach what still trains: nothing is given up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import lose_node, readiness
from tests.testing.virtual.operator_process import training_job, until
from tests.testing.virtual.replicas import Scenario
from trainium_operator.cluster.api.resources import NODES, PODS
from trainium_operator.cluster.execute import deletion_limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MINUTES = 5 * 60.0


class World(Scenario):
    def __init__(self, nodes: int, *jobs: dict[str, Any]) -> None:
        super().__init__(*jobs, nodes=nodes, total_steps=100_000)
        self.names = [each["metadata"]["name"] for each in jobs]

    def untouched(self) -> tuple[Any, ...]:
        """Return the pods and generations, which must not change."""
        pods = {(name, self.cluster.get(PODS, "default", name)["metadata"]["uid"]) for name in self.cluster.names(PODS)}
        return pods, [self.status(name)["membership"]["generation"] for name in self.names]


@asynccontextmanager
async def training(nodes: int, *jobs: dict[str, Any]) -> AsyncIterator[World]:
    async with World(nodes, *jobs) as world:
        await until(lambda: {world.status(name).get("phase") for name in world.names} == {"Running"}, 120, "all run")
        await asyncio.sleep(10)
        yield world


@pytest.mark.parametrize("later", [0.0, 2.2, 3.7], ids=lambda later: f"{later} s after a beat")
@pytest.mark.parametrize("kubelets_too", [False, True])
@in_virtual_time
async def test_cut_off_from_all_nodes_for_five_minutes_it_deletes_nothing_and_reports_it(
    kubelets_too: bool, later: float
) -> None:
    async with training(8, training_job("llama", replicas=6, spares=1)) as world:
        await asyncio.sleep(later)
        before, step = world.untouched(), world.workers.step
        world.workers.cut_off = True
        if kubelets_too:
            readiness(world.workers, "Unknown", world.cluster.names(NODES, ""))
        await asyncio.sleep(MINUTES)
        assert world.untouched() == before
        assert world.workers.step >= step + 500
        assert world.condition("NodesHealthy")["reason"] == "ContactLost"
        assert "7 of 7 workers are silent at once" in world.condition("NodesHealthy")["message"]
        assert sum("are silent at once" in note for note in world.notes()) == 1
        world.workers.cut_off = False
        readiness(world.workers, "True", world.cluster.names(NODES, ""))
        await asyncio.sleep(60)
        assert world.untouched() == before
        assert world.condition("NodesHealthy")["reason"] == "NodesHealthy"


@in_virtual_time
async def test_one_of_three_zones_that_is_dark_to_us_and_trains_on_loses_nothing() -> None:
    async with training(10, training_job("llama", replicas=6, spares=3)) as world:
        before, step = world.untouched(), world.workers.step
        zone = {f"node-{number}" for number in range(0, 9, 3)}
        world.workers.muted_nodes = zone
        readiness(world.workers, "Unknown", zone)
        await asyncio.sleep(MINUTES)
        assert world.untouched() == before
        assert world.workers.step >= step + 500
        assert world.condition("NodesHealthy")["reason"] == "ContactLost"


@in_virtual_time
async def test_leases_of_all_kubelets_that_are_stale_while_training_goes_on_lose_nothing() -> None:
    async with training(8, training_job("llama", replicas=6, spares=1)) as world:
        before, step = world.untouched(), world.workers.step
        readiness(world.workers, "Unknown", world.cluster.names(NODES, ""))
        await asyncio.sleep(MINUTES)
        assert world.untouched() == before
        assert world.workers.step >= step + 500


@pytest.mark.long
@in_virtual_time
async def test_many_jobs_of_one_worker_each_are_not_given_up_one_by_one() -> None:
    async with training(12, *(training_job(f"job-{number}", replicas=1) for number in range(12))) as world:
        before = world.untouched()
        world.workers.cut_off = True
        readiness(world.workers, "Unknown", world.cluster.names(NODES, ""))
        await asyncio.sleep(MINUTES)
        assert world.untouched() == before


@in_virtual_time
async def test_a_failed_rack_is_replaced_because_the_other_workers_hang() -> None:
    async with training(12, training_job("llama", replicas=6, spares=2)) as world:
        rack = [agent.node for agent in world.workers.members("llama")[:2]]
        for node in rack:
            lose_node(world.workers, node)
        step = world.workers.step
        await until(lambda: world.status("llama")["membership"]["generation"] == 2, 12, "the spares take over")
        await until(lambda: world.workers.step > step, 12, "it trains on")


def test_no_more_is_deleted_by_force_within_a_minute_than_the_last_bound_allows() -> None:
    now = 0.0
    bound = deletion_limit.ForceDeleteLimiter(lambda: now)
    for number in range(deletion_limit.LEAST):
        bound.permit(f"pod-{number}", 10)
    bound.permit("pod-0", 10)  # a repetition
    with pytest.raises(deletion_limit.ForceDeleteLimitError, match="8 pods were deleted by force within 60 s"):
        bound.permit("one-more", 10)
    bound.permit("of-many", 1000)
    now = deletion_limit.WINDOW_SECONDS
    bound.permit("one-more", 10)
