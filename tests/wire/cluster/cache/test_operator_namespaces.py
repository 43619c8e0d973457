"""Namespaces served by name: a forbidden or deleted one affects no other, and its pods count as unknown."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.fake_workers import Workers
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from tests.testing.virtual.replicas import Scenario
from trainium_operator.cluster.api.resources import JOBS, PODS
from trainium_operator.cluster.cache.namespaces import ListState, Namespaces
from trainium_operator.settings import Settings

SERVED = Settings(watch_namespaces="red,blue")


class Rights:
    """Roles of the operator in each namespace, which can be revoked for all or some kinds."""

    def __init__(self, cluster: FakeApiServer) -> None:
        self.missing: dict[str, tuple[str, ...]] = {}
        self.requests: list[str] = []
        cluster.faults.append(self._judge)

    def _judge(self, _method: str, path: str) -> Any:
        self.requests.append(path)
        parts = path.strip("/").split("/")
        if "namespaces" not in parts:
            kinds = {"pods", "configmaps", "trainingjobs", "poddisruptionbudgets"}
            return http_error(403, "Forbidden", "no right in all namespaces") if parts[-1] in kinds else None
        at = parts.index("namespaces")
        namespace, kind = parts[at + 1], parts[at + 2] if len(parts) > at + 2 else ""
        refused = namespace in self.missing and (not self.missing[namespace] or kind in self.missing[namespace])
        return http_error(403, "Forbidden", f"no right in {namespace}") if refused else None

    def revoke(self, cluster: FakeApiServer, namespace: str, *kinds: str) -> None:
        """Revoke rights as the deletion of a Role does; open streams end."""
        self.missing[namespace] = kinds
        cluster.drop_streams()


def build_job(name: str, namespace: str) -> dict[str, Any]:
    raw = training_job(name)
    raw["metadata"]["namespace"] = namespace
    return raw


@asynccontextmanager
async def scenario(
    *, missing: tuple[str, ...] = ()
) -> AsyncIterator[tuple[FakeApiServer, Rights, OperatorProcess, Workers]]:
    scenario_run = Scenario(
        *(build_job(f"{name}-job", name) for name in ("red", "blue", "grey")), nodes=9, settings=SERVED
    )
    rights = Rights(scenario_run.cluster)
    rights.missing = dict.fromkeys(missing, ())
    async with scenario_run:
        yield scenario_run.cluster, rights, scenario_run.process, scenario_run.workers


def reports_steps(workers: Workers, name: str) -> Callable[[], bool]:
    before = workers.steps.get(name, 0)
    return lambda: workers.steps.get(name, 0) > before + 5


def pods(cluster: FakeApiServer, namespace: str) -> list[tuple[str, str]]:
    return [(name, cluster.get(PODS, namespace, name)["metadata"]["uid"]) for name in cluster.names(PODS, namespace)]


@in_virtual_time
async def test_only_listed_namespaces_are_read() -> None:
    async with scenario() as (cluster, rights, process, workers):
        await until(reports_steps(workers, "red-job"), "red trains", 60)
        await until(reports_steps(workers, "blue-job"), "blue trains", 60)
        await asyncio.sleep(700)
        assert "status" not in cluster.get(JOBS, "grey", "grey-job")
        assert cluster.names(PODS, "grey") == []
        assert not [path for path in rights.requests if "/namespaces/grey/" in path]
        assert not [path for path in rights.requests if path.endswith("/v1/pods")], "nothing is asked of all namespaces"
        assert process.runtime.caches.namespaces.count_by_state()[ListState.LISTED] == 2


@in_virtual_time
async def test_a_forbidden_namespace_is_served_once_it_can_be_read() -> None:
    async with scenario(missing=("blue",)) as (cluster, rights, process, workers):
        await until(reports_steps(workers, "red-job"), "red trains", 60)
        await process.runtime.token_verifier.refresh()
        assert process.runtime.find_ready_problem() == ""
        assert process.runtime.caches.namespaces.count_by_state() == {
            ListState.LISTED: 1,
            ListState.FORBIDDEN: 1,
            ListState.UNKNOWN: 0,
        }
        assert b'trainingjob_operator_namespaces{state="Forbidden"} 1.0' in process.runtime._render_metrics()
        assert "status" not in cluster.get(JOBS, "blue", "blue-job")
        requests = len(rights.requests)
        await asyncio.sleep(120)
        refused = [path for path in rights.requests[requests:] if "/namespaces/blue/" in path]
        watches = 7  # jobs, pods of three roles, ConfigMaps, budgets, Services
        assert len(refused) < watches * 120 / 7, "asked again with growing pauses"
        assert process.runtime.find_live_problem() == ""
        del rights.missing["blue"]
        await until(reports_steps(workers, "blue-job"), "blue trains", 60)


@in_virtual_time
async def test_a_namespace_with_unreadable_pods_is_not_planned() -> None:
    async with scenario() as (cluster, rights, process, workers):
        await until(reports_steps(workers, "blue-job"), "blue trains", 60)
        present = pods(cluster, "blue")
        rights.revoke(cluster, "blue", "pods")
        await asyncio.sleep(30)
        assert not process.runtime.caches.namespaces.is_synced("blue")
        cluster.change(JOBS, "blue", "blue-job", lambda raw: raw["spec"]["workers"].update(replicas=3))
        await asyncio.sleep(300)
        assert pods(cluster, "blue") == present, "pods that cannot be listed are not treated as deleted"
        assert reports_steps(workers, "red-job")() is False
        await until(reports_steps(workers, "red-job"), "red trains on", 60)
        await until(reports_steps(workers, "blue-job"), "blue trains on by itself", 60)
        rights.missing.clear()
        await until(lambda: len(pods(cluster, "blue")) == 3, "the third worker", 60)
        status = cluster.get(JOBS, "blue", "blue-job")["status"]
        assert status["restarts"]["total"] == 0
        assert [pod for pod in pods(cluster, "blue") if pod in present] == present


@in_virtual_time
async def test_silence_counts_from_the_opening_of_a_namespace() -> None:
    async with scenario() as (cluster, rights, process, workers):
        await until(reports_steps(workers, "blue-job"), "blue trains", 60)
        present = pods(cluster, "blue")
        nodes = {cluster.get(PODS, "blue", name)["spec"]["nodeName"] for name, _ in present}
        rights.revoke(cluster, "blue")
        workers.muted_nodes = nodes  # a coordinator answers no pod that it does not know
        await process.kill()
        second = OperatorProcess(cluster, identity="operator-1", settings=SERVED)
        workers.operator = second
        await second.start()
        await until(second.runtime.leading.is_set, "it leads without blue", 60)
        await asyncio.sleep(120)
        rights.missing.clear()
        await until(lambda: second.runtime.caches.namespaces.is_synced("blue"), "blue opens", 60)
        opened = wall_clock()
        await asyncio.sleep(6)  # longer than a member may be silent
        record = second.runtime.caches.jobs.store.get(("blue", "blue-job"))
        assert record is not None
        assert record.view is not None
        observed = second.runtime.reconciler.observer.observe(record.view)
        assert observed.coordinator_since > opened - 1, "their silence counts from now on"
        workers.muted_nodes = set()
        await asyncio.sleep(60)
        assert second.runtime.caches.namespaces.is_synced("blue")
        assert pods(cluster, "blue") == present, "no worker was given up for its silence"
        assert cluster.get(JOBS, "blue", "blue-job")["status"]["restarts"]["total"] == 0
        await second.kill()


@in_virtual_time
async def test_jobs_of_a_recreated_namespace_wait_for_the_list_of_pods() -> None:
    async with scenario() as (cluster, rights, process, workers):
        await until(reports_steps(workers, "blue-job"), "blue trains", 60)
        rights.revoke(cluster, "blue")  # the Role may go before the jobs do
        await asyncio.sleep(5)
        cluster.remove(JOBS, "blue", "blue-job")
        await asyncio.sleep(60)
        assert process.runtime.caches.jobs.store.get(("blue", "blue-job")) is not None, "unknown, not gone"
        uid = cluster.add(JOBS, build_job("blue-job", "blue"))["metadata"]["uid"]
        rights.missing["blue"] = ("pods",)  # the rights to the kinds return one after the other
        await asyncio.sleep(60)
        assert pods(cluster, "blue") == [], "its jobs wait for the list of their pods"
        rights.missing.clear()
        await until(lambda: cluster.get(JOBS, "blue", "blue-job").get("status", {}).get("phase") == "Running", "on", 90)
        record = process.runtime.caches.jobs.store.get(("blue", "blue-job"))
        assert record is not None
        assert record.uid == uid
        await until(reports_steps(workers, "red-job"), "red trains on", 60)


def test_a_namespace_is_open_while_every_kind_is_listed() -> None:
    opened: list[str] = []
    served = Namespaces(("red", "blue"), clock=lambda: 7.0)
    served.listen(opened.append)
    for kind in ("pods", "configmaps"):
        served.add_kind(kind)
    served.record("pods", "red", ListState.LISTED)
    assert not served.is_synced("red")
    served.record("configmaps", "red", ListState.LISTED)
    assert (served.is_synced("red"), served.get_sync_time("red"), served.is_synced("blue")) == (True, 7.0, False)
    served.record("pods", "red", ListState.LISTED)
    assert opened == ["red"], "logged once"
    served.record("pods", "red", ListState.FORBIDDEN, "403")
    served.record("configmaps", "red", ListState.FORBIDDEN, "403")
    served.record("pods", "red", ListState.LISTED)
    assert not served.is_synced("red")
    served.record("configmaps", "red", ListState.LISTED)
    assert opened == ["red", "red"]
    assert not served.is_synced("grey"), "nor is a namespace that is not served"
