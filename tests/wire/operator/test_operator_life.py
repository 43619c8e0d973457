"""The end of jobs, their disruption budgets and vanishing namespaces, against the API server's semantics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.api.fake_kubernetes import FakeCluster, refuse
from tests.testing.suite.virtual_time import run_virtual
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, training_job, until, wall_clock
from trainium_operator.cluster.api.resources import CONFIG_MAPS, DISRUPTION_BUDGETS, JOBS, PODS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.testing.api.fake_kubernetes import Write


class Story:
    """One job, its workers and an operator."""

    def __init__(self, spec: dict[str, Any] | None) -> None:
        self.cluster = FakeCluster(wall_clock)
        self.cluster.graceful_pods = True
        job = training_job(replicas=2)
        job["spec"].update(spec or {})
        self.cluster.add(JOBS, job)
        self.workers = Workers(self.cluster, nodes=4, total_steps=40)
        self.process = OperatorProcess(self.cluster)
        self.workers.operator = self.process

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get(JOBS, "default", "llama").get("status") or {}
        return found

    def writes(self, method: str, part: str) -> list[Write]:
        return [write for write in self.cluster.writes if method in write.method and part in write.path]

    async def trained(self) -> None:
        await until(lambda: self.workers.step >= 5, 120, "five steps")

    async def ended(self) -> None:
        await until(lambda: self.status().get("phase") == "Completed", 240, "the end")


def told(run: Callable[[Story], Awaitable[None]], spec: dict[str, Any] | None = None) -> Story:
    async def whole() -> Story:
        story = Story(spec)
        running = asyncio.create_task(story.workers.run())
        await story.process.start()
        try:
            await run(story)
        finally:
            running.cancel()
            await story.process.kill()
        return story

    return run_virtual(whole())


def jobs(story: Story) -> list[str]:
    return story.cluster.names(JOBS)


def test_a_job_with_a_ttl_is_deleted_with_all_that_it_owns_and_only_as_it_was_seen() -> None:
    async def run(story: Story) -> None:
        await story.ended()
        version = story.cluster.get(JOBS, "default", "llama")["metadata"]["resourceVersion"]
        await asyncio.sleep(50)
        assert jobs(story) == ["llama"]
        await asyncio.sleep(20)
        assert jobs(story) == []
        (write,) = story.writes("DELETE", "trainingjobs")
        assert write.body["preconditions"]["resourceVersion"] >= version
        assert write.body["preconditions"]["uid"]
        await asyncio.sleep(30)

    story = told(run, {"ttlSecondsAfterFinished": 60})
    for resource in (PODS, CONFIG_MAPS, DISRUPTION_BUDGETS):
        assert story.cluster.names(resource) == []
    assert len(story.writes("DELETE", "trainingjobs")) == 1


def test_a_job_that_is_changed_in_the_moment_of_its_deletion_is_looked_at_anew() -> None:
    async def run(story: Story) -> None:
        await story.ended()

        def keep(method: str, path: str) -> Any:
            if method == "DELETE" and "trainingjobs" in path:
                story.cluster.faults.clear()
                story.cluster.change(
                    JOBS, "default", "llama", lambda raw: raw["spec"].update(ttlSecondsAfterFinished=6000)
                )
                return refuse(409, "Conflict", "the ResourceVersion in the precondition does not match")
            return None

        story.cluster.faults.append(keep)
        await asyncio.sleep(120)
        assert jobs(story) == ["llama"]

    told(run, {"ttlSecondsAfterFinished": 60})


def test_the_disruption_budget_comes_with_the_first_step_and_is_not_written_again() -> None:
    async def run(story: Story) -> None:
        await story.trained()
        await until(lambda: story.cluster.names(DISRUPTION_BUDGETS) == ["llama"], 30, "the budget")
        budget = story.cluster.get(DISRUPTION_BUDGETS, "default", "llama")
        assert budget["spec"]["minAvailable"] == 1
        assert budget["apiVersion"] == "policy/v1"
        await story.ended()

    storage = {"checkpoint": {"storage": {"hostPath": {"path": "/fsx"}}}}
    story = told(run, storage)
    assert len(story.writes("POST", "poddisruptionbudgets")) == 1
    assert story.writes("PATCH", "poddisruptionbudgets") == []


def test_in_a_namespace_that_is_being_deleted_the_operator_does_not_insist() -> None:
    async def run(story: Story) -> None:
        await story.trained()

        def terminating(method: str, path: str) -> Any:
            new = method == "POST" and "/namespaces/default/" in path
            message = "unable to create new content in namespace default because it is being terminated"
            return refuse(403, "Forbidden", message) if new else None

        story.cluster.faults.append(terminating)
        before = len(story.writes("", "/namespaces/default/"))
        # The namespace controller deletes kind by kind, in any order; here the job is the last to go.
        for name in story.cluster.names(PODS):
            story.cluster.remove(PODS, "default", name)
        for name in story.cluster.names(CONFIG_MAPS):
            story.cluster.remove(CONFIG_MAPS, "default", name)
        for name in story.cluster.names(DISRUPTION_BUDGETS):
            story.cluster.remove(DISRUPTION_BUDGETS, "default", name)
        await asyncio.sleep(120)
        refused = len(story.writes("", "/namespaces/default/")) - before
        assert refused < 60, "refused writes are repeated with growing pauses"
        story.cluster.remove(JOBS, "default", "llama")
        await asyncio.sleep(30)
        quiet = len(story.writes("", "/namespaces/default/"))
        await asyncio.sleep(60)
        assert len(story.writes("", "/namespaces/default/")) == quiet

    story = told(run)
    assert story.cluster.names(PODS) == []


@pytest.mark.parametrize("wipe", ["phase", "conditions", "history"])
def test_a_status_that_cannot_be_read_any_more_is_put_in_order_and_training_goes_on(wipe: str) -> None:
    async def run(story: Story) -> None:
        await story.trained()
        story.cluster.change(JOBS, "default", "llama", lambda raw: raw["status"].update({wipe: "nonsense"}))
        step = story.workers.step
        await until(lambda: story.workers.step > step + 5, 60, "more steps")
        await story.ended()
        assert isinstance(story.status()["conditions"], list)

    told(run)
