"""Health, metrics, kopf's settings, and the notifications between the parts."""

import asyncio
import getpass
import itertools

import aiohttp
import kopf
import pytest

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.api.objects import owner_reference, training_job
from tests.testing.api.token_issuer import ISSUER
from tests.testing.suite.virtual_time import in_virtual_time, run_pending_tasks
from tests.testing.virtual.fake_workers import lose_node
from tests.testing.virtual.operator_process import OperatorProcess, until, wall_clock
from tests.testing.virtual.replicas import Scenario
from trainium_operator import handlers
from trainium_operator.cluster.api.resources import CONFIG_MAPS, EVENTS, JOBS, NODES, PODS
from trainium_operator.endpoints.servers import Exposition, ProbeServer
from trainium_operator.plan.model.names import JobId
from trainium_operator.runtime import WATCH_STALE_SECONDS
from trainium_operator.settings import Settings


def test_kopf_posts_no_events_and_retries_without_end() -> None:
    settings = kopf.OperatorSettings()
    handlers.apply_settings(settings)
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.peering.standalone
    assert isinstance(settings.watching.server_timeout, int)
    assert settings.watching.client_timeout > settings.watching.server_timeout
    delays = list(itertools.islice(iter(settings.networking.error_backoffs), 50))
    assert all(0 < delay <= 15 for delay in delays)
    assert len(delays) == 50


def test_kopf_has_one_event_handler_and_no_finalizer() -> None:
    registry = handlers.make_registry(observe=lambda _raw, _deleted: None, client=None)
    assert len(list(registry._watching.get_all_handlers())) == 1
    assert not list(registry._changing.get_all_handlers())
    assert not list(registry._spawning.get_all_handlers())
    assert not list(registry._indexing.get_all_handlers())


async def test_kopf_starts_under_a_user_id_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """User 65532 of our image is in no password file."""

    def raise_unknown_uid() -> str:
        raise KeyError("getpwuid(): uid not found: 65532")

    monkeypatch.setattr(getpass, "getuser", raise_unknown_uid)
    registry = handlers.make_registry(observe=lambda _raw, _deleted: None, client=None)
    stop = asyncio.Event()
    stop.set()
    await handlers.run_kopf(registry, stop=stop, ready=asyncio.Event())


async def test_probes_and_metrics_are_served() -> None:
    problem = ""
    metrics = Exposition(lambda: b"x 1\n", lambda: 0.0)
    server = ProbeServer(live=lambda: problem, ready=lambda: "pods are not listed yet", metrics=metrics)
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/livez") as response:
            assert response.status == 200
        problem = "the watch of pods has been silent"
        async with session.get("/livez") as response:
            assert (response.status, await response.text()) == (503, problem + "\n")
        async with session.get("/readyz") as response:
            assert response.status == 503
        async with session.get("/metrics") as response:
            assert await response.text() == "x 1\n"
    await server.stop()


@in_virtual_time
async def test_a_replica_is_ready_once_all_kinds_are_listed_and_keys_are_read() -> None:
    cluster = FakeApiServer(wall_clock)
    process = OperatorProcess(cluster)
    runtime = process.runtime
    assert runtime.find_ready_problem() == "trainingjobs are not listed yet"
    await runtime.caches.jobs.refresh()
    assert "pods" in runtime.find_ready_problem()
    tasks = [asyncio.create_task(reflector.run()) for reflector in runtime.caches.list_reflectors()]
    await runtime.caches.wait_until_synced()
    assert runtime.find_ready_problem() == "the keys of ServiceAccount tokens are not read yet"
    await runtime.token_verifier.refresh()
    assert runtime.find_ready_problem() == ""
    assert not runtime.leading.is_set()
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, "start it with an https URL as --service-account-issuer"),
        (403, "may not get /.well-known/openid-configuration and /openid/v1/jwks, so no agent can register"),
        (429, "the keys of ServiceAccount tokens could not be read: GET /"),
    ],
)
@in_virtual_time
async def test_a_replica_without_keys_names_what_to_enable(status: int, sentence: str) -> None:
    cluster = FakeApiServer(wall_clock)
    verifier = OperatorProcess(cluster).runtime.token_verifier
    cluster.faults.append(lambda _method, path: http_error(status, "") if path in ISSUER.documents() else None)
    await verifier.refresh()
    assert sentence in verifier.problem
    assert not verifier.has_keys


