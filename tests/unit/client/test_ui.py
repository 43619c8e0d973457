"""`kubectl trn ui`: responses, access control and cost of its server, and a real browser."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.testing.api.recorded_jobs import CORE, JOBS, RecordedApiServer, recorded_object, recorded_responses
from tests.testing.page.browser import CHROMIUM, browser
from tests.testing.page.html_page import Page
from tests.testing.suite.timeouts import until
from trainium_client.api import Api
from trainium_client.commands import pages
from trainium_client.commands.main import main
from trainium_client.commands.pages import LocalPages
from trainium_client.commands.ui_server import UiServer
from trainium_contract.api_server.connection import Connection
from trainium_contract.api_server.errors import ClientError
from trainium_contract.api_server.kubeconfig import find_access
from trainium_contract.views.curve import read_curve

HOSTILE = '"><script>document.title="hacked"</script><img src=x onerror=alert(2)>'


class UiHarness:
    """The server of `ui` with recorded responses and a clock that tests set."""

    def __init__(self, api: RecordedApiServer) -> None:
        self.api = api
        self.now = 0.0
        local = LocalPages(self.open_api, "/secret", monotonic=lambda: self.now)
        self.server = UiServer(local, "secret", "/team/llama")

    def open_api(self) -> Api:
        return Api(Connection(find_access(str(self.api.kubeconfig), None, {})), "team")

    def get(self, path: str, method: str = "GET", host: str = "") -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        connection.request(method, path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text, dict(response.headers)

    def count_requests(self, part: str) -> int:
        return sum(part in path for _, path, _ in self.api.requests)


@contextmanager
def run_ui(api: RecordedApiServer) -> Iterator[UiHarness]:
    harness = UiHarness(api)
    thread = threading.Thread(target=harness.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield harness
    finally:
        harness.server.shutdown()
        until(
            lambda: not any(result.is_querying for result in harness.server.pages._results.values()),
            "all reads have ended",
        )
        harness.server.server_close()
        thread.join()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[UiHarness]:
    with RecordedApiServer(recorded_responses(), tmp_path).running() as api, run_ui(api) as harness:
        yield harness


def test_job_and_list_pages_link_to_each_other(harness: UiHarness) -> None:
    harness.api.answers["/apis/trainium.dev/v1alpha1/trainingjobs"] = harness.api.answers[JOBS]
    status, text, headers = harness.get("/secret/team/llama")
    page = Page(text)
    assert (status, page.open) == (200, [])
    assert "script-src 'sha256-" in headers["Content-Security-Policy"]
    assert ("href", "/secret/team") in page.attributes
    for words in ("team/llama", "Who trains", "members: 2 Running; others: 1 Running", "Interruptions", "Recovered"):
        assert words in page.text, words
    for path in ("/secret/team", "/secret", "/secret/"):
        listed = Page(harness.get(path)[1])
        assert ("href", "/secret/team/llama") in listed.attributes
        assert "Failed" in listed.text


def test_requests_without_the_secret_or_of_another_host_are_refused(harness: UiHarness) -> None:
    for path in ("/", "/team/llama", "/wrong/team/llama", "/secretteam", "/favicon.ico", "/secret/a/b/c"):
        status, text, _ = harness.get(path)
        assert (status, "llama" in text) == (404, False), path
    assert harness.get("/secret/team/llama", host="evil.example")[0] == 403
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert harness.get("/secret/team/llama", method)[0] == 501
    assert not harness.api.requests


def test_the_ticket_of_the_browser_is_valid_once(harness: UiHarness) -> None:
    ticket = harness.server.one_time_url.partition(str(harness.server.server_port))[2]
    assert "secret" not in ticket
    status, _, headers = harness.get(ticket)
    assert (status, headers["Location"]) == (303, "/secret/team/llama")
    assert harness.get(ticket)[0] == 404


def test_a_refusal_of_the_api_server_is_shown_with_its_code(harness: UiHarness) -> None:
    assert harness.get("/secret/team/nothing")[0] == 404
    assert "did you mean" in harness.get("/secret/team/lama")[1]
    harness.api.answers[f"{JOBS}/llama"] = 403
    status, text, headers = harness.get("/secret/team/llama")
    assert (status, headers["Content-Type"]) == (403, "text/plain; charset=utf-8")
    assert text.startswith("you may not get trainingjobs/llama in namespace team")


def test_many_tabs_share_reads_and_workers_are_read_once_a_minute(
    harness: UiHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    monkeypatch.setattr(pages, "read_run_curve", lambda *_: (reads.append("curve") or (), ""))
    monkeypatch.setattr(pages, "list_stored_checkpoints", lambda *_, **__: (reads.append("storage") or (), ""))
    for _ in range(10):
        harness.get("/secret/team/llama")
    assert harness.count_requests("/pods") == harness.count_requests("/events") == 1
    harness.now = pages.PAGE_CACHE_SECONDS
    harness.get("/secret/team/llama")
    assert harness.count_requests("/pods") == 2
    until(lambda: reads == ["curve", "storage"], "curve and storage are read")
    harness.now = pages.WORKER_QUERY_SECONDS
    harness.get("/secret/team/llama")
    until(lambda: len(reads) == 4, "curve and storage are read again")


def test_the_curve_is_read_once_and_extended_by_live_steps(harness: UiHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = read_curve(json.dumps({"step": step, "loss": 6.0 - step / 100}) for step in range(5))
    monkeypatch.setattr(pages, "read_run_curve", lambda *_: (curve, ""))
    monkeypatch.setattr(pages, "list_stored_checkpoints", lambda *_, **__: (None, "no worker"))
    harness.get("/secret/team/llama")
    uid = recorded_object("job")["metadata"]["uid"]
    until(lambda: not harness.server.pages._results[uid].is_querying, "the curve is read")
    for number, step in enumerate((300, 301), 1):
        harness.now = pages.PAGE_CACHE_SECONDS * number
        harness.api.answers[f"{JOBS}/llama"]["status"]["progress"]["step"] = step
        text = harness.get("/secret/team/llama")[1]
    assert "checkpoints on storage: no worker" in text
    runs = re.findall(r'<polyline points="([^"]*)"', text.partition("<h3>")[0])
    sizes = [len(points.split()) for points in runs]
    assert sizes in ([5, 2, 2], [5, 2]), "steps between are missing; the first request came before or after the curve"


def test_the_kubeconfig_is_reloaded_every_ten_minutes(harness: UiHarness) -> None:
    opened: list[float] = []
    local = LocalPages(lambda: opened.append(harness.now) or harness.open_api(), "", monotonic=lambda: harness.now)
    for now in (0, 100, 500, 600, 700):
        harness.now = now
        local.render_jobs("team")
    assert opened == [0, 600]
    local.close()


def test_a_port_in_use_is_reported_in_one_sentence(harness: UiHarness) -> None:
    with pytest.raises(ClientError, match="choose another --port"):
        UiServer(harness.server.pages, "s", "/", harness.server.server_port)


def test_ui_reports_an_unknown_job_before_it_serves(harness: UiHarness, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["ui", "lama", "--no-browser", "--kubeconfig", str(harness.api.kubeconfig)])
    assert exit_info.value.code == 1
    assert "did you mean llama" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_real_browser_updates_the_page_and_runs_no_foreign_script(harness: UiHarness) -> None:
    job = harness.api.answers[f"{JOBS}/llama"]
    job["status"]["verdict"] = HOSTILE
    job["status"]["history"][-1]["message"] = HOSTILE
    harness.api.answers[f"{CORE}/events"]["items"][0]["message"] = HOSTILE
    with browser() as tab:
        tab.open(harness.server.one_time_url)
        assert tab.evaluate("location.pathname") == "/secret/team/llama"
        assert tab.evaluate("document.title") == "team/llama"
        assert tab.evaluate("document.images.length") == 0
        assert HOSTILE in tab.visible_text()
        background = "getComputedStyle(document.querySelector('.c0')).fill"
        assert tab.evaluate(background) == "rgb(47, 158, 99)", "the policy allows the style of the page"
        tab.evaluate("window.kept = document.getElementById('history'); 0")
        tab.evaluate("window.facts = document.getElementById('facts'); 0")
        harness.now = 100.0
        job["status"]["progress"]["step"] = 777
        job["status"]["artifacts"] = [{"kind": "Model", "path": "/new", "step": 777, "bytes": 1, "digest": "d"}]
        tab.until("document.getElementById('facts').innerText.includes('step 777')")
        assert tab.evaluate("document.getElementById('results').innerText.includes('/new')"), "a new part"
        assert tab.evaluate("document.getElementById('history') === window.kept"), "an unchanged part is kept"
        assert tab.evaluate("document.getElementById('facts') !== window.facts")
        harness.now = 200.0
        harness.api.answers[f"{JOBS}/llama"] = 403
        tab.until("!document.getElementById('quiet').hidden")
        assert "you may not get trainingjobs/llama" in tab.evaluate("document.getElementById('quiet').innerText")
        harness.now = 300.0
        harness.api.answers[f"{JOBS}/llama"] = job
        tab.until("document.getElementById('quiet').hidden")
        assert not [line for line in tab.console_errors if "favicon" not in line and "403" not in line]
