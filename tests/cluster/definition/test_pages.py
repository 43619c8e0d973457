"""Pages of jobs on a real API server: its users, roles and tokens, the operator as a process, a real browser."""

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.definition.conftest import Api
from tests.testing.operator.local_operator import LocalOperator, request_token, run_local_operator, write_kubeconfig
from tests.testing.page.browser import CHROMIUM, browser
from tests.testing.page.html_page import Page
from tests.testing.suite.loopback_http import LoopbackServer
from tests.testing.suite.timeouts import scaled, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SYSTEM, OURS, THEIRS = "pages-system", "pages-ours", "pages-theirs"
ROLES = {"ann": "view", "novice": ""}
"""ServiceAccounts of OURS, and the role that each has there."""
JOB = {
    "apiVersion": "trainium.dev/v1alpha1",
    "kind": "TrainingJob",
    "spec": {
        "workers": {"replicas": 2, "accelerator": {"device": "cpu"}},
        "trainer": {"model": {"preset": "Tiny"}, "data": {"source": "python-docs"}},
    },
}


def build_event(job: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of an Event about a job."""
    about = {key: job["metadata"][key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about['name']}.1", "namespace": about["namespace"]},
        "involvedObject": {"apiVersion": job["apiVersion"], "kind": job["kind"], **about},
        "reason": "Noticed",
        "message": "<b>bold</b>",
        "type": "Normal",
    }


@pytest.fixture(scope="module")
def readable(crd_api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalOperator]:
    """Start an operator that serves pages, and create a job in each of two namespaces."""
    if crd_api.is_existing:
        pytest.skip("this test installs an operator, which an existing cluster does not allow")
    crd_api.make_namespaces(SYSTEM, OURS, THEIRS)
    for name, role in ROLES.items():
        crd_api.kubectl("create", "serviceaccount", name, "-n", OURS)
        if role:
            subject = f"--serviceaccount={OURS}:{name}"
            crd_api.kubectl("create", "rolebinding", name, "-n", OURS, f"--clusterrole={role}", subject)
    folder = tmp_path_factory.mktemp("pages")
    with run_local_operator(crd_api, folder, "pages", SYSTEM, "ui.enabled=true,watchNodes=false") as running:
        for namespace, name in ((OURS, "ours"), (THEIRS, "secret")):
            manifest = {**JOB, "metadata": {"name": name, "namespace": namespace}}
            made = json.loads(
                crd_api.kubectl("apply", "-f", "-", "-n", namespace, "-o", "json", stdin=json.dumps(manifest))
            )
            crd_api.kubectl("create", "-f", "-", "-n", namespace, stdin=json.dumps(build_event(made)))
        yield running
        for namespace in (OURS, THEIRS):
            crd_api.run("kubectl", "delete", "trn", "--all", "-n", namespace, "--wait=false")
    crd_api.delete_namespaces(SYSTEM, OURS, THEIRS)


def wait_for_page(readable: LocalOperator, token: str, path: str, expected: str) -> str:
    """Return the page once it has the expected text."""

    def observe() -> str:
        status, text = readable.get(token, path=path)
        return text if status == 200 and expected in Page(text).text else ""

    page: str = until(observe, lambda: f"{readable.get(token, path=path)} {readable.log.read_text()}")
    return page


def test_a_viewer_of_one_namespace_sees_only_its_jobs(readable: LocalOperator) -> None:
    token = request_token(readable.api, "ann", OURS)
    page = Page(wait_for_page(readable, token, f"/ui/{OURS}/ours", "Noticed"))
    assert "0 of 2 nodes" in page.text
    assert "<b>bold</b>" in page.text
    assert "Events" in page.text
    assert "Not shown" not in page.text
    listed = Page(wait_for_page(readable, token, f"/ui/{OURS}", "ours"))
    assert "secret" not in listed.text
    user = f"system:serviceaccount:{OURS}:ann"
    for path, verb in ((f"/ui/{THEIRS}", "list"), (f"/ui/{THEIRS}/secret", "get"), (f"/ui/{THEIRS}/nothing", "get")):
        status, text = readable.get(token, path=path)
        assert status == 403
        assert f"{user} may not {verb} trainingjobs.trainium.dev" in text
    status, text = readable.get(token, path="/ui")
    assert (status, "in all namespaces" in text, "secret" in text) == (403, True, False)


def test_a_reader_without_right_or_token_is_refused(readable: LocalOperator) -> None:
    assert readable.get(request_token(readable.api, "novice", OURS), path=f"/ui/{OURS}/ours")[0] == 403
    assert readable.get(path=f"/ui/{OURS}/ours")[0] == 401
    assert readable.get("forged", path=f"/ui/{OURS}/ours")[0] == 401
    assert readable.get(request_token(readable.api, "ann", OURS))[0] == 404


def test_a_right_to_jobs_alone_shows_the_job_without_its_parts(readable: LocalOperator) -> None:
    api = readable.api
    api.kubectl("create", "serviceaccount", "few", "-n", OURS)
    api.kubectl("create", "role", "few", "-n", OURS, "--verb=get", "--resource=trainingjobs.trainium.dev")
    api.kubectl("create", "rolebinding", "few", "-n", OURS, "--role=few", f"--serviceaccount={OURS}:few")
    token = request_token(api, "few", OURS)
    page = Page(wait_for_page(readable, token, f"/ui/{OURS}/ours", "Phase"))
    for part in ("list pods", "get configmaps ours-membership", "list events"):
        assert f"you may not {part} in namespace {OURS}" in page.text
    assert "Noticed" not in page.text


@contextmanager
def signing_proxy(readable: LocalOperator, token: str) -> Iterator[str]:
    """Act as an authenticating proxy in front of the operator: add the token of a user, and trust the authority."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            upstream = http.client.HTTPSConnection(
                "localhost", readable.port, timeout=scaled(30), context=readable.trust
            )
            upstream.request("GET", self.path, headers={"Authorization": f"Bearer {token}"})
            answer = upstream.getresponse()
            body = answer.read()
            upstream.close()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in {"connection", "date", "server"}:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's signature
            pass

    with LoopbackServer(Handler).running() as server:
        yield server.url


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_behind_a_proxy_shows_a_changing_job(readable: LocalOperator) -> None:
    api = readable.api
    with signing_proxy(readable, request_token(api, "ann", OURS)) as address, browser() as tab:
        tab.open(f"{address}/ui/{OURS}")
        tab.until("document.querySelector('a[href$=\"/ours\"]') !== null")
        assert "TrainingJobs in namespace" in tab.visible_text()
        tab.evaluate("document.querySelector('a[href$=\"/ours\"]').click()")
        tab.until(f"location.pathname === '/ui/{OURS}/ours' && document.getElementById('facts') !== null")
        tab.evaluate("window.kept = document.getElementById('job'); 0")
        api.kubectl("patch", "trn", "ours", "-n", OURS, "--type=merge", "-p", '{"spec": {"suspend": true}}')
        tab.until("document.getElementById('facts').innerText.includes('Suspended')")
        assert tab.evaluate("document.getElementById('job') === window.kept"), "the page was not reloaded"
        api.kubectl("patch", "trn", "ours", "-n", OURS, "--type=merge", "-p", '{"spec": {"suspend": false}}')
        tab.open(f"{address}/ui/{THEIRS}/secret")
        assert "may not get trainingjobs.trainium.dev secret" in tab.visible_text()
        assert [line for line in tab.console_errors if "favicon" not in line and "403" not in line] == []


