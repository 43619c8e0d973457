"""One simulated agent: it speaks the real protocol over real TLS with a real token, and trains nothing.

It does on the wire what the agent of a worker pod does: registers with whoever leads, over a stream or, as the version
before did, with a long poll for membership and heartbeats beside it; gives a sign of life once a second, reports
phases, steps, failures and restarts, and starts over when the coordinator is gone.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode

from benchmarks.fleetlab.agents.stream import StreamWire
from benchmarks.fleetlab.agents.wire import Endpoint, Wire
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.membership_change import MembershipChange, applied
from trainium_contract.wire.messages import (
    HEARTBEAT_PATH,
    MEMBERSHIP_PATH,
    REGISTER_PATH,
    HeartbeatRequest,
    Membership,
    ProcessFailure,
    Progress,
    RegisterRequest,
    RestartRecord,
    WorkerPhase,
)
from trainium_contract.wire.stream import FrameKind, alive, share_of_pause, tells_news

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.fleetlab.agents.wire import Reply
    from trainium_contract.base import MessageModel

_REQUEST_SECONDS = 15.0
_POLL_SECONDS = 25
_LONGEST_BACKOFF = 3.0
_GONE = (401, 403, 404, 503)
_KEPT = 4
"""Of the newest memberships."""
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """Who the agent speaks for."""

    namespace: str
    job: str
    name: str
    uid: str
    ip: str
    node: str
    token: str


class Job:
    """What all agents of one job share: the step, and memberships as they were parsed once for all of them."""

    def __init__(self, *, streams: bool = True) -> None:
        """`streams` off: as agents of the version before talk."""
        self.streams = streams
        self.began = time.monotonic()
        self.learned: dict[int, dict[str, float]] = {}
        """Generation -> pod uid -> when that agent heard of it."""
        self.served: dict[str, float] = {}
        """Pod uid -> when that agent last registered."""
        self.latencies: list[float] = []
        self.errors: dict[str, int] = {}
        self.changed = asyncio.Condition()
        self._told: dict[bytes, tuple[int, frozenset[str]]] = {}
        """The newest frames, as they were read."""
        self._memberships: dict[int, Membership] = {}
        self._stalled: float | None = None

    @property
    def step(self) -> int:
        """One step a second, while all members are there."""
        return int((self._stalled or time.monotonic()) - self.began)

    def stall(self) -> None:
        """A member is lost: the others wait for it."""
        self._stalled = self._stalled or time.monotonic()

    def go_on(self) -> None:
        """A new generation trains from where the last one stood."""
        if self._stalled is not None:
            self.began += time.monotonic() - self._stalled
            self._stalled = None

    def membership(self, body: bytes, *, change: bool = False) -> tuple[int, frozenset[str]]:
        """Generation and members; `change`: the frame tells what is another than in the generation before."""
        found = self._told.get(body)
        if found is None:
            if change:
                told = MembershipChange.model_validate_json(body)
                whole = applied(told, self._memberships.get(told.since))
            else:
                whole = Membership.model_validate_json(body)
            found = whole.generation, frozenset(member.pod_uid for member in whole.members)
            _keep(self._told, body, found)
            _keep(self._memberships, whole.generation, whole)
        return found

    def failed(self, kind: str) -> None:
        """Count an exchange that did not work."""
        self.errors[kind] = self.errors.get(kind, 0) + 1


@dataclass(slots=True)
class Agent:
    """See the module."""

    pod: Pod
    shared: Job
    endpoints: Sequence[Endpoint]
    registered: bool = False
    silent: bool = False
    generation: int = 0
    attempt: int = 0
    known: int = 0
    member: bool = False
    phase: WorkerPhase = WorkerPhase.STANDBY
    on_change: Callable[[], None] = lambda: None
    _failures: list[ProcessFailure] = field(default_factory=list)
    _restarts: list[RestartRecord] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _poll_again: asyncio.Event = field(default_factory=asyncio.Event)
    _seconds: float = 1.0
    _detail_seconds: float = 0.0
    _beat_at: float = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        backoff = 0.1
        while True:
            began = time.monotonic()
            for endpoint in random.sample(self.endpoints, len(self.endpoints)):
                try:
                    await self._stay(endpoint)
                except _LostError as error:
                    self.shared.failed(str(error))
                except OSError as error:
                    self.shared.failed(type(error).__name__)
                self.registered = False
            if time.monotonic() - began > 5.0:
                backoff = 0.1
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _LONGEST_BACKOFF)

    def crash(self, *, here: bool) -> None:
        """A process of the job died, on this pod or (`here` off) on another: restart in place."""
        now = time.time()
        if here:
            failure = ProcessFailure(
                sequence=len(self._failures),
                generation=self.generation,
                attempt=self.attempt,
                rank=0,
                exit_code=137,
                step=self.shared.step,
                message="killed",
                at=now,
            )
            self._failures = [*self._failures, failure][-8:]
        self.attempt += 1
        self.phase = WorkerPhase.LOADING
        record = RestartRecord(
            sequence=len(self._restarts),
            generation=self.generation,
            attempt=self.attempt,
            cause=Cause.CRASH if here else Cause.PEER_LOST,
            failed_at=now,
            detected_at=now,
            resumed_at=now + 1.0,
            step_before=self.shared.step,
            resume_step=self.shared.step,
        )
        self._restarts = [*self._restarts, record][-8:]
        self._news.set()

    async def _stay(self, endpoint: Endpoint) -> None:
        headers = {"Authorization": f"Bearer {self.pod.token}"}
        if self.shared.streams:
            await self._stay_on_a_stream(endpoint, headers)
            return
        beats, polls = Wire(endpoint, headers), Wire(endpoint, headers)
        try:
            await self._register(beats)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat(beats))
                group.create_task(self._poll(polls))
        except* (_LostError, OSError) as group_error:
            raise group_error.exceptions[0] from None
        finally:
            beats.close()
            polls.close()

    async def _stay_on_a_stream(self, endpoint: Endpoint, headers: dict[str, str]) -> None:
        asked: list[float] = []
        welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(kind: int, payload: bytes) -> None:
            if self.silent:
                return
            if kind in (FrameKind.MEMBERSHIP, FrameKind.MEMBERSHIP_CHANGE):
                self._learn(payload, change=kind == FrameKind.MEMBERSHIP_CHANGE)
            elif kind == FrameKind.HEARD:
                self.shared.latencies.append(time.monotonic() - asked.pop(0))
                self._detail_seconds = json.loads(payload)["detailSeconds"]
            elif kind == FrameKind.WELCOME:
                self._welcomed(payload)
                welcomed.set_result(None)
            elif kind == FrameKind.REFUSED:
                status = json.loads(payload)["status"]
                if status == 409:
                    asked.pop(0)
                else:
                    stream.end(status)

        stream = StreamWire(take)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await stream.open(endpoint, headers, {"podUid": self.pod.uid, "after": self.known, "changes": 1})
                if not stream.lost.done():
                    stream.send(FrameKind.REGISTER, _encoded(self._introduction()))
                    ends: set[asyncio.Future[Any]] = {welcomed, stream.lost}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            beating = asyncio.create_task(self._beat_on(stream, asked))
            try:
                raise _LostError(f"stream {await stream.lost}")
            finally:
                beating.cancel()
        finally:
            stream.close()

    async def _beat_on(self, stream: StreamWire, asked: list[float]) -> None:
        self._beat_at = time.monotonic() + random.uniform(0.0, self._seconds)
        told: HeartbeatRequest | None = None
        told_at, share = 0.0, 1.0
        while not stream.lost.done():
            if not self.silent:
                now, message = time.monotonic(), self._heartbeat()
                news = tells_news(told, message)
                if news or now - told_at >= self._detail_seconds * share:
                    asked.append(now)
                    told, told_at, share = message, now, share_of_pause(random.random(), after_news=news)
                    stream.send(FrameKind.HEARTBEAT, _encoded(message))
                else:
                    stream.send(FrameKind.ALIVE, alive(message))
            await self._until_next_beat()

    async def _register(self, wire: Wire) -> None:
        reply = await self._exchange(wire, REGISTER_PATH, self._introduction())
        self._welcomed(reply.body)

    def _introduction(self) -> RegisterRequest:
        pod = self.pod
        return RegisterRequest(
            namespace=pod.namespace,
            job=pod.job,
            pod_name=pod.name,
            pod_uid=pod.uid,
            pod_ip=pod.ip,
            node_name=pod.node,
            rendezvous_port=29500,
            agent_version="bench",
        )

    def _welcomed(self, body: bytes) -> None:
        welcome = json.loads(body)
        self.registered = True
        self.shared.served[self.pod.uid] = time.monotonic()
        self._seconds = welcome["heartbeatSeconds"]
        if welcome.get("membership"):
            self._learn(json.dumps(welcome["membership"]).encode())
        self.on_change()

    async def _beat(self, wire: Wire) -> None:
        # Spread over the interval, as agents that started at different times are.
        self._beat_at = time.monotonic() + random.uniform(0.0, self._seconds)
        while True:
            if not self.silent:
                began = time.monotonic()
                reply = await self._exchange(wire, HEARTBEAT_PATH, self._heartbeat())
                self.shared.latencies.append(time.monotonic() - began)
                if reply.status == 409 or json.loads(reply.body)["generation"] > self.known:
                    self._poll_again.set()
            await self._until_next_beat()

    async def _until_next_beat(self) -> None:
        now = time.monotonic()
        self._beat_at = max(self._beat_at + self._seconds * random.uniform(0.9, 1.1), now)
        self._news.clear()
        try:
            async with asyncio.timeout(self._beat_at - now):
                await self._news.wait()
        except TimeoutError:
            if self.member:
                self.phase = WorkerPhase.TRAINING

    def _heartbeat(self) -> HeartbeatRequest:
        pod, step = self.pod, self.shared.step
        progress = None
        if self.member and self.phase is WorkerPhase.TRAINING:
            progress = Progress(
                step=step,
                loss=2.0 + 1.0 / (1 + step),
                tokens_per_second=1e6,
                resume_step=0,
                samples=step,
                memory_step=step,
                durable_step=step // 300 * 300,
                updated=time.time(),
                productive_seconds=float(step),
            )
        return HeartbeatRequest(
            namespace=pod.namespace,
            job=pod.job,
            pod_name=pod.name,
            pod_uid=pod.uid,
            generation=self.generation,
            attempt=self.attempt,
            phase=self.phase,
            progress=progress,
            failures=tuple(self._failures),
            restarts=tuple(self._restarts),
            ready=True,
        )

    async def _poll(self, wire: Wire) -> None:
        pod = self.pod
        path = MEMBERSHIP_PATH.format(namespace=pod.namespace, job=pod.job)
        while not self.silent:
            query = urlencode({"after": self.known, "podUid": pod.uid, "timeoutSeconds": _POLL_SECONDS})
            reply = await wire.request("GET", f"{path}?{query}", seconds=_POLL_SECONDS + _REQUEST_SECONDS)
            if reply.status == 200:
                self._learn(reply.body)
            elif reply.status != 204:
                raise _LostError(f"poll {reply.status}")
        await asyncio.Event().wait()

    def _learn(self, body: bytes, *, change: bool = False) -> None:
        generation, members = self.shared.membership(body, change=change)
        if generation <= self.known or self.silent:
            return
        self.known = generation
        self.shared.go_on()
        self.shared.learned.setdefault(generation, {})[self.pod.uid] = time.monotonic()
        self.member = self.pod.uid in members
        self.phase = WorkerPhase.STANDBY
        if self.member:
            self.generation, self.attempt, self.phase = generation, 0, WorkerPhase.JOINING
        self._news.set()
        self.on_change()

    async def _exchange(self, wire: Wire, path: str, message: MessageModel) -> Reply:
        reply = await wire.request("POST", path, _encoded(message), seconds=_REQUEST_SECONDS)
        if reply.status in _GONE or reply.status >= 500 or reply.status == 400:
            raise _LostError(f"{path.rpartition('/')[2]} {reply.status}")
        return reply


def _encoded(message: MessageModel) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_none=True).encode()


def _keep(kept: dict[K, V], key: K, value: V) -> None:
    kept[key] = value
    if len(kept) > _KEPT:
        del kept[next(iter(kept))]


class _LostError(Exception):
    """The coordinator at this address does not serve us."""