@in_virtual_time
async def test_a_stale_watch_fails_liveness_and_an_outage_does_not() -> None:
    cluster = FakeApiServer(wall_clock)
    process = OperatorProcess(cluster)
    await process.start()
    await process.runtime.caches.wait_until_synced()
    assert process.runtime.find_live_problem() == ""
    for scope in process.runtime.caches.pods._scopes:
        scope.last_seen -= WATCH_STALE_SECONDS + 1
    assert "watch of pods" in process.runtime.find_live_problem()
    cluster.down = True
    cluster.drop_streams()
    await asyncio.sleep(WATCH_STALE_SECONDS + 60)
    assert process.runtime.find_live_problem() == ""
    await process.kill()


@in_virtual_time
async def test_only_changes_of_observed_fields_enqueue_a_job() -> None:
    cluster = FakeApiServer(wall_clock)
    cluster.add(NODES, {"metadata": {"name": "n"}, "spec": {}, "status": {}})
    job = cluster.add(JOBS, training_job("j"))
    owner = owner_reference("j", job["metadata"]["uid"])
    labels = {"trainium.dev/job-name": "j", "trainium.dev/role": "worker"}
    for resource, name in ((PODS, "j-w-0"), (CONFIG_MAPS, "j-config")):
        cluster.add(resource, {"metadata": {"name": name, "labels": labels, "ownerReferences": [owner]}})
    cluster.change(PODS, "default", "j-w-0", lambda raw: raw.update(spec={"nodeName": "n"}))
    process = OperatorProcess(cluster)
    runtime = process.runtime
    await runtime.caches.jobs.refresh()
    tasks = [asyncio.create_task(reflector.run()) for reflector in runtime.caches.list_reflectors()]
    await runtime.caches.wait_until_synced()
    await run_pending_tasks()

    async def take_key() -> bool:
        await run_pending_tasks()
        if len(runtime.queue) == 0:
            return False
        runtime.queue.mark_done(await runtime.queue.get())
        return True

    assert await take_key()
    cluster.change(PODS, "default", "j-w-0", lambda raw: raw["metadata"].update(annotations={"a": "b"}))
    assert not await take_key()
    cluster.change(PODS, "default", "j-w-0", lambda raw: raw.update(status={"phase": "Failed"}))
    assert await take_key()
    cluster.change(NODES, "", "n", lambda raw: raw["metadata"].update(labels={"a": "b"}))
    assert not await take_key()
    cluster.change(NODES, "", "n", lambda raw: raw["spec"].update(unschedulable=True))
    assert await take_key()
    cluster.remove(CONFIG_MAPS, "default", "j-config")
    assert await take_key()
    cluster.remove(PODS, "default", "j-w-0")
    assert await take_key()
    for task in tasks:
        task.cancel()


@in_virtual_time
async def test_an_invalid_job_is_reported_and_does_not_hide_others() -> None:
    cluster = FakeApiServer(wall_clock)
    broken = training_job("broken")
    broken["spec"]["workers"]["replicas"] = -1
    cluster.add(JOBS, broken)
    cluster.add(JOBS, training_job("good"))
    process = OperatorProcess(cluster)
    await process.start()
    await until(lambda: cluster.names(PODS) != [], "the good job's pods", 5)
    await run_pending_tasks()
    notes = [raw for key, raw in cluster.objects.items() if key[0] == EVENTS.plural]
    assert any(
        raw["reason"] == "Unreadable"
        and raw["involvedObject"]["name"] == "broken"
        and "workers.replicas" in raw["message"]
        for raw in notes
    )
    await process.kill()


@in_virtual_time
async def test_a_plan_that_raises_is_retried_with_backoff() -> None:
    cluster = FakeApiServer(wall_clock)
    cluster.add(JOBS, training_job("bad"))
    cluster.add(JOBS, training_job("good"))
    process = OperatorProcess(cluster)
    plan, calls = process.runtime.reconciler.plan, []

    def defective(observed):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if observed.job.name == "bad":
            calls.append(1)
            raise KeyError("defect")
        return plan(observed)

    process.runtime.reconciler.plan = defective
    await process.start()
    await until(lambda: cluster.names(PODS) != [], "the good job's pods", 5)
    await asyncio.sleep(60)
    assert 5 < len(calls) < 15
    assert b'reconcile_errors_total{error="Defect"}' in process.runtime.metrics.render()
    await process.kill()