@contextmanager
def pages_of_command(api: Api, kubeconfig: str, name: str, namespace: str) -> Iterator[str]:
    """Return the address that `kubectl trn ui` prints."""
    command = [sys.executable, "-m", "trainium_client.commands.main", "ui", name, "-n", namespace, "--no-browser"]
    command += ["--kubeconfig", kubeconfig]
    environment = {**os.environ, **api.variables}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            yield process.stderr.readline().strip()
        finally:
            process.terminate()
            process.wait(scaled(30))


def fetch(url: str) -> tuple[int, str]:
    address, path = re.fullmatch(r"http://([^/]+)(/.*)", url).groups()  # type: ignore[union-attr]
    connection = http.client.HTTPConnection(address, timeout=scaled(60))
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_kubectl_trn_ui_shows_what_its_credentials_may_see(readable: LocalOperator, tmp_path: Path) -> None:
    api = readable.api
    by_token = write_kubeconfig(api, request_token(api, "ann", OURS), tmp_path / "ann")
    for kubeconfig in (api.variables["KUBECONFIG"], by_token):
        with pages_of_command(api, kubeconfig, "ours", OURS) as url:
            status, text = fetch(url)
            assert (status, "Noticed" in Page(text).text) == (200, True)
            status, text = fetch(url.replace(f"/{OURS}/ours", f"/{THEIRS}/secret"))
            assert status == (403 if kubeconfig == by_token else 200)
            assert fetch(url.replace(f"/{OURS}/ours", "/elsewhere/x/y"))[0] == 404
