"""Objects of real jobs of the development cluster, and an API server that serves them.

`job`: two crashes and a pod that was deleted on the way; `failed`: its data is not there. Recorded by `kubectl get -o
json`; the spec is cut to what the client reads.

`ApiServer` has no semantics, unlike `FakeCluster` behind `FakeServer`: a test sets the answer of each path, also a
refusal or an invalid one. Tests that list, watch or write use the other.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import yaml

from tests.testing.suite.loopback_http import LoopbackServer
from trainium_contract.wire.log_line import build_log_line

RECORDED = Path(__file__).parent / "recorded"
NOW = 1_795_399_790.0
"""A moment after the job was recorded."""
JOBS = "/apis/trainium.dev/v1alpha1/namespaces/team/trainingjobs"
CORE = "/api/v1/namespaces/team"


def recorded_object(name: str) -> dict[str, Any]:
    """One recorded object."""
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def recorded_log() -> str:
    """Return the end of the log of `llama-w-0`, with time stamps."""
    return (RECORDED / "worker.log").read_text(encoding="utf-8")


def recorded_log_as_json() -> str:
    """Return the same log as JSON lines."""
    return "".join(f"{_format_as_json(line)}\n" for line in recorded_log().splitlines())


def _format_as_json(line: str) -> str:
    stamp, _, words = line.partition(" ")
    about: dict[str, Any] = {"namespace": "team", "job": "llama", "pod": "llama-w-0", "node": "node-0", "generation": 1}
    ours = re.fullmatch(r"\[rank (\d+)\] [\d:]{8} rank \d+ ([A-Z]+) (.*)", words)
    agents = re.fullmatch(r"([-\d]{10}) ([\d:]{8}),(\d{3}) ([A-Z]+) agent (.*)", words)
    if ours is not None:
        about |= {"source": "trainer", "logger": "trainium.loop", "rank": int(ours[1]), "attempt": 0}
        time, level, message = f"{stamp[:23]}Z", ours[2], ours[3]
    else:
        assert agents is not None, f"neither a rank nor the agent logs {words!r}"
        about |= {"source": "agent", "logger": "trainium_agent.generation_runner"}
        time, level, message = f"{agents[1]}T{agents[2]}.{agents[3]}Z", agents[4], agents[5]
    return f"{stamp} {build_log_line(message, time=time, level=level.lower(), **about).to_line()}"


def recorded_responses() -> dict[str, Any]:
    """Return the responses of the API server by path: an object, a text, or a status code."""
    return {
        JOBS: {"items": [recorded_object("job"), recorded_object("failed")]},
        f"{JOBS}/llama": recorded_object("job"),
        f"{JOBS}/broken": recorded_object("failed"),
        f"{CORE}/configmaps/llama-membership": recorded_object("membership"),
        f"{CORE}/pods": recorded_object("pods"),
        f"{CORE}/events": recorded_object("events"),
        f"{CORE}/pods/llama-w-0/log": recorded_log(),
    }


class ApiServer:
    """An API server with fixed responses by path (404 without one) that records requests."""

    def __init__(self, answers: dict[str, Any], folder: Path) -> None:
        self.answers = answers
        self.requests: list[tuple[str, str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                path = urlsplit(self.path).path
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.requests.append((self.command, self.path, body))
                found = outer.answers.get(f"{self.command} {path}")
                if found is None:
                    found = outer.answers.get(path, 404)
                code, data = 200, b""
                if isinstance(found, int):
                    code = found
                    data = json.dumps({"kind": "Status", "code": code, "message": f"answer {code}"}).encode()
                elif isinstance(found, bytes):
                    code, data = 404, found
                else:
                    data = (found if isinstance(found, str) else json.dumps(found)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = do_POST = do_DELETE = _answer  # noqa: N815 - names of the library

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's signature
                pass

        self._server = LoopbackServer(Handler)
        self.url = self._server.url
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(kubeconfig(self.url)), encoding="utf-8")

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Serve in a thread."""
        with self._server.running():
            yield self


def kubeconfig(server: str, **user: Any) -> dict[str, Any]:
    """Return a kubeconfig with one context, in the namespace of the recorded jobs."""
    return {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "team"}}],
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": user}],
    }
