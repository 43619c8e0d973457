"""Two releases of the operator in one cluster: each namespace is served by the one that registered first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.testing.api.fake_api_server import http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from tests.testing.virtual.replicas import Scenario
from trainium_operator.cluster import releases
from trainium_operator.cluster.api.resources import JOBS, LEASES
from trainium_operator.settings import Settings

EXPIRY_SECONDS = releases.RegistrationTimes().duration


class TwoReleases(Scenario):
    """A cluster with the release `system`, which serves a job, and further releases."""

    def __init__(self) -> None:
        super().__init__(training_job(spares=1), nodes=6)
        self.others: list[OperatorProcess] = []

    async def start_release(self, namespace: str, **settings: Any) -> OperatorProcess:
        process = OperatorProcess(
            self.cluster,
            identity=f"{namespace}-0",
            clock=wall_clock,
            settings=Settings(**settings),
            namespace=namespace,
        )
        self.others.append(process)
        await process.start()
        await process.runtime.leading.wait()
        return process

    def registered(self) -> list[str]:
        annotations = self.cluster.get(LEASES, releases.NAMESPACE, releases.NAME)["metadata"]["annotations"]
        return [entry.release for entry in releases.decode_registrations(annotations[releases.ANNOTATION])]


@asynccontextmanager
async def train() -> AsyncIterator[TwoReleases]:
    async with TwoReleases() as scenario:
        await until(lambda: scenario.status().get("phase") == "Running", "it trains", 120)
        try:
            yield scenario
        finally:
            for process in scenario.others:
                await process.kill()


@pytest.mark.parametrize("namespaces", ["", "default,research"])
@in_virtual_time
async def test_a_second_release_leaves_the_jobs_of_the_first_alone_and_names_it(namespaces: str) -> None:
    async with train() as scenario:
        pods, generation = scenario.pods(), scenario.status()["membership"]["generation"]
        second = await scenario.start_release("other", watch_namespaces=namespaces)
        await asyncio.sleep(600)
        assert (scenario.pods(), scenario.status()["membership"]["generation"]) == (pods, generation)
        assert [path for _, path, _ in second.connection.writes if "/default/" in path and "/events" not in path] == []
        notes = [note for note in scenario.event_messages() if "system/trainium-operator" in note]
        (note,) = notes
        assert "serves namespace default, and release other/trainium-operator does not" in note


@in_virtual_time
async def test_a_release_for_all_namespaces_serves_what_no_earlier_one_does() -> None:
    async with train() as scenario:
        await scenario.start_release("research", watch_namespaces="research")
        await scenario.process.kill()
        await asyncio.sleep(EXPIRY_SECONDS + 15)
        await scenario.start_release("all")
        assert scenario.registered() == ["research/trainium-operator", "all/trainium-operator"]
        _, everywhere = scenario.others
        assert everywhere.runtime.releases.find_server("default") == ""
        assert everywhere.runtime.releases.find_server("research") == "research/trainium-operator"


@in_virtual_time
async def test_only_the_first_release_that_is_to_taint_nodes_does() -> None:
    async with TwoReleases() as scenario:
        first = await scenario.start_release("red", watch_namespaces="red", taint_nodes=True)
        second = await scenario.start_release("blue", watch_namespaces="blue", taint_nodes=True)
        assert (first.runtime.releases.may_taint(), second.runtime.releases.may_taint()) == (True, False)
        assert not scenario.process.runtime.releases.may_taint(), "it is not to"
        await first.kill()
        await asyncio.sleep(EXPIRY_SECONDS + 15)
        assert second.runtime.releases.may_taint()


@in_virtual_time
async def test_the_second_release_serves_once_the_first_is_uninstalled() -> None:
    async with train() as scenario:
        second = await scenario.start_release("other")
        await asyncio.sleep(30)
        await scenario.process.stop()
        scenario.cluster.add(JOBS, training_job("later", replicas=1))
        await asyncio.sleep(EXPIRY_SECONDS - 15)
        assert not scenario.status("later"), "the first release may only be restarting"
        await until(lambda: bool(scenario.status("later").get("phase")), "the second release serves", 40)
        assert scenario.registered() == ["other/trainium-operator"]
        scenario.workers.operator = second


@in_virtual_time
async def test_a_release_whose_entry_was_removed_ends_and_registers_behind_the_other() -> None:
    async with train() as scenario:
        second = await scenario.start_release("other")
        scenario.cluster.change(
            LEASES,
            releases.NAMESPACE,
            releases.NAME,
            lambda raw: raw["metadata"]["annotations"].update({releases.ANNOTATION: "[]"}),
        )
        await asyncio.sleep(30)
        assert scenario.process.ended.is_set()
        assert second.ended.is_set()


@in_virtual_time
async def test_a_release_that_cannot_renew_writes_nothing_before_another_may_serve() -> None:
    async with train() as scenario:
        second = await scenario.start_release("other")
        scenario.cluster.faults.append(
            lambda method, path: (
                http_error(503, "ServiceUnavailable") if method == "PUT" and path.endswith(releases.NAME) else None
            )
        )
        await asyncio.sleep(EXPIRY_SECONDS - 10)
        assert not scenario.process.runtime.releases.may_write()
        assert not second.runtime.releases.may_write()


@in_virtual_time
async def test_a_release_without_the_right_to_register_serves_alone() -> None:
    async with TwoReleases() as scenario:
        scenario.cluster.faults.append(
            lambda _, path: http_error(403, "Forbidden", "no right") if path.endswith(releases.NAME) else None
        )
        await until(lambda: scenario.status().get("phase") == "Running", "it trains", 120)
        assert scenario.process.runtime.releases.may_write()
