"""The fleet reconcile on an API server in virtual time: memory, release, conflicts, restarts, taints, followers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.testing.api.fake_api_server import FakeApiServer, Write, http_error
from tests.testing.api.objects import training_job
from tests.testing.suite.virtual_time import in_virtual_time
from tests.testing.virtual.operator_process import until, wall_clock
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import CONFIG_MAPS, JOBS, NODES, PODS
from trainium_operator.cluster.cache.caches import make_caches
from trainium_operator.cluster.fleet.fleet_reconciler import POLL_SECONDS, FleetReconciler
from trainium_operator.cluster.fleet.fleet_record import decode
from trainium_operator.plan.fleet.memory import MachineState, Memory
from trainium_operator.plan.model.names import TAINT_QUARANTINED
from trainium_operator.settings import Settings

MEMORY = "trainium-operator-quarantine"
FRACTION = 0.0006
"""Seconds; times of real failures have fractions of a millisecond too."""


class FleetReplica:
    """The part of an operator process that reconciles the fleet."""

    def __init__(self, cluster: FakeApiServer, *, taints: bool = False) -> None:
        self.cluster = cluster
        self.leading = asyncio.Event()
        self.changes = 0
        self.api = api = Api(cluster)
        self.caches = make_caches(api, Settings())
        self.fleet = FleetReconciler(
            api,
            self.caches,
            self.leading,
            namespace="system",
            name=MEMORY,
            may_taint=lambda: taints,
            wall_clock=wall_clock,
            on_change=self._count_change,
        )
        self._tasks: list[asyncio.Task[Any]] = []

    def _count_change(self) -> None:
        self.changes += 1

    async def start(self, *, leading: bool = True) -> None:
        await self.caches.jobs.refresh()
        self._tasks = [asyncio.create_task(reflector.run()) for reflector in self.caches.list_reflectors()]
        self._tasks += [asyncio.create_task(self._watch_jobs()), asyncio.create_task(self.fleet.run())]
        await self.caches.wait_until_synced()
        if leading:
            await self.fleet.prime()
            self.leading.set()

    async def _watch_jobs(self) -> None:
        jobs = self.caches.jobs
        version = await jobs.refresh()
        while True:
            async for event in self.api.watch(JOBS, resource_version=version, seconds=3600, silence=7200):
                jobs.observe(event["object"], deleted=event["type"] == "DELETED")
            version = await jobs.refresh()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def create_cluster(nodes: int = 10) -> FakeApiServer:
    cluster = FakeApiServer(wall_clock)
    cluster.add(JOBS, training_job("llama"))
    witness = training_job("witness")
    cluster.add(JOBS, {**witness, "metadata": {**witness["metadata"], "namespace": "elsewhere"}})
    for number in range(nodes):
        cluster.add(
            NODES,
            {
                "metadata": {"name": f"node-{number}"},
                "spec": {"providerID": f"aws:///i-{number}", "taints": [{"key": "foreign", "effect": "NoSchedule"}]},
                "status": {
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "allocatable": {"aws.amazon.com/neuron": "16"},
                },
            },
        )
    return cluster


@asynccontextmanager
async def running_replica(
    cluster: FakeApiServer | None = None, *, taints: bool = False, leading: bool = True
) -> AsyncIterator[tuple[FakeApiServer, FleetReplica]]:
    cluster = cluster or create_cluster()
    replica = FleetReplica(cluster, taints=taints)
    await replica.start(leading=leading)
    yield cluster, replica
    await replica.stop()


def report_failure(cluster: FakeApiServer, node: str) -> None:
    """Report a failure from jobs of two namespaces, which confirms it."""

    def change(raw: dict[str, Any]) -> None:
        status = raw.setdefault("status", {})
        status.setdefault("failures", []).append(
            {"at": wall_clock() - FRACTION, "cause": "Device", "pod": "p", "node": node}
        )

    for namespace, name in (("default", "llama"), ("elsewhere", "witness")):
        if (JOBS.plural, namespace, name) in cluster.objects:
            cluster.change(JOBS, namespace, name, change)


def set_condition(kind: str, status: str) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        others = [condition for condition in raw["status"]["conditions"] if condition["type"] != kind]
        raw["status"]["conditions"] = [*others, {"type": kind, "status": status, "reason": "Why"}]

    return change


def memory(cluster: FakeApiServer) -> Memory:
    return decode(cluster.get(CONFIG_MAPS, "system", MEMORY)["data"])


def taints(cluster: FakeApiServer, node: str) -> dict[str, str]:
    return {taint["key"]: taint.get("value", "") for taint in cluster.get(NODES, "", node)["spec"]["taints"]}


def writes(cluster: FakeApiServer) -> list[Write]:
    return [write for write in cluster.writes if "events" not in write.path]


@in_virtual_time
async def test_a_fault_quarantines_its_node_within_a_second() -> None:
    async with running_replica() as (cluster, replica):
        await asyncio.sleep(1)
        report_failure(cluster, "node-3")
        await until(lambda: replica.fleet.view.quarantined == {"node-3"}, "the node in quarantine", 1)
        assert replica.changes == 1
        assert memory(cluster).machines["aws:///i-3"].state is MachineState.QUARANTINED
        await asyncio.sleep(3610)
        assert replica.fleet.view.quarantined == frozenset()


@in_virtual_time
async def test_a_bad_node_is_written_only_for_a_strike() -> None:
    async with running_replica() as (cluster, replica):
        await asyncio.sleep(1)
        before = len(writes(cluster))
        cluster.change(NODES, "", "node-3", set_condition("NetworkingReady", "False"))
        await until(lambda: replica.fleet.view.quarantined == {"node-3"}, "the node to be avoided", 1)
        assert len(writes(cluster)) == before
        cluster.change(NODES, "", "node-4", set_condition("NeuronHealth", "True"))
        await until(lambda: replica.fleet.view.quarantined == {"node-3", "node-4"}, "the second too", 1)
        assert len(writes(cluster)) == before + 1


@in_virtual_time
async def test_an_idle_fleet_is_written_once() -> None:
    async with running_replica() as (cluster, replica):
        await asyncio.sleep(600)
        assert [write.path.rpartition("/")[2] for write in writes(cluster)] == ["configmaps"], "created, once"
        assert replica.changes == 0


@in_virtual_time
async def test_followers_do_not_act() -> None:
    async with running_replica(leading=False) as (cluster, _replica):
        report_failure(cluster, "node-3")
        await asyncio.sleep(60)
        assert writes(cluster) == []


@in_virtual_time
async def test_a_new_leader_reads_the_quarantine_before_its_first_plan() -> None:
    async with running_replica() as (cluster, first):
        report_failure(cluster, "node-3")
        await until(lambda: first.fleet.view.quarantined == {"node-3"}, "the node in quarantine", 1)
    cluster.remove(JOBS, "default", "llama")
    async with running_replica(cluster) as (_, second):
        assert second.fleet.view.quarantined == {"node-3"}
        await asyncio.sleep(60)
        assert len(memory(cluster).machines["aws:///i-3"].strikes) == 1


@pytest.mark.parametrize("write", range(1, 5))
@in_virtual_time
async def test_the_next_leader_completes_the_writes_of_a_killed_one(write: int) -> None:
    cluster = create_cluster()
    first = FleetReplica(cluster, taints=True)
    writes_done = 0

    def kill_at_write(_: Write) -> None:
        nonlocal writes_done
        writes_done += 1
        if writes_done == write:
            cluster.faults.append(lambda _method, _path: http_error(503, "ServiceUnavailable"))
            for task in first._tasks:
                task.cancel()

    cluster.after_write = kill_at_write
    await first.start()
    report_failure(cluster, "node-3")
    await asyncio.sleep(2)
    report_failure(cluster, "node-5")
    await asyncio.sleep(2)
    cluster.faults.clear()
    cluster.after_write = lambda _: None
    await first.stop()
    async with running_replica(cluster, taints=True) as (_, second):
        await asyncio.sleep(POLL_SECONDS + 1)
        assert second.fleet.view.quarantined == {"node-3", "node-5"}
        assert {len(entry.strikes) for entry in memory(cluster).machines.values()} == {1}
        for node in ("node-3", "node-5"):
            assert taints(cluster, node) == {"foreign": "", TAINT_QUARANTINED: "Device"}


@in_virtual_time
async def test_a_taint_that_another_client_removes_each_time_is_written_again_with_pauses() -> None:
    async with running_replica(taints=True) as (cluster, _):

        def remove(_: object) -> None:
            if TAINT_QUARANTINED in taints(cluster, "node-3"):
                cluster.change(NODES, "", "node-3", lambda raw: raw["spec"].update(taints=[]))

        cluster.after_write = remove
        report_failure(cluster, "node-3")
        await asyncio.sleep(10 * POLL_SECONDS)
        written = [write for write in cluster.writes if write.path.endswith("/nodes/node-3")]
        assert 5 <= len(written) <= 12


@in_virtual_time
async def test_a_node_is_released_by_deleting_its_entry() -> None:
    async with running_replica(taints=True) as (cluster, replica):
        report_failure(cluster, "node-3")
        await until(lambda: TAINT_QUARANTINED in taints(cluster, "node-3"), "the taint", 2)
        cluster.change(CONFIG_MAPS, "system", MEMORY, lambda raw: raw["data"].pop("aws.i-3"))
        await until(lambda: replica.fleet.view.quarantined == frozenset(), "the release", POLL_SECONDS + 1)
        await until(lambda: taints(cluster, "node-3") == {"foreign": ""}, "the taint is removed", 1)
        await asyncio.sleep(100)
        assert memory(cluster).machines == {}, "a failure counts once"


@in_virtual_time
async def test_a_deleted_memory_is_recreated_empty() -> None:
    async with running_replica() as (cluster, replica):
        report_failure(cluster, "node-3")
        await until(lambda: replica.fleet.view.quarantined == {"node-3"}, "the node in quarantine", 1)
        cluster.remove(CONFIG_MAPS, "system", MEMORY)
        await until(lambda: replica.fleet.view.quarantined == frozenset(), "the release", POLL_SECONDS + 1)
        await asyncio.sleep(30)
        assert memory(cluster).machines == {}


@in_virtual_time
async def test_a_concurrent_change_of_the_memory_is_merged() -> None:
    async with running_replica() as (cluster, replica):
        await asyncio.sleep(1)
        text = "machine: aws:///i-7\nstate: Permanent\n"
        pending = [True]

        def change_memory(method: str, path: str) -> None:
            if method == "PUT" and path.endswith(MEMORY) and pending:
                pending.clear()
                cluster.change(CONFIG_MAPS, "system", MEMORY, lambda raw: raw["data"].update(mine=text))

        cluster.faults.append(change_memory)
        report_failure(cluster, "node-3")
        await until(lambda: replica.fleet.view.quarantined == {"node-3", "node-7"}, "both", 2)
        assert set(memory(cluster).machines) == {"aws:///i-3", "aws:///i-7"}


@in_virtual_time
async def test_quarantine_continues_while_the_memory_cannot_be_written() -> None:
    async with running_replica() as (cluster, replica):
        report_failure(cluster, "node-3")
        await until(lambda: replica.fleet.view.quarantined == {"node-3"}, "the node in quarantine", 1)
        cluster.faults.append(lambda _method, path: http_error(500, "Internal") if path.endswith(MEMORY) else None)
        cluster.change(NODES, "", "node-4", set_condition("NeuronHealth", "True"))
        await until(lambda: replica.fleet.view.quarantined == {"node-3", "node-4"}, "the second too", 30)
        cluster.faults.clear()
        await until(lambda: set(memory(cluster).machines) == {"aws:///i-3", "aws:///i-4"}, "both remembered", 30)


@in_virtual_time
async def test_a_machine_is_recognised_under_another_node_name() -> None:
    async with running_replica() as (cluster, replica):
        await asyncio.sleep(1)
        node = cluster.get(NODES, "", "node-3")
        cluster.remove(NODES, "", "node-3")
        await asyncio.sleep(1)
        report_failure(cluster, "node-3")
        await asyncio.sleep(1)
        cluster.add(NODES, {**node, "metadata": {"name": "fresh"}})
        await until(lambda: replica.fleet.view.quarantined == {"fresh"}, "the same machine", 1)


@in_virtual_time
async def test_a_plan_sees_bad_nodes_and_the_freeze_together() -> None:
    async with running_replica() as (cluster, replica):
        await asyncio.sleep(1)
        frozen: list[str] = []
        assert replica.caches.nodes is not None
        replica.caches.nodes.store.listen(lambda *_: frozen.append(replica.fleet.get_current_view().frozen[:13]))
        for number in range(4):
            cluster.change(NODES, "", f"node-{number}", set_condition("NeuronHealth", "True"))
        await until(lambda: len(frozen) == 4, "events of the nodes", 0.1)
        assert frozen == ["", "", "3 of 10 nodes", "4 of 10 nodes"]


@in_virtual_time
async def test_nodes_are_tainted_only_when_enabled() -> None:
    async with running_replica() as (cluster, _replica):
        report_failure(cluster, "node-3")
        await asyncio.sleep(60)
        assert not [write for write in cluster.writes if "/nodes/" in write.path]


@in_virtual_time
async def test_quarantine_works_without_the_right_to_patch_nodes() -> None:
    async with running_replica(taints=True) as (cluster, replica):
        cluster.faults.append(
            lambda method, path: http_error(403, "Forbidden") if method == "PATCH" and "/nodes/" in path else None
        )
        report_failure(cluster, "node-3")
        await until(lambda: replica.fleet.view.quarantined == {"node-3"}, "the node in quarantine", 1)
        report_failure(cluster, "node-4")
        await until(lambda: "node-4" in replica.fleet.view.quarantined, "the next one too", 10)


@in_virtual_time
async def test_only_nodes_with_devices_or_workers_are_the_fleet() -> None:
    cluster = create_cluster(0)
    for number in range(4):
        cluster.add(NODES, {"metadata": {"name": f"node-{number}"}, "spec": {}, "status": {}})
    labels = {"trainium.dev/job-name": "llama", "trainium.dev/role": "worker"}
    pod = {"metadata": {"name": "llama-w-0", "labels": labels}, "spec": {"nodeName": "node-0"}}
    cluster.add(PODS, pod)
    async with running_replica(cluster) as (_, replica):
        await asyncio.sleep(1)
        assert replica.fleet.view.frozen == "", "the only node of the fleet is bad"


@in_virtual_time
async def test_nodes_observed_during_a_write_are_kept() -> None:
    async with running_replica() as (cluster, replica):
        await asyncio.sleep(1)
        api, has_frozen = replica.fleet.api, asyncio.Event()

        class SlowApi:
            def __getattr__(self, name: str) -> Any:
                return getattr(api, name)

            async def replace(self, *arguments: Any) -> Any:
                written = await api.replace(*arguments)
                for number in range(4, 8):
                    cluster.change(NODES, "", f"node-{number}", set_condition("Ready", "False"))
                await until(lambda: replica.fleet.get_current_view().frozen, "too many bad nodes", 1)
                has_frozen.set()
                return written

        replica.fleet.api = SlowApi()
        report_failure(cluster, "node-3")
        await until(has_frozen.is_set, "the write of the memory", 2)
        for _ in range(50):
            assert replica.fleet.get_current_view().frozen
            await asyncio.sleep(0.005)
