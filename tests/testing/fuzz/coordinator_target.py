"""Fuzz target: everything that a client can send to the port of the coordinator.

A case is a list of connections with their messages: requests (method, path, headers, token, body), frames of the
stream, raw text, and pauses. They reach the server of the operator (without TLS), its authenticator and caches, and its
plan of the job.

Invariants:
- Every response belongs to the protocol and is bounded by the bytes that were sent.
- No message is accepted without a token of its pod.
- The plan accepts the messages of agents.
- No connection is left open.
"""

import asyncio
import base64
import json
import ssl
from typing import Any
from urllib.parse import quote, urlencode

from aiohttp import web

from tests.testing.api.token_issuer import ISSUER
from tests.testing.fuzz import objects
from tests.testing.fuzz.connection import ClientConnection, Transport
from tests.testing.fuzz.invariants import require
from tests.testing.fuzz.operator_harness import NOW, OperatorHarness
from tests.testing.fuzz.schemas import edge_values, example
from tests.testing.operator.wire_messages import member, membership
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    Membership,
    RegisterRequest,
)
from trainium_contract.wire.stream import STREAM_PATH, UPGRADE, FrameKind
from trainium_operator.cluster.cache.store import Entry, Key
from trainium_operator.cluster.coordinator_adapters import WorkerPods
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.coordinator.server import CoordinatorServer
from trainium_operator.coordinator.streams import MAX_FRAME_BYTES
from trainium_operator.coordinator.token_verifier import TokenVerifier
from trainium_operator.http.listener import TrackedConnection
from trainium_operator.monitoring.metrics import Metrics
from trainium_operator.plan.manifests.config_maps import build_membership_map
from trainium_operator.plan.model.names import JobId

Json = dict[str, Any]

JOB = JobId("team", "llama", objects.JOB_UID)
PODS = 3
MOST_CONNECTIONS, MOST_SENDS = 8, 24
LONGEST_PAUSE = 120.0
LONGEST_ADDRESS = 64
"""Characters: an IP address, with an interface at most."""
_MOST_RESPONSE_BYTES, _RESPONSE_BYTES_PER_BYTE = 64 << 10, 64
"""Limit of responses of a connection: bytes in any case, and for each byte that was sent."""
_METRICS = Metrics(named_jobs=4)
MOST_SERIES = 500
_METRICS_CHECK_CASES = 256
"""Cases between two checks of the metrics, which all cases share."""
_DRAIN_SECONDS = 5.0


