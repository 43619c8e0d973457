"""Partitions between operator, API server and workers that still train: no worker is replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import lose_node, set_readiness
from tests.testing.virtual.operator_process import until
from tests.testing.virtual.replicas import Scenario
from trainium_operator.cluster.execute import deletion_limit

OBSERVATION_SECONDS = 5 * 60.0


class PartitionedCluster(Scenario):
    def __init__(self, nodes: int, *jobs: dict[str, Any]) -> None:
        super().__init__(*jobs, nodes=nodes, total_steps=100_000)
        self.names = [job["metadata"]["name"] for job in jobs]

    def pods_and_generations(self) -> tuple[Any, ...]:
        """Return the pods and generations, which must not change."""
        return self.pods(), [self.status(name)["membership"]["generation"] for name in self.names]


@asynccontextmanager
async def train_jobs(nodes: int, *jobs: dict[str, Any]) -> AsyncIterator[PartitionedCluster]:
    async with PartitionedCluster(nodes, *jobs) as scenario:
        await until(
            lambda: {scenario.status(name).get("phase") for name in scenario.names} == {"Running"}, "all run", 120
        )
        await asyncio.sleep(10)
        yield scenario


@pytest.mark.parametrize("later", [0.0, 2.2, 3.7], ids=lambda later: f"{later} s after a beat")
@pytest.mark.parametrize("kubelets_too", [False, True])
@in_virtual_time
async def test_an_operator_without_contact_to_all_nodes_deletes_nothing(kubelets_too: bool, later: float) -> None:
    async with train_jobs(8, training_job("llama", replicas=6, spares=1)) as scenario:
        await asyncio.sleep(later)
        before, step = scenario.pods_and_generations(), scenario.workers.step
        scenario.workers.cut_off = True
        if kubelets_too:
            set_readiness(scenario.cluster, "Unknown")
        await asyncio.sleep(OBSERVATION_SECONDS)
        assert scenario.pods_and_generations() == before
        assert scenario.workers.step >= step + 500
        assert scenario.condition("NodesHealthy")["reason"] == "ContactLost"
        assert "7 of 7 workers are silent at once" in scenario.condition("NodesHealthy")["message"]
        assert sum("are silent at once" in note for note in scenario.event_messages()) == 1
        scenario.workers.cut_off = False
        set_readiness(scenario.cluster, "True")
        await asyncio.sleep(60)
        assert scenario.pods_and_generations() == before
        assert scenario.condition("NodesHealthy")["reason"] == "NodesHealthy"


@in_virtual_time
async def test_an_unreachable_zone_that_trains_loses_no_worker() -> None:
    async with train_jobs(10, training_job("llama", replicas=6, spares=3)) as scenario:
        before, step = scenario.pods_and_generations(), scenario.workers.step
        zone = {f"node-{number}" for number in range(0, 9, 3)}
        scenario.workers.muted_nodes = zone
        set_readiness(scenario.cluster, "Unknown", zone)
        await asyncio.sleep(OBSERVATION_SECONDS)
        assert scenario.pods_and_generations() == before
        assert scenario.workers.step >= step + 500
        assert scenario.condition("NodesHealthy")["reason"] == "ContactLost"


@in_virtual_time
async def test_stale_kubelet_leases_during_training_lose_no_worker() -> None:
    async with train_jobs(8, training_job("llama", replicas=6, spares=1)) as scenario:
        before, step = scenario.pods_and_generations(), scenario.workers.step
        set_readiness(scenario.cluster, "Unknown")
        await asyncio.sleep(OBSERVATION_SECONDS)
        assert scenario.pods_and_generations() == before
        assert scenario.workers.step >= step + 500


@pytest.mark.long
@in_virtual_time
async def test_unreachable_jobs_of_one_worker_lose_no_worker() -> None:
    async with train_jobs(12, *(training_job(f"job-{number}", replicas=1) for number in range(12))) as scenario:
        before = scenario.pods_and_generations()
        scenario.workers.cut_off = True
        set_readiness(scenario.cluster, "Unknown")
        await asyncio.sleep(OBSERVATION_SECONDS)
        assert scenario.pods_and_generations() == before


@in_virtual_time
async def test_a_failed_rack_is_replaced_once_the_others_hang() -> None:
    async with train_jobs(12, training_job("llama", replicas=6, spares=2)) as scenario:
        rack = [agent.node for agent in scenario.workers.members("llama")[:2]]
        for node in rack:
            lose_node(scenario.workers, node)
        step = scenario.workers.step
        await until(lambda: scenario.status("llama")["membership"]["generation"] == 2, "the spares take over", 12)
        await until(lambda: scenario.workers.step > step, "it trains on", 12)


def test_forced_deletions_are_limited_for_each_minute() -> None:
    now = 0.0
    bound = deletion_limit.ForceDeleteLimiter(lambda: now)
    for number in range(deletion_limit.MIN_DELETIONS):
        bound.permit(f"pod-{number}", 10)
    bound.permit("pod-0", 10)  # a repetition
    with pytest.raises(deletion_limit.ForceDeleteLimitError, match="8 pods were deleted by force within 60 s"):
        bound.permit("one-more", 10)
    bound.permit("of-many", 1000)
    now = deletion_limit.WINDOW_SECONDS
    bound.permit("one-more", 10)
