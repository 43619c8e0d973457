"""Owners of the Lease and of the quarantine memory, which are deleted with the operator's Deployment."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from trainium_operator.cluster.api.resources import CONFIG_MAPS, DEPLOYMENTS, LEASES, SECRETS
from trainium_operator.cluster.owner_references import POLL_SECONDS, REFUSAL_RETRY_SECONDS, RETRY_SECONDS
from trainium_operator.settings import Settings

NAME = "trainium-operator"
MEMORY = f"{NAME}-quarantine"
OURS = {(LEASES.plural, NAME), (CONFIG_MAPS.plural, MEMORY)}
FOREIGN_OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "theirs", "uid": "theirs"}


def installed_cluster(**fields: Any) -> FakeApiServer:
    cluster = FakeApiServer(wall_clock)
    cluster.add(SECRETS, {"metadata": {"name": f"{NAME}-coordinator-tls", "namespace": "system"}})
    cluster.add(DEPLOYMENTS, {"metadata": {"name": NAME, "namespace": "system", "uid": "first", **fields}})
    return cluster


@asynccontextmanager
async def running_operator(cluster: FakeApiServer, **more: Any) -> AsyncIterator[None]:
    process = OperatorProcess(cluster, identity="operator-0", settings=Settings(**{"deployment": NAME, **more}))
    await process.runtime.certificate_keeper.refresh(write=True)
    await process.start()
    try:
        await until(process.runtime.leading.is_set, "leading", 60)
        yield
    finally:
        await process.kill()


def existing_objects(cluster: FakeApiServer) -> set[tuple[str, str]]:
    return {(key[0], key[2]) for key in cluster.objects} & OURS


def owners(cluster: FakeApiServer) -> dict[tuple[str, str], list[Any]]:
    metadata_by_key = {key: cluster.objects[key[0], "system", key[1]]["metadata"] for key in existing_objects(cluster)}
    return {
        key: [owner["uid"] for owner in metadata.get("ownerReferences") or []]
        for key, metadata in metadata_by_key.items()
    }


def owned_by(*uids: str) -> dict[tuple[str, str], list[str]]:
    return {key: [*uids] for key in OURS}


@in_virtual_time
async def test_lease_and_memory_are_deleted_with_the_deployment() -> None:
    cluster = installed_cluster()
    async with running_operator(cluster):
        await until(lambda: owners(cluster) == owned_by("first"), "both are owned", 30)
        renewed = cluster.get(LEASES, "system", NAME)["spec"]["renewTime"]
        await until(lambda: cluster.get(LEASES, "system", NAME)["spec"]["renewTime"] > renewed, "renewed", 30)
        assert owners(cluster) == owned_by("first"), "a renewal keeps the owner"
    cluster.remove(DEPLOYMENTS, "system", NAME)
    assert existing_objects(cluster) == set()


@in_virtual_time
async def test_objects_recreated_during_an_uninstall_have_their_owner() -> None:
    cluster = installed_cluster()
    async with running_operator(cluster):
        await until(lambda: owners(cluster) == owned_by("first"), "both are owned", 30)
        made: list[Any] = []
        cluster.after_write = lambda write: made.append(write) if write.method == "POST" else None
        cluster.remove(DEPLOYMENTS, "system", NAME)
        await until(
            lambda: existing_objects(cluster) == OURS, "the process continues for a while and creates both again", 60
        )
        bodies = [write.body for write in made if write.path.rpartition("/")[2] in ("leases", "configmaps")]
        assert [[owner["uid"] for owner in body["metadata"]["ownerReferences"]] for body in bodies] == [["first"]] * 2


@in_virtual_time
async def test_objects_without_an_owner_are_adopted_with_their_content() -> None:
    cluster = installed_cluster()
    async with running_operator(cluster, deployment=""):
        await until(lambda: existing_objects(cluster) == OURS, "both are there", 30)
        assert owners(cluster) == owned_by()
    remembered = {"i-1": "machine: i-1\nstate: Permanent\n"}
    cluster.change(CONFIG_MAPS, "system", MEMORY, lambda raw: raw["data"].update(remembered))
    cluster.change(LEASES, "system", NAME, lambda raw: raw["metadata"].update(ownerReferences=[FOREIGN_OWNER]))
    async with running_operator(cluster):
        await until(lambda: owners(cluster)[CONFIG_MAPS.plural, MEMORY] == ["first"], "adopted", 60)
        assert owners(cluster)[LEASES.plural, NAME] == ["theirs", "first"]
        assert "Permanent" in cluster.get(CONFIG_MAPS, "system", MEMORY)["data"]["i-1"]


@in_virtual_time
async def test_a_recreated_deployment_becomes_the_owner() -> None:
    cluster = installed_cluster()
    async with running_operator(cluster):
        await until(lambda: owners(cluster) == owned_by("first"), "both are owned", 30)
    raw = cluster.objects.pop((DEPLOYMENTS.plural, "system", NAME))
    cluster.add(DEPLOYMENTS, {"metadata": {**raw["metadata"], "uid": "second"}})
    async with running_operator(cluster):
        await until(lambda: owners(cluster) == owned_by("second"), "both belong to the new release", 60)


@in_virtual_time
async def test_keep_memory_removes_the_owner_of_the_memory() -> None:
    cluster = installed_cluster()
    async with running_operator(cluster):
        await until(lambda: owners(cluster) == owned_by("first"), "both are owned", 30)
    async with running_operator(cluster, keep_memory=True):
        await until(lambda: owners(cluster)[CONFIG_MAPS.plural, MEMORY] == [], "let go", 60)
    raw = cluster.get(DEPLOYMENTS, "system", NAME)
    cluster.remove(DEPLOYMENTS, "system", NAME)
    assert existing_objects(cluster) == {(CONFIG_MAPS.plural, MEMORY)}
    cluster.add(DEPLOYMENTS, {"metadata": {**raw["metadata"], "uid": "second"}})
    async with running_operator(cluster):
        await until(lambda: owners(cluster) == owned_by("second"), "both are adopted again", 60)


@pytest.mark.parametrize("refused", ["GET /apis/apps/v1", f"PUT /api/v1/namespaces/system/configmaps/{MEMORY}"])
@in_virtual_time
async def test_a_missing_right_is_logged_once(refused: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = installed_cluster()
    method, _, path = refused.partition(" ")
    async with running_operator(cluster, deployment=""):
        await until(lambda: existing_objects(cluster) == OURS, "both are there", 30)
    cluster.faults.append(
        lambda asked, where: http_error(403, "you may not") if asked == method and where.startswith(path) else None
    )
    async with running_operator(cluster):
        await asyncio.sleep(5 * REFUSAL_RETRY_SECONDS)
        assert owners(cluster)[CONFIG_MAPS.plural, MEMORY] == []
        assert cluster.get(LEASES, "system", NAME)["spec"]["holderIdentity"] == "operator-0"
    warnings = [
        record.getMessage()
        for record in caplog.records
        if "stay when the operator is uninstalled" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "you may not" in warnings[0]


@in_virtual_time
async def test_owned_objects_are_checked_every_few_minutes() -> None:
    cluster = installed_cluster()
    async with running_operator(cluster):
        await until(lambda: owners(cluster) == owned_by("first"), "both are owned", 30)
        await asyncio.sleep(2 * RETRY_SECONDS)
        before = len([request for request in cluster.requests if "/apis/apps/" in request[1]])
        await asyncio.sleep(POLL_SECONDS - 3 * RETRY_SECONDS)
        assert len([request for request in cluster.requests if "/apis/apps/" in request[1]]) == before
        cluster.change(CONFIG_MAPS, "system", MEMORY, lambda raw: raw["metadata"].update(ownerReferences=[]))
        await until(lambda: owners(cluster) == owned_by("first"), "both are adopted again", POLL_SECONDS + 30)