class CoordinatorTarget:
    """See Target."""

    name = "coordinator"
    expected: frozenset[str] = frozenset()
    storable = False

    def __init__(self) -> None:
        self._cached: dict[str, dict[Key, Entry[Any]]] = {}
        """Caches of the operator while the job trains in `_generation`."""
        self._generation = 0
        self._runs = 0

    def seeds(self) -> list[Any]:
        """Return valid cases: messages of agents and of other clients."""
        full = {**example(HeartbeatRequest.model_json_schema(by_alias=True)), **objects.HEARTBEAT}
        register = {"frame": {"kind": FrameKind.REGISTER, "body": objects.REGISTER}}
        heartbeat = {"frame": {"kind": FrameKind.HEARTBEAT, "body": objects.HEARTBEAT}}
        full_heartbeat = {"frame": {"kind": FrameKind.HEARTBEAT, "body": full}}
        keepalive = {"frame": {"kind": FrameKind.KEEPALIVE, "raw": "\x00\x00\x00\x00\x00\x00\x00\x09"}}
        query = {"after": "0", "podUid": "uid-0"}
        stream = {"request": _request_fields("GET", STREAM_PATH, query=query, upgrade=UPGRADE)}
        unsigned = {
            **_request_fields("GET", STREAM_PATH, query={"podUid": "uid-1"}, upgrade=UPGRADE),
            "jose": {"alg": "ES256", "kid": ISSUER.key_id, "typ": "JWT"},
            "claims": ISSUER.claims("llama-w-1", exp=NOW + 60),
        }
        post = {"request": _request_fields("POST", STREAM_PATH, body=objects.REGISTER)}
        verdict = {**objects.HEARTBEAT, "phase": "Failed", "verdict": full["failures"][0], "failures": full["failures"]}
        progress = {"step": 0, "hangDetection": "Output", "problem": "the pattern matches no line"}
        program = {"frame": {"kind": FrameKind.HEARTBEAT, "body": {**objects.HEARTBEAT, "progress": progress}}}
        return [
            {
                "plan": True,
                "connections": [
                    {
                        "source": "10.0.0.1",
                        "messages": [stream, register, heartbeat, keepalive, full_heartbeat, {"pause": 31}, keepalive],
                    }
                ],
            },
            {"connections": [{"source": "10.0.0.1", "messages": [post, stream]}]},
            {
                "connections": [
                    {
                        "source": "10.0.0.1",
                        "messages": [stream, register, {"frame": {"kind": FrameKind.HEARTBEAT, "body": verdict}}],
                    }
                ]
            },
            {
                "connections": [
                    {"source": "10.0.0.9", "messages": [{"raw": "GET / HTTP/1.1\r\nHost: a\r\n\r\n"}, {"pause": 20}]}
                ]
            },
            {
                "plan": True,
                "generation": 7,
                "connections": [
                    {
                        "source": "10.0.0.1",
                        "messages": [stream, register, {"publish": 8}, heartbeat, {"gone": 0}, {"port": "refused"}],
                    },
                    {"source": "10.0.0.2", "stalled": True, "messages": [{"request": unsigned}]},
                ],
            },
            {"leads": False, "connections": [{"source": "::1", "messages": [stream]}]},
            {"connections": [{"source": "10.0.0.1", "messages": [stream, register, program]}]},
        ]

    def values(self) -> dict[str, list[Any]]:
        """Return further values by key."""
        values_by_key = edge_values(HeartbeatRequest.model_json_schema(by_alias=True))
        for key, values in edge_values(RegisterRequest.model_json_schema(by_alias=True)).items():
            values_by_key.setdefault(key, []).extend(values)
        values_by_key["path"] = [STREAM_PATH, "/v1/%00/%2e%2e/stream", "*", "//"]
        values_by_key["method"] = ["GET", "POST", "PUT", "HEAD", "OPTIONS", "CONNECT", "TRACE", "PRI", "get"]
        values_by_key["plan"] = [True]
        values_by_key["token"] = ["uid-0", "uid-1", "uid-2", "uid-9", ""]
        values_by_key["kind"] = [*map(int, FrameKind), 0, 10, 255]
        values_by_key["length"] = [0, 1, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 2**32 - 1]
        values_by_key["Content-Encoding"] = ["gzip", "deflate", "br"]
        values_by_key["Transfer-Encoding"] = ["chunked", "gzip, chunked", "identity"]
        values_by_key["Expect"] = ["100-continue"]
        values_by_key["Connection"] = ["close", "keep-alive", "Upgrade"]
        return values_by_key

    async def run_case(self, case: Any) -> None:
        """Run a case; raise an error for a broken invariant."""
        if not isinstance(case, dict):
            return
        operator = OperatorHarness()
        await operator.open()
        generation = _bounded_int(case.get("generation"), 1)
        if generation == self._generation:
            operator.restore(self._cached)
        else:
            _add_training_job(operator, generation)
            self._cached, self._generation = operator.snapshot(), generation
        operator.state.publish(JOB, _membership(generation))
        harness = _CoordinatorHarness(operator, leads=case.get("leads") is not False)
        await harness.open()
        connections = case.get("connections")
        for fields in connections[:MOST_CONNECTIONS] if isinstance(connections, list) else ():
            if isinstance(fields, dict):
                await harness.run_connection(fields)
        await harness.close()
        harness.check()
        if case.get("plan") is True and operator.state.count_agents():
            operator.plan_jobs()
        self._runs += 1
        if self._runs % _METRICS_CHECK_CASES == 0:
            series = sum(len(metric.samples) for metric in _METRICS.registry.collect())
            require(series <= MOST_SERIES, f"{series} time series: metrics grow with foreign input")


def _request_fields(method: str, path: str, *, query: Json | None = None, body: Any = None, upgrade: str = "") -> Json:
    headers = {"Host": "coordinator", "Content-Type": "application/json", "Accept-Encoding": "gzip"}
    headers |= {"Connection": "Upgrade", "Upgrade": upgrade} if upgrade else {}
    return {"method": method, "path": path, "query": query or {}, "headers": headers, "token": "uid-0", "body": body}


