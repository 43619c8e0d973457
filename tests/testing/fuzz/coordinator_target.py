"""Everything that an agent, or any client of the port, can send to the coordinator: requests, tokens, frames.

A case is a list of connections, each with what is sent over it: requests put together of a method, a path, headers, a
token and a body, frames of the stream, raw text, and pauses. Behind them are the operator's own server (without TLS),
authenticator and caches, and its plan of the job. Invariants: every answer is one of the protocol's, and bounded by
what was sent; no message is accepted without a token of its pod; the plan uses the messages of agents; no connection
is left at the end.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from tests.testing.fuzz import objects
from tests.testing.fuzz.connection import Talk, Transport
from tests.testing.fuzz.invariants import require
from tests.testing.fuzz.schemas import edges, everything
from tests.testing.fuzz.world import NOW, World
from tests.testing.operator.wire_messages import member, membership
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    Membership,
    RegisterRequest,
)
from trainium_contract.wire.stream import STREAM_PATH, UPGRADE, FrameKind
from trainium_contract.wire.worker_env import TOKEN_AUDIENCE
from trainium_operator.cluster.coordinator_ports import WorkerPods
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.coordinator.server import CoordinatorServer
from trainium_operator.coordinator.streams import LONGEST_FRAME
from trainium_operator.http.listener import TrackedConnection
from trainium_operator.monitoring.metrics import Metrics
from trainium_operator.plan.manifests.config_maps import membership_map
from trainium_operator.plan.model.names import JobId

if TYPE_CHECKING:
    import ssl

    from aiohttp import web

    from trainium_operator.cluster.cache.store import Entry, Key

Json = dict[str, Any]

JOB = JobId("team", "llama", objects.JOB_UID)
PODS = 3
MOST_CONNECTIONS, MOST_SENDS = 8, 24
LONGEST_PAUSE = 120.0
LONGEST_ADDRESS = 64
"""Characters: the kernel gives the address of a connection, with an interface behind it at most."""
_OF_ANSWERS, _OF_EACH_BYTE = 64 << 10, 64
"""Bytes of answers in any case, and for each byte that was sent: a refusal is longer than the shortest request."""
_METRICS = Metrics(named_jobs=4)
MOST_SERIES = 500
_METRICS_EVERY = 256
"""Every so many cases; all cases share them."""
_PLENTY = 5.0


class CoordinatorTarget:
    """See Target."""

    name = "coordinator"
    expected: frozenset[str] = frozenset()
    storable = False

    def __init__(self) -> None:
        self._known: dict[str, dict[Key, Entry[Any]]] = {}
        """The job as it trains in `_generation`."""
        self._generation = 0
        self._runs = 0

    def seeds(self) -> list[Any]:
        """Return messages of agents, and of strangers."""
        full = {**everything(HeartbeatRequest.model_json_schema(by_alias=True)), **objects.HEARTBEAT}
        hello = {"frame": {"kind": FrameKind.REGISTER, "body": objects.REGISTER}}
        beat = {"frame": {"kind": FrameKind.HEARTBEAT, "body": objects.HEARTBEAT}}
        whole = {"frame": {"kind": FrameKind.HEARTBEAT, "body": full}}
        alive = {"frame": {"kind": FrameKind.KEEPALIVE, "raw": "\x00\x00\x00\x00\x00\x00\x00\x09"}}
        asked = {"after": "0", "podUid": "uid-0"}
        stream = {"request": _asked("GET", STREAM_PATH, query=asked, upgrade=UPGRADE)}
        posted = {"request": _asked("POST", STREAM_PATH, body=objects.REGISTER)}
        verdict = {**objects.HEARTBEAT, "phase": "Failed", "verdict": full["failures"][0], "failures": full["failures"]}
        unread = {"step": 0, "hangDetection": "Output", "problem": "the pattern matches no line"}
        program = {"frame": {"kind": FrameKind.HEARTBEAT, "body": {**objects.HEARTBEAT, "progress": unread}}}
        return [
            {
                "plan": True,
                "talks": [{"from": "10.0.0.1", "sends": [stream, hello, beat, alive, whole, {"pause": 31}, alive]}],
            },
            {"talks": [{"from": "10.0.0.1", "sends": [posted, stream]}]},
            {
                "talks": [
                    {
                        "from": "10.0.0.1",
                        "sends": [stream, hello, {"frame": {"kind": FrameKind.HEARTBEAT, "body": verdict}}],
                    }
                ]
            },
            {"talks": [{"from": "10.0.0.9", "sends": [{"raw": "GET / HTTP/1.1\r\nHost: a\r\n\r\n"}, {"pause": 20}]}]},
            {
                "plan": True,
                "generation": 7,
                "talks": [
                    {
                        "from": "10.0.0.1",
                        "sends": [stream, hello, {"publish": 8}, beat, {"gone": 0}, {"port": "refused"}],
                    },
                    {"from": "10.0.0.2", "stalled": True, "sends": [_claimed({"exp": NOW + 60})]},
                ],
            },
            {"leads": False, "talks": [{"from": "::1", "sends": [stream]}]},
            {"talks": [{"from": "10.0.0.1", "sends": [stream, hello, program]}]},
        ]

    def values(self) -> dict[str, list[Any]]:
        """Further values by key."""
        found = edges(HeartbeatRequest.model_json_schema(by_alias=True))
        for key, values in edges(RegisterRequest.model_json_schema(by_alias=True)).items():
            found.setdefault(key, []).extend(values)
        found["path"] = [STREAM_PATH, "/v1/%00/%2e%2e/stream", "*", "//"]
        found["method"] = ["GET", "POST", "PUT", "HEAD", "OPTIONS", "CONNECT", "TRACE", "PRI", "get"]
        found["plan"] = [True]
        found["token"] = ["uid-0", "uid-1", "uid-2", "uid-9", ""]
        found["kind"] = [*map(int, FrameKind), 0, 10, 255]
        found["length"] = [0, 1, LONGEST_FRAME, LONGEST_FRAME + 1, 2**32 - 1]
        found["Content-Encoding"] = ["gzip", "deflate", "br"]
        found["Transfer-Encoding"] = ["chunked", "gzip, chunked", "identity"]
        found["Expect"] = ["100-continue"]
        found["Connection"] = ["close", "keep-alive", "Upgrade"]
        return found

    async def run_case(self, case: Any) -> None:
        """Raises whatever should not happen."""
        if not isinstance(case, dict):
            return
        world = World()
        await world.open()
        generation = _whole(case.get("generation"), 1)
        if generation == self._generation:
            world.know(self._known)
        else:
            _train(world, generation)
            self._known, self._generation = world.entries(), generation
        world.state.publish(JOB, _membership(generation))
        front = _Front(world, leads=case.get("leads") is not False)
        await front.open()
        talks = case.get("talks")
        for each in talks[:MOST_CONNECTIONS] if isinstance(talks, list) else ():
            if isinstance(each, dict):
                await front.talk(each)
        await front.close()
        front.check()
        if case.get("plan") is True and world.state.agent_count():
            world.planned()
        self._runs += 1
        if self._runs % _METRICS_EVERY == 0:
            series = sum(len(metric.samples) for metric in _METRICS.registry.collect())
            require(series <= MOST_SERIES, f"{series} time series: metrics grow with what strangers send")


def _asked(method: str, path: str, *, query: Json | None = None, body: Any = None, upgrade: str = "") -> Json:
    headers = {"Host": "coordinator", "Content-Type": "application/json", "Accept-Encoding": "gzip"}
    headers |= {"Connection": "Upgrade", "Upgrade": upgrade} if upgrade else {}
    return {"method": method, "path": path, "query": query or {}, "headers": headers, "token": "uid-0", "body": body}


def _claimed(claims: Json) -> Json:
    """Return a request with a token of many claims."""
    pod = {"kubernetes.io": {"namespace": "team", "pod": {"name": "llama-w-1", "uid": "uid-1"}}}
    return {
        "request": {
            **_asked("GET", STREAM_PATH, query={"podUid": "uid-1"}, upgrade=UPGRADE),
            "claims": {**pod, **claims},
        }
    }


def _train(world: World, generation: int) -> None:
    """A job of two members and a spare."""
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
    world.see("TrainingJob", {"metadata": metadata, "spec": spec, "status": status})
    world.see("Node", {**objects.NODE, "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    for number in range(PODS):
        status = {"phase": "Running", "podIP": f"10.0.0.{number}", "conditions": [{"type": "Ready", "status": "True"}]}
        named = {**objects.OWNED, "name": f"llama-w-{number}", "uid": f"uid-{number}"}
        spec = {"nodeName": "n", "containers": [{"name": "worker"}]}
        world.see("Pod", {"metadata": named, "spec": spec, "status": status})
    record = world.caches.jobs.store.get((JOB.namespace, JOB.name))
    assert record is not None
    assert record.view is not None
    world.see("ConfigMap", membership_map(record.view, _membership(generation)))


def _membership(generation: int) -> Membership:
    return membership(generation, *(member(f"llama-w-{rank}", pod_uid=f"uid-{rank}") for rank in range(2)))


class _OpenListener:
    """A listener without a socket: tests add connections."""

    def __init__(self) -> None:
        self.server: web.Server | None = None

    def open(self, server: web.Server, _host: str, _port: int, _context: ssl.SSLContext | None) -> int:
        self.server = server
        return 0

    async def close(self) -> None:
        return


class _Front:
    """The server, and who has shown which token to it."""

    def __init__(self, world: World, *, leads: bool) -> None:
        self._world = world
        self._leads = leads
        self._shown: set[str] = set()
        """uids of pods of which a token was shown."""
        self._talks: list[Talk] = []
        pods = WorkerPods(world.caches.pods.store, world.caches.jobs.store, is_current=lambda: True)
        self._server = CoordinatorServer(
            world.state,
            Authenticator(self._review, pods, wall_clock=world.clock),
            is_serving=lambda: self._leads,
            notify=lambda namespace, job, _at_once: world.queue.put((namespace, job)),
            on_message=_METRICS.message,
            on_news=_METRICS.heartbeat_changed,
        )
        self._listener = _OpenListener()
        self._server.http._listener = self._listener  # type: ignore[assignment]

    async def open(self) -> None:
        await self._server.start("", 0, None)

    async def close(self) -> None:
        """Everybody hangs up; then the server stops."""
        for talk in self._talks:
            talk.transport.hang_up()
        await asyncio.sleep(_PLENTY)
        require(not self._server.streams.opened, "a stream is left open")
        require(self._server.http.limiter.anonymous == 0, "a stranger is still counted")
        require(self._server.http.connections == 0, "a connection is left open")
        await self._server.stop()

    async def talk(self, each: Json) -> None:
        """One connection; a stranger's address is counted as by the real listener."""
        limiter = self._server.http.limiter
        source = (_text(each.get("from")) or "10.0.0.1")[:LONGEST_ADDRESS]
        transport = Transport(source, stalled=each.get("stalled") is True)
        client = limiter.opened(source, transport.abort)
        if client is None:
            return
        talk = Talk(transport)
        self._talks.append(talk)
        assert self._listener.server is not None
        transport.open(TrackedConnection(self._listener.server, limiter, client))
        sends = each.get("sends")
        for send in sends[:MOST_SENDS] if isinstance(sends, list) else ():
            if isinstance(send, dict):
                await self._send(talk, send)
                await asyncio.sleep(0.01)

    async def _send(self, talk: Talk, send: Json) -> None:
        pieces = _whole(send.get("pieces"), 1)
        if "request" in send:
            data = self._request(send["request"]) if isinstance(send["request"], dict) else b""
            talk.send(data[: 2 * LONGEST_FRAME], pieces)
        elif "frame" in send:
            talk.send(_frame(send["frame"])[: 2 * LONGEST_FRAME], pieces)
        elif "raw" in send:
            talk.send(_text(send["raw"]).encode("latin-1", "replace")[: 2 * LONGEST_FRAME], pieces)
        elif "pause" in send:
            seconds = min(LONGEST_PAUSE, max(0.0, float(_whole(send["pause"], 1))))
            self._world.now += seconds
            await asyncio.sleep(seconds)
        elif "publish" in send:
            self._world.state.publish(JOB, _membership(_whole(send["publish"], 1)))
        elif "gone" in send:
            self._world.state.forget_pod(JOB, f"uid-{send['gone']}"[:64])
        elif "port" in send:
            for target in self._world.state.probe_targets():
                self._world.state.record_port_open(target)
                self._world.state.record_port_refused(target)
            self._world.state.newly_silent()

    def _request(self, asked: Json) -> bytes:
        headers = asked.get("headers")
        lines = [f"{key}: {_text(value)}" for key, value in (headers.items() if isinstance(headers, dict) else ())]
        if authorization := self._authorization(asked):
            lines.append(f"Authorization: {authorization}")
        body = _body(asked)
        if body and asked.get("chunked") is not True:
            lines.append(f"Content-Length: {_whole(asked.get('length'), len(body))}")
        elif body:
            lines.append("Transfer-Encoding: chunked")
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        query = asked.get("query")
        target = quote(_text(asked.get("path")), safe="/%?&=*", errors="replace")
        if isinstance(query, dict) and query:
            target += "?" + urlencode({key: _text(value) for key, value in query.items()}, errors="replace")
        head = "\r\n".join([f"{_text(asked.get('method'))} {target} HTTP/1.1", *lines])
        return head.encode("latin-1", "replace") + b"\r\n\r\n" + body

    def _authorization(self, asked: Json) -> str:
        """`Bearer head.claims.signature`; the signature names the pod that the token was made for."""
        token = _text(asked.get("token"))
        claims = base64.urlsafe_b64encode(_dumped(asked.get("claims", {}))).decode().rstrip("=")
        return f"Bearer e.{claims}.{token}" if token else _text(asked.get("authorization"))

    async def _review(self, spec: Json) -> Json:
        """The API server: a token is good whose signature is the uid of a pod."""
        uid = spec["token"].rpartition(".")[2]
        if uid not in {f"uid-{number}" for number in range(PODS + 1)}:
            return {"authenticated": False}
        self._shown.add(uid)
        name = f"llama-w-{uid.rpartition('-')[2]}"
        extra = {"authentication.kubernetes.io/pod-name": [name], "authentication.kubernetes.io/pod-uid": [uid]}
        user = {"username": "system:serviceaccount:team:default", "extra": extra}
        return {"authenticated": True, "audiences": [TOKEN_AUDIENCE], "user": user}

    def check(self) -> None:
        """Raises InvariantError."""
        for talk in self._talks:
            talk.check(lambda sent: _OF_ANSWERS + _OF_EACH_BYTE * sent)
        agents = self._world.state.agents(JOB)
        require(agents.keys() <= self._shown, f"received {agents.keys() - self._shown} without a token")
        require(self._world.state.agent_count() == len(agents), "agents of a job that there is not")
        for uid, view in agents.items():
            require(view.registration.pod_uid == uid, "one pod speaks for another")
            heartbeat_changed = view.heartbeat
            require(
                heartbeat_changed is None or len(heartbeat_changed.model_dump_json()) <= LONGEST_FRAME,
                "more is kept than may be sent",
            )


def _body(asked: Json) -> bytes:
    if isinstance(asked.get("raw"), str):
        return str(asked["raw"]).encode("latin-1", "replace")
    return b"" if asked.get("body") is None else _dumped(asked["body"])


def _frame(heartbeat_changed: Any) -> bytes:
    heartbeat_changed = heartbeat_changed if isinstance(heartbeat_changed, dict) else {}
    body = _body(heartbeat_changed)
    length = _whole(heartbeat_changed.get("length"), len(body), 2**32 - 1)
    return bytes([_whole(heartbeat_changed.get("kind"), 0) & 255]) + length.to_bytes(4, "big") + body


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:1000]


def _whole(value: Any, default: int, most: int = 2**31 - 1) -> int:
    return value if isinstance(value, int) and 0 < value <= most else default
