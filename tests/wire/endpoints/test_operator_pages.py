"""Pages of jobs over TLS: rights of readers, requests to the API server, and hostile content."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.testing.api.fake_api_server import FakeApiServer, http_error
from tests.testing.api.objects import owner_reference, worker_pod
from tests.testing.api.recorded_jobs import NOW, recorded_object
from tests.testing.operator.endpoints import EndpointsFixture, run_endpoints
from tests.testing.page.html_page import Page
from tests.testing.virtual.operator_process import OperatorProcess
from trainium_contract.pages.live import HEADERS
from trainium_operator.cluster import job_pages
from trainium_operator.cluster.api.client import Api
from trainium_operator.cluster.api.resources import CONFIG_MAPS, EVENTS, JOBS, PODS
from trainium_operator.cluster.cache.caches import make_caches
from trainium_operator.cluster.job_pages import JobPageData
from trainium_operator.settings import Settings

ANN = {"username": "ann", "uid": "", "groups": ["system:authenticated"]}
EVERYTHING = {
    ("trainingjobs", "get"),
    ("trainingjobs", "list"),
    ("pods", "list"),
    ("configmaps", "get"),
    ("events", "list"),
}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def allow_in_team(rights: set[tuple[str, str]], user: str = "ann") -> Any:
    def is_allowed(spec: dict[str, Any]) -> bool:
        attributes = spec.get("resourceAttributes") or {}
        right = (attributes.get("resource"), attributes.get("verb"))
        return bool(spec["user"] == user and attributes.get("namespace") == "team" and right in rights)

    return is_allowed


def add_recorded_jobs(cluster: FakeApiServer) -> None:
    """Add the recorded job with its pods, membership and events, and a job of another namespace."""
    job = recorded_object("job")
    uid = job["metadata"]["uid"]
    cluster.add(JOBS, job)
    cluster.add(JOBS, {**job, "metadata": {**job["metadata"], "namespace": "other", "name": "secret", "uid": "other"}})
    cluster.add(CONFIG_MAPS, recorded_object("membership"))
    for name, node in (("llama-w-0", "node-2"), ("llama-w-2", "node-1"), ("llama-w-3", "node-4")):
        cluster.add(PODS, worker_pod(name, owner=owner_reference(uid=uid), node=node, namespace="team"))
    for event in recorded_object("events")["items"]:
        cluster.add(EVENTS, event)


@asynccontextmanager
async def run_pages(rights: set[tuple[str, str]] = EVERYTHING) -> AsyncIterator[EndpointsFixture]:
    cluster = FakeApiServer()
    add_recorded_jobs(cluster)
    caches = make_caches(Api(cluster), Settings())
    await asyncio.gather(*(cache.refresh() for cache in (caches.jobs, caches.pods, caches.config_maps)))
    page_data: list[JobPageData] = []

    def create_page_data(endpoints: EndpointsFixture) -> JobPageData:
        page_data.append(JobPageData(Api(cluster), caches, lambda: endpoints.now))
        return page_data[0]

    async with run_endpoints(cluster, jobs=create_page_data) as endpoints:
        endpoints.now = NOW
        cluster.tokens["ann"] = ANN
        cluster.may = allow_in_team(rights)
        page_data[0].sample()
        cluster.requests.clear()
        yield endpoints


async def get_page(
    endpoints: EndpointsFixture, session: aiohttp.ClientSession, path: str, token: str = "ann"
) -> tuple[int, str]:
    return await endpoints.get(session, token, path)


async def test_a_reader_with_all_rights_sees_the_complete_page() -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        status, text = await get_page(endpoints, session, "/ui/team/llama")
        page = Page(text)
        assert (status, page.open) == (200, [])
        for words in ("team/llama", "Running", "node-4", "Who trains (generation 2)", "Where the time went",
                      "Interruptions", "GenerationStarted", "members: 2 Running; others: 1 Running"):  # fmt: skip
            assert words in page.text, words
        assert "Not shown" not in page.text
        specs = [write.body["spec"] for write in endpoints.cluster.writes if "spec" in write.body]
        reviewed = [spec["resourceAttributes"] for spec in specs if "resourceAttributes" in spec]
        get = {"verb": "get", "namespace": "team"}
        assert {**get, "group": "trainium.dev", "resource": "trainingjobs", "name": "llama"} in reviewed
        assert {**get, "resource": "configmaps", "name": "llama-membership"} in reviewed


@pytest.mark.parametrize(
    ("missing", "hidden", "sentence"),
    [
        (("pods", "list"), "1 Running", "workers: you may not list pods in namespace team"),
        (
            ("configmaps", "get"),
            "Who trains",
            "who trains: you may not get configmaps llama-membership in namespace team",
        ),
        (("events", "list"), "GenerationStarted", "events: you may not list events in namespace team"),
    ],
)
async def test_a_part_without_its_right_is_left_out_and_named(
    missing: tuple[str, str], hidden: str, sentence: str
) -> None:
    async with run_pages(EVERYTHING - {missing}) as endpoints, endpoints.session() as session:
        status, text = await get_page(endpoints, session, "/ui/team/llama")
        shown = Page(text).text
        assert status == 200
        assert sentence in shown
        assert hidden not in shown
        if missing[0] == "events":
            assert not [path for _, path in endpoints.cluster.requests if path.endswith("/events")]


async def test_a_reader_without_the_right_cannot_see_whether_a_job_exists() -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        sentence = "ann may not get trainingjobs.trainium.dev secret in namespace other\n"
        assert await get_page(endpoints, session, "/ui/other/secret") == (403, sentence)
        status, text = await get_page(endpoints, session, "/ui/other/nothing")
        assert (status, "may not get" in text) == (403, True)
        assert (await get_page(endpoints, session, "/ui/team/llama", "tenant"))[0] == 403
        assert (await get_page(endpoints, session, "/ui/team/llama", "forged"))[0] == 401
        assert (await get_page(endpoints, session, "/ui/team/llama", ""))[0] == 401
        assert (await get_page(endpoints, session, "/ui/team/nothing")) == (
            404,
            "there is no TrainingJob nothing in namespace team\n",
        )


async def test_the_list_has_the_jobs_that_its_reader_may_list() -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        for path in ("/ui/team", "/ui?namespace=team"):
            status, text = await get_page(endpoints, session, path)
            page = Page(text)
            assert status == 200
            assert ("href", "/ui/team/llama") in page.attributes
            assert "secret" not in page.text
        status, text = await get_page(endpoints, session, "/ui")
        assert status == 403
        assert "ann may not list trainingjobs.trainium.dev in all namespaces" in Page(text).text
        assert ("action", "/ui") in Page(text).attributes
        endpoints.cluster.may = lambda _spec: True
        endpoints.now += 6
        assert "secret" in Page((await get_page(endpoints, session, "/ui"))[1]).text


@pytest.mark.parametrize(
    "path", ["/ui/..%2fmetrics", "/ui/team/%22%3E%3Cscript%3E", "/ui/TEAM", "/ui/a/b/c", "/ui/team/"]
)
async def test_an_invalid_name_is_404_and_not_echoed(path: str) -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        status, text = await get_page(endpoints, session, path)
        assert status == 404
        assert "script" not in text


async def test_a_page_has_security_headers_and_is_read_only() -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        async with session.get("/ui/team/llama", headers={"Authorization": "Bearer ann"}) as response:
            assert HEADERS.items() <= response.headers.items()
            assert "unsafe" not in response.headers["Content-Security-Policy"]
            assert response.headers["Cache-Control"] == "no-store"
            assert response.headers["Content-Encoding"] == "gzip"
        for method in ("post", "put", "delete", "patch"):
            async with session.request(method, "/ui/team/llama", headers={"Authorization": "Bearer ann"}) as response:
                assert response.status == 405


async def test_markup_in_status_and_events_is_escaped() -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        job = {"kind": "TrainingJob", "name": "llama", "uid": recorded_object("job")["metadata"]["uid"]}
        hostile = {"involvedObject": job, "reason": HOSTILE, "message": HOSTILE, "type": "Normal"}
        endpoints.cluster.add(EVENTS, {"metadata": {"name": "hostile", "namespace": "team"}, **hostile})
        page = Page((await get_page(endpoints, session, "/ui/team/llama"))[1])
        assert page.text.count("alert(1)") == 2
        assert page.tags.count("script") == 1, "the script of the page, whose digest the policy has"
        assert "img" not in page.tags


async def test_a_page_is_rendered_once_for_many_readers() -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        answers = [
            await asyncio.gather(*(get_page(endpoints, session, "/ui/team/llama") for _ in range(10))) for _ in range(3)
        ]
        assert len({text for responses in answers for _, text in responses}) == 1
        assert [path for method, path in endpoints.cluster.requests if method == "GET"] == [
            "/api/v1/namespaces/team/events"
        ]
        assert sorted(endpoints.reviews) == ["subjectaccessreviews"] * 4 + ["tokenreviews"]
        for _ in range(3):
            endpoints.now += job_pages.EVENTS_SECONDS
            await get_page(endpoints, session, "/ui/team/llama")
        assert len([path for method, path in endpoints.cluster.requests if method == "GET"]) == 4


async def test_a_page_is_not_shared_with_readers_of_fewer_rights() -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        assert "node-4" in (await get_page(endpoints, session, "/ui/team/llama"))[1]
        endpoints.cluster.tokens["bob"] = {**ANN, "username": "bob"}
        ann, bob = allow_in_team(EVERYTHING), allow_in_team({("trainingjobs", "get")}, "bob")
        endpoints.cluster.may = lambda spec: ann(spec) or bob(spec)
        shown = Page((await get_page(endpoints, session, "/ui/team/llama", "bob"))[1]).text
        assert "node-4" not in shown.partition("Interruptions")[0]
        assert "GenerationStarted" not in shown
        assert shown.count("you may not") == 3


async def test_refused_parts_do_not_rate_limit_their_reader() -> None:
    """An open page polls every few seconds; only requests for whole pages count as unauthenticated tries."""
    async with run_pages({("trainingjobs", "get")}) as endpoints, endpoints.session() as session:
        for _ in range(30):
            assert (await get_page(endpoints, session, "/ui/team/llama"))[0] == 200
            endpoints.now += 6


async def test_a_known_reader_sees_the_job_without_events_during_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        assert (await get_page(endpoints, session, "/ui/team/llama"))[0] == 200
        monkeypatch.setattr(job_pages, "EVENTS_TIMEOUT_SECONDS", 0.2)
        endpoints.cluster.faults.append(
            lambda _method, path: http_error(503, "Unavailable") if "/events" in path else None
        )
        endpoints.now += 20
        shown = Page((await get_page(endpoints, session, "/ui/team/llama"))[1]).text
        assert "events: no answer" in shown
        assert "Running" in shown


async def test_the_loss_curve_follows_the_job() -> None:
    cluster = FakeApiServer()
    add_recorded_jobs(cluster)
    caches = make_caches(Api(cluster), Settings())
    page_data = JobPageData(Api(cluster), caches, lambda: NOW)
    for step, loss in ((10, 5.0), (20, 4.0), (30, 3.0), (15, 4.5), (15, 4.5)):
        progress = {"step": step, "loss": loss}
        cluster.change(JOBS, "team", "llama", lambda raw, new=progress: raw["status"]["progress"].update(new))
        await caches.jobs.refresh()
        page_data.sample()
    render = page_data.prepare_report("team", "llama", pods=True, members=True)
    assert render is not None
    report = render(now=NOW, events=(), notes=())
    assert [(point.step, point.loss) for point in report.curve] == [(10, 5.0), (15, 4.5)]
    assert "2026-11-23" in report.curve_note
    cluster.remove(JOBS, "team", "llama")
    await caches.jobs.refresh()
    page_data.sample()
    assert page_data.prepare_report("team", "llama", pods=True, members=True) is None
    assert len(page_data._curves) == 1, "the curve of the other job"


async def test_curves_are_kept_of_a_limited_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_pages, "MAX_CURVES", 3)
    cluster = FakeApiServer()
    for number in range(5):
        job = recorded_object("job")
        job["metadata"].update(name=f"job-{number}", uid=f"uid-{number}")
        cluster.add(JOBS, job)
    caches = make_caches(Api(cluster), Settings())
    await caches.jobs.refresh()
    page_data = JobPageData(Api(cluster), caches, lambda: NOW)
    page_data.sample()
    assert len(page_data._curves) == 3


async def test_unmanaged_and_unreadable_jobs_have_pages() -> None:
    async with run_pages() as endpoints, endpoints.session() as session:
        job = recorded_object("job")
        for name, change in (("theirs", {"managedBy": "kueue.x-k8s.io/multikueue"}), ("newer", {"workers": 7})):
            metadata = {"name": name, "namespace": "team", "uid": name}
            endpoints.cluster.add(JOBS, {**job, "metadata": metadata, "spec": {**job["spec"], **change}})
        await endpoints.server._pages._jobs._caches.jobs.refresh()  # type: ignore[union-attr,attr-defined]
        assert (
            "kueue.x-k8s.io/multikueue controls this job" in (await get_page(endpoints, session, "/ui/team/theirs"))[1]
        )
        assert "the job cannot be read: workers" in (await get_page(endpoints, session, "/ui/team/newer"))[1]
        listed = Page((await get_page(endpoints, session, "/ui/team"))[1]).text
        assert "kueue.x-k8s.io/multikueue controls it" in listed


async def test_pages_are_served_only_when_enabled() -> None:
    runtime = OperatorProcess(FakeApiServer(), settings=Settings(ui=True, ui_service="pages")).runtime
    assert runtime.readers is not None
    assert runtime.job_page_data is not None
    assert {"pages.system.svc", "trainium-operator-coordinator.system.svc"} <= set(runtime.certificate_keeper._names)
    plain = OperatorProcess(FakeApiServer(), settings=Settings()).runtime
    assert (plain.readers, plain.job_page_data) == (None, None)
