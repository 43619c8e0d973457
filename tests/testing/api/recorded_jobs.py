"""Objects of real jobs of the development cluster, and an API server that serves them.

`job` had two crashes and a deleted pod; `failed` has no data. They were recorded by `kubectl get -o json`; the specs
have only the fields that the client reads.

`RecordedApiServer` has fixed responses: a test sets the response of each path, also a refusal or an invalid one. Tests
that list, watch or write use `FakeApiServer` behind `HttpApiServer`.
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
    """Read a recorded object."""
    recorded: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return recorded


def recorded_log() -> str:
    """Return the end of the log of `llama-w-0`, with time stamps."""
    return (RECORDED / "worker.log").read_text(encoding="utf-8")


def recorded_log_as_json() -> str:
    """Return the same log as JSON lines."""
    return "".join(f"{_format_as_json(line)}\n" for line in recorded_log().splitlines())


def _format_as_json(line: str) -> str:
    stamp, _, text = line.partition(" ")
    fields: dict[str, Any] = {
        "namespace": "team",
        "job": "llama",
        "pod": "llama-w-0",
        "node": "node-0",
        "generation": 1,
    }
    rank_line = re.fullmatch(r"\[rank (\d+)\] [\d:]{8} rank \d+ ([A-Z]+) (.*)", text)
    agent_line = re.fullmatch(r"([-\d]{10}) ([\d:]{8}),(\d{3}) ([A-Z]+) agent (.*)", text)
    if rank_line is not None:
        fields |= {"source": "trainer", "logger": "trainium.loop", "rank": int(rank_line[1]), "attempt": 0}
        time, level, message = f"{stamp[:23]}Z", rank_line[2], rank_line[3]
    else:
        assert agent_line is not None, f"neither a rank nor the agent logs {text!r}"
        fields |= {"source": "agent", "logger": "trainium_agent.generation_runner"}
        time, level, message = f"{agent_line[1]}T{agent_line[2]}.{agent_line[3]}Z", agent_line[4], agent_line[5]
    return f"{stamp} {build_log_line(message, time=time, level=level.lower(), **fields).to_line()}"


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


class RecordedApiServer:
    """An API server with fixed responses by path (404 without one) that records requests."""

    def __init__(self, answers: dict[str, Any], folder: Path) -> None:
        self.answers = answers
        self.requests: list[tuple[str, str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one packet for a response, which a delayed acknowledgement would interrupt

            def _answer(self) -> None:
                path = urlsplit(self.path).path
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.requests.append((self.command, self.path, body))
                answer = outer.answers.get(f"{self.command} {path}")
                if answer is None:
                    answer = outer.answers.get(path, 404)
                code = 200
                if isinstance(answer, int):
                    code = answer
                    data = json.dumps({"kind": "Status", "code": code, "message": f"answer {code}"}).encode()
                elif isinstance(answer, bytes):
                    code, data = 404, answer
                else:
                    data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
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
