"""The real plan, executor and caches against a fake API server: the operator may die after any write."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_kubernetes import FakeCluster, Write
from operator_process import OperatorProcess, Workers, lose_node, training_job, until, wall_clock
from virtual_time import run_virtual

from trainium_operator.cluster.resources import CONFIG_MAPS, EVENTS, JOBS


class Story:
    """A job that starts, loses the node of one member, and finishes; the operator dies after write `n`."""

    def __init__(self, die_after_write: int | None) -> None:
        self.cluster = FakeCluster(wall_clock)
        self.cluster.graceful_pods = True
        self.memberships: dict[int, set[str]] = {}
        self.pod_names: list[str] = []
        self.statuses: list[dict] = []
        self.die_after_write = die_after_write
        self.process: OperatorProcess
        self.workers: Workers

    def status(self) -> dict:
        return self.cluster.get(JOBS, "default", "llama").get("status") or {}

    def observe(self, write: Write) -> None:
        if write.status >= 400:
            return
        if write.method == "POST" and write.path.endswith("/pods"):
            self.pod_names.append(write.body["metadata"]["name"])
        if "membership" in write.path or (write.body or {}).get("metadata", {}).get("name") == "llama-membership":
            raw = self.cluster.get(CONFIG_MAPS, "default", "llama-membership")["data"]["membership.json"]
            self.memberships.setdefault(json.loads(raw)["generation"], set()).add(raw)
        if write.path.endswith("/status"):
            self.statuses.append(self.status())

    async def supervise(self) -> None:
        """What the kubelet does with the operator's container."""
        while True:
            await self.process.connection.killed.wait()
            await self.process.kill()
            await asyncio.sleep(2)
            self.process = OperatorProcess(self.cluster)
            self.workers.operator = self.process
            await self.process.start()

    async def run(self) -> int:
        self.workers = Workers(self.cluster, nodes=5, total_steps=40)
        self.cluster.after_write = self.observe
        self.cluster.add(JOBS, training_job(replicas=2, spares=1))
        self.process = OperatorProcess(self.cluster, die_after_write=self.die_after_write)
        self.workers.operator = self.process
        tasks = [asyncio.create_task(self.workers.run())]
        await self.process.start()
        tasks.append(asyncio.create_task(self.supervise()))
        await until(lambda: self.workers.step >= 10, 120, "ten steps")
        record = self.cluster.get(CONFIG_MAPS, "default", "llama-membership")["data"]["membership.json"]
        lose_node(self.workers, json.loads(record)["members"][1]["nodeName"])
        await until(lambda: self.workers.step >= 20, 120, "ten more after the loss of a node")
        await until(lambda: self.status().get("phase") == "Completed", 240, "the end")
        await asyncio.sleep(5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writes = self.process.connection.writes
        await self.process.kill()
        return writes


def check(story: Story) -> None:
    status = story.status()
    assert status["phase"] == "Completed"
    assert all(len(contents) == 1 for contents in story.memberships.values()), "one generation, two memberships"
    assert sorted(story.memberships) == list(range(1, max(story.memberships) + 1))
    assert len(story.pod_names) == len(set(story.pod_names)), "a pod's name was used twice"
    generations = [each.get("membership", {}).get("generation", 0) for each in story.statuses]
    assert generations == sorted(generations)
    assert status["restarts"]["total"] == 1
    assert [each["rung"] for each in status["history"]] == ["Spare"]


def test_a_job_trains_through_the_loss_of_a_node_without_any_needless_write() -> None:
    story = Story(None)
    writes = run_virtual(story.run())
    check(story)
    assert sorted(story.memberships) == [1, 2]
    applied = [write for write in story.cluster.writes if write.path.endswith("configmaps/llama-config")]
    assert len(applied) == 1
    conflicts = [write for write in story.cluster.writes if write.status >= 400]
    assert conflicts == []
    assert writes < 60, "status is written when something happened, not all the time"
    reasons = [raw["reason"] for key, raw in story.cluster.objects.items() if key[0] == EVENTS.plural]
    assert "Completed" in reasons


@pytest.mark.parametrize("write", range(1, 27))
def test_the_operator_may_die_after_any_write(write: int) -> None:
    story = Story(write)
    run_virtual(story.run())
    check(story)