@in_virtual_time
async def test_a_job_deleted_during_recovery_leaves_nothing() -> None:
    async with Scenario(training_job("one"), training_job("two"), nodes=6) as scenario:
        cluster = scenario.cluster

        def phase(name: str) -> str | None:
            return (cluster.get(JOBS, "default", name).get("status") or {}).get("phase")

        await until(lambda: phase("one") == phase("two") == "Running", "both run", 60)
        lose_node(scenario.workers, cluster.get(PODS, "default", "two-w-0")["spec"]["nodeName"])
        await asyncio.sleep(4.5)
        uid = cluster.get(JOBS, "default", "two")["metadata"]["uid"]
        cluster.remove(JOBS, "default", "two")  # while it recovers
        await asyncio.sleep(30)
        assert [name for name in cluster.names(PODS) if name.startswith("two")] == []
        assert scenario.process.runtime.state.get_published_generation(JobId("default", "two", uid)) == 0
        assert phase("one") == "Running"


@in_virtual_time
async def test_jobs_deleted_during_a_plan_leave_no_memory() -> None:
    async with Scenario(nodes=8) as scenario:
        cluster, process = scenario.cluster, scenario.process
        process.connection.latency = 0.5
        for at in range(12):
            name = f"job-{at}"
            cluster.add(JOBS, training_job(name))
            published = len(cluster.writes)

            def is_being_published(name: str = name, since: int = published) -> bool:
                done = cluster.writes[since:]
                return any(write.method == "POST" and f"{name}-membership" in str(write.body) for write in done)

            await until(is_being_published, "the membership is written", 60)
            cluster.remove(JOBS, "default", name)
            await asyncio.sleep(5)
        state, text = process.runtime.state, process.runtime.metrics.render().decode()
        assert state._jobs == {}
        assert state.count_agents() == 0
        assert 'trainingjob_operator_jobs{phase="Starting"} 0.0' in text
        assert 'trainingjob_operator_jobs{phase="Running"} 0.0' in text


@in_virtual_time
async def test_a_training_job_is_planned_twice_in_a_status_interval() -> None:
    async with Scenario(training_job()) as scenario:
        await scenario.wait_for_steps(seconds=60)
        await asyncio.sleep(60)
        before = _plans(scenario.process)
        await asyncio.sleep(100)
        plans = _plans(scenario.process) - before
    assert plans <= 42, "twice in each interval of 5 s, and a resync"


def _plans(process: OperatorProcess) -> float:
    text = process.runtime.metrics.render().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("trainingjob_operator_reconcile_seconds_count")]
    return float(line.split()[-1])


@in_virtual_time
async def test_metrics_have_phases_and_recoveries_without_job_labels() -> None:
    async with Scenario(training_job(spares=1), nodes=5, total_steps=60) as scenario:
        await scenario.wait_for_steps(seconds=60)
        lose_node(scenario.workers, scenario.cluster.get(PODS, "default", "llama-w-1")["spec"]["nodeName"])
        await until(lambda: scenario.status().get("phase") == "Completed", "the end", 300)
        await run_pending_tasks()
        text = scenario.process.runtime.metrics.render().decode()
    assert 'trainingjob_operator_jobs{phase="Completed"} 1.0' in text
    assert 'trainingjob_operator_jobs{phase="Running"} 0.0' in text
    assert 'trainingjob_operator_restarts_total{cause="NodeLost",response="Spare"} 1.0' in text
    assert 'trainingjob_operator_recovery_seconds_count{response="Spare"} 1.0' in text
    assert 'trainingjob_operator_jobs_finished_total{result="Complete"} 1.0' in text
    assert "llama" not in text


def test_the_coordinator_address_defaults_to_its_service() -> None:
    assert Settings().build_plan_settings("system").coordinator == "trainium-operator-coordinator.system.svc:8443"
    outside = Settings(coordinator_address="127.0.0.1:9", image_pull_secrets="a,b")
    assert outside.build_plan_settings("system").coordinator == "127.0.0.1:9"
    assert outside.build_plan_settings("system").image_pull_secrets == ("a", "b")
