"""`kubectl trn ui`: what its server answers, to whom, at what cost, and what a real browser makes of it."""

from __future__ import annotations

import http.client
import json
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.api.recorded_jobs import CORE, JOBS, ApiServer, recorded, recorded_answers
from tests.testing.page.browser import CHROMIUM, browser
from tests.testing.page.html_page import Page
from trainium_client.api import Api
from trainium_client.commands import pages
from trainium_client.commands.main import main
from trainium_client.commands.pages import LocalPages
from trainium_client.commands.ui_server import UiServer
from trainium_contract.api_server.connection import Connection
from trainium_contract.api_server.errors import ClientError
from trainium_contract.api_server.kubeconfig import find_access

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOSTILE = '"><script>document.title="hacked"</script><img src=x onerror=alert(2)>'


class World:
    """The server of `ui` on recorded answers, with its own clock."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.now = 0.0
        local = LocalPages(self.connected, "/secret", monotonic=lambda: self.now)
        self.server = UiServer(local, "secret", "/team/llama")

    def connected(self) -> Api:
        return Api(Connection(find_access(str(self.api.kubeconfig), None, {})), "team")

    def get(self, path: str, method: str = "GET", host: str = "") -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, dict(answer.headers)

    def asked(self, part: str) -> int:
        return sum(part in path for _, path, _ in self.api.requests)


def eventually(condition: Callable[[], Any]) -> None:
    over = threading.Event()
    for _ in range(600):
        if condition():
            return
        over.wait(0.05)
    raise AssertionError(condition)


@contextmanager
def serving(api: ApiServer) -> Iterator[World]:
    world = World(api)
    thread = threading.Thread(target=world.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield world
    finally:
        world.server.shutdown()
        eventually(lambda: not any(each.busy for each in world.server.pages._inside.values()))
        world.server.server_close()
        thread.join()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ApiServer(recorded_answers(), tmp_path).running() as api, serving(api) as made:
        yield made


def test_a_job_and_the_lists_are_pages_that_lead_to_each_other(world: World) -> None:
    world.api.answers["/apis/trainium.dev/v1alpha1/trainingjobs"] = world.api.answers[JOBS]
    status, text, headers = world.get("/secret/team/llama")
    page = Page(text)
    assert (status, page.open) == (200, [])
    assert "script-src 'sha256-" in headers["Content-Security-Policy"]
    assert ("href", "/secret/team") in page.attributes
    for words in ("team/llama", "Who trains", "members: 2 Running; others: 1 Running", "Interruptions", "Recovered"):
        assert words in page.text, words
    for path in ("/secret/team", "/secret", "/secret/"):
        listed = Page(world.get(path)[1])
        assert ("href", "/secret/team/llama") in listed.attributes
        assert "Failed" in listed.text


def test_without_the_secret_or_from_another_site_nothing_is_answered(world: World) -> None:
    for path in ("/", "/team/llama", "/wrong/team/llama", "/secretteam", "/favicon.ico", "/secret/a/b/c"):
        status, text, _ = world.get(path)
        assert (status, "llama" in text) == (404, False), path
    assert world.get("/secret/team/llama", host="evil.example")[0] == 403
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert world.get("/secret/team/llama", method)[0] == 501
    assert not world.api.requests


def test_the_address_on_a_browsers_command_line_leads_to_the_page_once(world: World) -> None:
    ticket = world.server.once.partition(str(world.server.server_port))[2]
    assert "secret" not in ticket
    status, _, headers = world.get(ticket)
    assert (status, headers["Location"]) == (303, "/secret/team/llama")
    assert world.get(ticket)[0] == 404


def test_what_the_api_server_refuses_is_a_sentence_with_its_code(world: World) -> None:
    assert world.get("/secret/team/nothing")[0] == 404
    assert "did you mean" in world.get("/secret/team/lama")[1]
    world.api.answers[f"{JOBS}/llama"] = 403
    status, text, headers = world.get("/secret/team/llama")
    assert (status, headers["Content-Type"]) == (403, "text/plain; charset=utf-8")
    assert text.startswith("you may not get trainingjobs/llama in namespace team")


def test_many_tabs_cost_what_one_costs_and_workers_are_asked_once_a_minute(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    monkeypatch.setattr(pages, "read_curve_of", lambda *_: reads.append("curve") or ())
    monkeypatch.setattr(pages, "on_storage", lambda *_, **__: (reads.append("storage") or (), ""))
    for _ in range(10):
        world.get("/secret/team/llama")
    assert world.asked("/pods") == world.asked("/events") == 1
    world.now = pages.FRESH_SECONDS
    world.get("/secret/team/llama")
    assert world.asked("/pods") == 2
    eventually(lambda: reads == ["curve", "storage"])
    world.now = pages.STORAGE_SECONDS
    world.get("/secret/team/llama")
    eventually(lambda: len(reads) == 4)


def test_the_curve_is_read_once_and_goes_on_with_what_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainium_contract.views.curve import read_curve

    started = read_curve(json.dumps({"step": step, "loss": 6.0 - step / 100}) for step in range(5))
    monkeypatch.setattr(pages, "read_curve_of", lambda *_: started)
    monkeypatch.setattr(pages, "on_storage", lambda *_, **__: (None, "no worker"))
    world.get("/secret/team/llama")
    eventually(lambda: not world.server.pages._inside[recorded("job")["metadata"]["uid"]].busy)
    for number, step in enumerate((300, 301), 1):
        world.now = pages.FRESH_SECONDS * number
        world.api.answers[f"{JOBS}/llama"]["status"]["progress"]["step"] = step
        text = world.get("/secret/team/llama")[1]
    assert "checkpoints on storage: no worker" in text
    (line,) = re.findall(r'<polyline points="([^"]*)"', text)
    assert len(line.split()) in {7, 8}, "the first look may have come before or after the curve"


def test_the_kubeconfig_is_read_again_before_a_login_can_be_over(world: World) -> None:
    opened: list[float] = []
    local = LocalPages(lambda: opened.append(world.now) or world.connected(), "", monotonic=lambda: world.now)
    for now in (0, 100, 500, 600, 700):
        world.now = now
        local.jobs("team")
    assert opened == [0, 600]
    local.close()


def test_a_port_that_is_taken_is_a_sentence(world: World) -> None:
    with pytest.raises(ClientError, match="choose another --port"):
        UiServer(world.server.pages, "s", "/", world.server.server_port)


def test_the_command_reports_what_it_cannot_read_before_it_serves_anything(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["ui", "lama", "--no-browser", "--kubeconfig", str(world.api.kubeconfig)])
    assert left.value.code == 1
    assert "did you mean llama" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_real_browser_shows_the_page_keeps_it_up_to_date_and_runs_nothing_of_what_it_shows(world: World) -> None:
    job = world.api.answers[f"{JOBS}/llama"]
    job["status"]["verdict"] = HOSTILE
    job["status"]["history"][-1]["message"] = HOSTILE
    world.api.answers[f"{CORE}/events"]["items"][0]["message"] = HOSTILE
    with browser() as tab:
        tab.open(world.server.once)
        assert tab.evaluate("location.pathname") == "/secret/team/llama"
        assert tab.evaluate("document.title") == "team/llama"
        assert tab.evaluate("document.images.length") == 0
        assert HOSTILE in tab.text()
        background = "getComputedStyle(document.querySelector('.c0')).fill"
        assert tab.evaluate(background) == "rgb(47, 158, 99)", "the policy lets our own style in"
        tab.evaluate("window.kept = document.getElementById('history'); 0")
        tab.evaluate("window.facts = document.getElementById('facts'); 0")
        world.now = 100.0
        job["status"]["progress"]["step"] = 777
        job["status"]["artifacts"] = [{"kind": "Model", "path": "/made", "step": 777, "bytes": 1, "digest": "d"}]
        tab.until("document.getElementById('facts').innerText.includes('step 777')")
        assert tab.evaluate("document.getElementById('results').innerText.includes('/made')"), "a part that is new"
        assert tab.evaluate("document.getElementById('history') === window.kept"), "nothing has happened there"
        assert tab.evaluate("document.getElementById('facts') !== window.facts")
        world.now = 200.0
        world.api.answers[f"{JOBS}/llama"] = 403
        tab.until("!document.getElementById('quiet').hidden")
        assert "you may not get trainingjobs/llama" in tab.evaluate("document.getElementById('quiet').innerText")
        world.now = 300.0
        world.api.answers[f"{JOBS}/llama"] = job
        tab.until("document.getElementById('quiet').hidden")
        assert [each for each in tab.complaints if "favicon" not in each and "403" not in each] == []