def _add_training_job(operator: OperatorHarness, generation: int) -> None:
    """Deliver a job that trains with two members and a spare."""
    spec = {
        "workers": {"replicas": 2, "minReplicas": 1, "spares": 1, "accelerator": {"device": "cpu"}},
        "trainer": {"batch": {"globalSize": 4}},
    }
    status = {
        "desired": 2,
        "nextPodOrdinal": PODS,
        "membership": {"generation": generation, "size": 2, "dataParallel": 2},
    }
    metadata = {"name": JOB.name, "namespace": JOB.namespace, "uid": JOB.uid, "generation": 1}
    operator.deliver("TrainingJob", {"metadata": metadata, "spec": spec, "status": status})
    operator.deliver("Node", {**objects.NODE, "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    for number in range(PODS):
        status = {"phase": "Running", "podIP": f"10.0.0.{number}", "conditions": [{"type": "Ready", "status": "True"}]}
        named = {**objects.OWNED, "name": f"llama-w-{number}", "uid": f"uid-{number}"}
        spec = {"nodeName": "n", "containers": [{"name": "worker"}]}
        operator.deliver("Pod", {"metadata": named, "spec": spec, "status": status})
    record = operator.caches.jobs.store.get((JOB.namespace, JOB.name))
    assert record is not None
    assert record.view is not None
    operator.deliver("ConfigMap", build_membership_map(record.view, _membership(generation)))


def _membership(generation: int) -> Membership:
    return membership(generation, *(member(f"llama-w-{rank}", pod_uid=f"uid-{rank}") for rank in range(2)))


class _OpenListener:
    """A listener without a socket, to which connections are added directly."""

    def __init__(self) -> None:
        self.server: web.Server | None = None

    def open(self, server: web.Server, _host: str, _port: int, _context: ssl.SSLContext | None) -> int:
        self.server = server
        return 0

    async def close(self) -> None:
        return


class _CoordinatorHarness:
    """The server of the coordinator, its connections, and the tokens that they presented."""

    def __init__(self, operator: OperatorHarness, *, leads: bool) -> None:
        self._operator = operator
        self._leads = leads
        self._presented: set[str] = set()
        """uids of pods whose tokens were presented."""
        self._connections: list[ClientConnection] = []
        pods = WorkerPods(operator.caches.pods.store, operator.caches.jobs.store, is_current=lambda: True)
        self._server = CoordinatorServer(
            operator.state,
            Authenticator(TokenVerifier(ISSUER.read).verify, pods.find_job),
            is_serving=lambda: self._leads,
            notify=lambda namespace, job, _at_once: operator.queue.put((namespace, job)),
            on_message=_METRICS.record_message,
            on_change=_METRICS.record_heartbeat_change,
        )
        self._listener = _OpenListener()
        self._server.http._listener = self._listener  # type: ignore[assignment]

    async def open(self) -> None:
        await self._server.start("", 0, None)

    async def close(self) -> None:
        """Close all connections, then stop the server."""
        for connection in self._connections:
            connection.transport.hang_up()
        await asyncio.sleep(_DRAIN_SECONDS)
        require(not self._server.streams.opened, "a stream is left open")
        require(self._server.http.limiter.anonymous == 0, "an anonymous connection is still counted")
        require(self._server.http.connections == 0, "a connection is left open")
        await self._server.stop()

    async def run_connection(self, fields: Json) -> None:
        """Open a connection, counted as by the real listener, and send its messages."""
        limiter = self._server.http.limiter
        source = (_text(fields.get("source")) or "10.0.0.1")[:LONGEST_ADDRESS]
        transport = Transport(source, stalled=fields.get("stalled") is True)
        client = limiter.track(source, transport.abort)
        if client is None:
            return
        connection = ClientConnection(transport)
        self._connections.append(connection)
        assert self._listener.server is not None
        transport.open(TrackedConnection(self._listener.server, limiter, client))
        messages = fields.get("messages")
        for message in messages[:MOST_SENDS] if isinstance(messages, list) else ():
            if isinstance(message, dict):
                await self._send(connection, message)
                await asyncio.sleep(0.01)

    async def _send(self, connection: ClientConnection, message: Json) -> None:
        pieces = _bounded_int(message.get("pieces"), 1)
        if "request" in message:
            data = self._request(message["request"]) if isinstance(message["request"], dict) else b""
            connection.send(data[: 2 * MAX_FRAME_BYTES], pieces)
        elif "frame" in message:
            connection.send(_encode_frame(message["frame"])[: 2 * MAX_FRAME_BYTES], pieces)
        elif "raw" in message:
            connection.send(_text(message["raw"]).encode("latin-1", "replace")[: 2 * MAX_FRAME_BYTES], pieces)
        elif "pause" in message:
            seconds = min(LONGEST_PAUSE, max(0.0, float(_bounded_int(message["pause"], 1))))
            self._operator.now += seconds
            await asyncio.sleep(seconds)
        elif "publish" in message:
            self._operator.state.publish(JOB, _membership(_bounded_int(message["publish"], 1)))
        elif "gone" in message:
            self._operator.state.forget_pod(JOB, f"uid-{message['gone']}"[:64])
        elif "port" in message:
            for target in self._operator.state.list_probe_targets():
                self._operator.state.record_port_open(target)
                self._operator.state.record_port_refused(target)
            self._operator.state.find_newly_silent()

    def _request(self, request: Json) -> bytes:
        headers = request.get("headers")
        lines = [f"{key}: {_text(value)}" for key, value in (headers.items() if isinstance(headers, dict) else ())]
        if authorization := self._authorization(request):
            lines.append(f"Authorization: {authorization}")
        body = _encode_body(request)
        if body and request.get("chunked") is not True:
            lines.append(f"Content-Length: {_bounded_int(request.get('length'), len(body))}")
        elif body:
            lines.append("Transfer-Encoding: chunked")
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        query = request.get("query")
        target = quote(_text(request.get("path")), safe="/%?&=*", errors="replace")
        if isinstance(query, dict) and query:
            target += "?" + urlencode({key: _text(value) for key, value in query.items()}, errors="replace")
        head = "\r\n".join([f"{_text(request.get('method'))} {target} HTTP/1.1", *lines])
        return head.encode("latin-1", "replace") + b"\r\n\r\n" + body

    def _authorization(self, request: Json) -> str:
        """Return the credentials: a valid token if `token` is the uid of a pod and no part of it is given."""
        uid = _text(request.get("token"))
        if "jose" in request or "claims" in request:
            parts = (base64.urlsafe_b64encode(_dump_json(request.get(part))).decode() for part in ("jose", "claims"))
            return f"Bearer {'.'.join(part.rstrip('=') for part in parts)}.{uid}"
        if uid not in {f"uid-{number}" for number in range(PODS + 1)}:
            return _text(request.get("authorization"))
        self._presented.add(uid)
        return f"Bearer {ISSUER.token(uid.replace('uid', 'llama-w'), uid)}"

    def check(self) -> None:
        """Raises InvariantError."""
        for connection in self._connections:
            connection.check(lambda sent: _MOST_RESPONSE_BYTES + _RESPONSE_BYTES_PER_BYTE * sent)
        agents = self._operator.state.list_agents(JOB)
        require(agents.keys() <= self._presented, f"received {agents.keys() - self._presented} without a token")
        require(self._operator.state.count_agents() == len(agents), "agents of an unknown job")
        for uid, view in agents.items():
            require(view.registration is not None and view.registration.pod_uid == uid, "a pod impersonates another")
            heartbeat = view.heartbeat
            require(
                heartbeat is None or len(heartbeat.model_dump_json()) <= MAX_FRAME_BYTES,
                "a heartbeat larger than a frame",
            )


def _encode_body(message: Json) -> bytes:
    if isinstance(message.get("raw"), str):
        return str(message["raw"]).encode("latin-1", "replace")
    return b"" if message.get("body") is None else _dump_json(message["body"])


def _encode_frame(frame: Any) -> bytes:
    frame = frame if isinstance(frame, dict) else {}
    body = _encode_body(frame)
    length = _bounded_int(frame.get("length"), len(body), 2**32 - 1)
    return bytes([_bounded_int(frame.get("kind"), 0) & 255]) + length.to_bytes(4, "big") + body


def _dump_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:1000]


def _bounded_int(value: Any, default: int, most: int = 2**31 - 1) -> int:
    return value if isinstance(value, int) and 0 < value <= most else default
