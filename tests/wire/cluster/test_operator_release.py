"""Lease and memory of bad machines go with the operator's Deployment: what owns them, and what never does."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.api.fake_kubernetes import FakeCluster, refuse
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from trainium_operator.cluster.api.resources import CONFIG_MAPS, DEPLOYMENTS, LEASES, SECRETS
from trainium_operator.cluster.release import AGAIN_SECONDS, POLL_SECONDS, REFUSED_SECONDS
from trainium_operator.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAME = "trainium-operator"
MEMORY = f"{NAME}-quarantine"
OURS = {(LEASES.plural, NAME), (CONFIG_MAPS.plural, MEMORY)}
SOMEBODY = {"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "theirs"}


def installed(**fields: Any) -> FakeCluster:
    cluster = FakeCluster(wall_clock)
    cluster.add(SECRETS, {"metadata": {"name": f"{NAME}-coordinator-tls", "namespace": "system"}})
    cluster.add(DEPLOYMENTS, {"metadata": {"name": NAME, "namespace": "system", "uid": "first", **fields}})
    return cluster


@asynccontextmanager
async def operated(cluster: FakeCluster, *, identity: str = "operator-0", **more: Any) -> AsyncIterator[None]:
    process = OperatorProcess(cluster, identity=identity, settings=Settings(**{"deployment": NAME, **more}))
    await process.runtime.keeper.refresh(write=True)
    await process.start()
    try:
        await until(process.runtime.leading.is_set, 60, "leading")
        yield
    finally:
        await process.kill()


def there(cluster: FakeCluster) -> set[tuple[str, str]]:
    return {(key[0], key[2]) for key in cluster.objects} & OURS


def owners(cluster: FakeCluster) -> dict[tuple[str, str], list[Any]]:
    found = {key: cluster.objects[key[0], "system", key[1]]["metadata"] for key in there(cluster)}
    return {key: [each["uid"] for each in metadata.get("ownerReferences") or []] for key, metadata in found.items()}


def both(*uids: str) -> dict[tuple[str, str], list[str]]:
    return {key: [*uids] for key in OURS}


@in_virtual_time
async def test_both_go_with_the_deployment() -> None:
    cluster = installed()
    async with operated(cluster):
        await until(lambda: owners(cluster) == both("first"), 30, "both are owned")
        renewed = cluster.get(LEASES, "system", NAME)["spec"]["renewTime"]
        await until(lambda: cluster.get(LEASES, "system", NAME)["spec"]["renewTime"] > renewed, 30, "renewed")
        assert owners(cluster) == both("first"), "a renewal keeps the owner"
    cluster.remove(DEPLOYMENTS, "system", NAME)
    assert there(cluster) == set()


@in_virtual_time
async def test_what_an_operator_that_is_being_uninstalled_makes_again_is_owned_from_the_beginning() -> None:
    cluster = installed()
    async with operated(cluster):
        await until(lambda: owners(cluster) == both("first"), 30, "both are owned")
        made: list[Any] = []
        cluster.after_write = lambda write: made.append(write) if write.method == "POST" else None
        cluster.remove(DEPLOYMENTS, "system", NAME)
        await until(lambda: there(cluster) == OURS, 60, "the process goes on for a while, and makes both again")
        bodies = [write.body for write in made if write.path.rpartition("/")[2] in ("leases", "configmaps")]
        assert [[each["uid"] for each in body["metadata"]["ownerReferences"]] for body in bodies] == [["first"]] * 2


@in_virtual_time
async def test_objects_of_a_version_that_named_no_owner_are_adopted_and_keep_what_is_in_them() -> None:
    cluster = installed()
    async with operated(cluster, deployment=""):
        await until(lambda: there(cluster) == OURS, 30, "both are there")
        assert owners(cluster) == both()
    remembered = {"i-1": "machine: i-1\nstate: Permanent\n"}
    cluster.change(CONFIG_MAPS, "system", MEMORY, lambda raw: raw["data"].update(remembered))
    cluster.change(LEASES, "system", NAME, lambda raw: raw["metadata"].update(ownerReferences=[SOMEBODY]))
    async with operated(cluster):
        await until(lambda: owners(cluster)[CONFIG_MAPS.plural, MEMORY] == ["first"], 60, "adopted")
        assert owners(cluster)[LEASES.plural, NAME] == ["theirs", "first"]
        assert "Permanent" in cluster.get(CONFIG_MAPS, "system", MEMORY)["data"]["i-1"]


@in_virtual_time
async def test_a_deployment_that_was_made_again_takes_the_place_of_the_one_before() -> None:
    cluster = installed()
    async with operated(cluster):
        await until(lambda: owners(cluster) == both("first"), 30, "both are owned")
    raw = cluster.objects.pop((DEPLOYMENTS.plural, "system", NAME))
    cluster.add(DEPLOYMENTS, {"metadata": {**raw["metadata"], "uid": "second"}})
    async with operated(cluster):
        await until(lambda: owners(cluster) == both("second"), 60, "both are the new one's")


@in_virtual_time
async def test_the_memory_stays_where_that_is_asked_for_and_goes_when_it_no_longer_is() -> None:
    cluster = installed()
    async with operated(cluster):
        await until(lambda: owners(cluster) == both("first"), 30, "both are owned")
    async with operated(cluster, keep_memory=True):
        await until(lambda: owners(cluster)[CONFIG_MAPS.plural, MEMORY] == [], 60, "let go")
    raw = cluster.get(DEPLOYMENTS, "system", NAME)
    cluster.remove(DEPLOYMENTS, "system", NAME)
    assert there(cluster) == {(CONFIG_MAPS.plural, MEMORY)}
    cluster.add(DEPLOYMENTS, {"metadata": {**raw["metadata"], "uid": "second"}})
    async with operated(cluster):
        await until(lambda: owners(cluster) == both("second"), 60, "taken back")


@pytest.mark.parametrize("refused", ["GET /apis/apps/v1", f"PUT /api/v1/namespaces/system/configmaps/{MEMORY}"])
@in_virtual_time
async def test_without_the_right_they_stay_and_are_logged_once(refused: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = installed()
    method, _, path = refused.partition(" ")
    async with operated(cluster, deployment=""):
        await until(lambda: there(cluster) == OURS, 30, "both are there")
    cluster.faults.append(
        lambda asked, where: refuse(403, "you may not") if asked == method and where.startswith(path) else None
    )
    async with operated(cluster):
        await asyncio.sleep(5 * REFUSED_SECONDS)
        assert owners(cluster)[CONFIG_MAPS.plural, MEMORY] == []
        assert cluster.get(LEASES, "system", NAME)["spec"]["holderIdentity"] == "operator-0"
    warnings = [
        each.getMessage() for each in caplog.records if "stay when the operator is uninstalled" in each.getMessage()
    ]
    assert len(warnings) == 1
    assert "you may not" in warnings[0]


@in_virtual_time
async def test_once_both_are_owned_the_api_server_is_asked_again_after_minutes_only() -> None:
    cluster = installed()
    async with operated(cluster):
        await until(lambda: owners(cluster) == both("first"), 30, "both are owned")
        await asyncio.sleep(2 * AGAIN_SECONDS)
        before = len([each for each in cluster.requests if "/apis/apps/" in each[1]])
        await asyncio.sleep(POLL_SECONDS - 3 * AGAIN_SECONDS)
        assert len([each for each in cluster.requests if "/apis/apps/" in each[1]]) == before
        cluster.change(CONFIG_MAPS, "system", MEMORY, lambda raw: raw["metadata"].update(ownerReferences=[]))
        await until(lambda: owners(cluster) == both("first"), POLL_SECONDS + 30, "taken back")
