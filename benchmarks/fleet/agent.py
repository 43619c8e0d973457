"""Simulate an agent: the real protocol over real TLS with a real token, without training.

It sends the same messages as the agent of a worker pod: it registers with the leader over a stream, sends a heartbeat
once a second, reports phases, steps, failures and restarts, and reconnects when the coordinator ends. The client of the
real agent would distort the figures of thousands in one process: its time limits assume a machine for each, and it
parses each membership by itself.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.fleet.stream_connection import DisconnectedError, Endpoint, StreamConnection
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.membership_change import MembershipChange, apply_change
from trainium_contract.wire.messages import (
    HeartbeatRequest,
    Membership,
    ProcessFailure,
    Progress,
    RegisterRequest,
    RestartRecord,
    WorkerPhase,
)
from trainium_contract.wire.stream import FrameKind, draw_jitter, encode_keepalive, must_send_now
from trainium_operator.bounded_dict import BoundedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainium_contract.base import MessageModel

_REQUEST_SECONDS = 15.0
_MAX_BACKOFF_SECONDS = 3.0
_CACHE_SIZE = 4
"""Number of cached memberships, which are parsed once for all agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The pod of an agent."""

    namespace: str
    job: str
    name: str
    uid: str
    ip: str
    node: str
    token: str


class JobState:
    """The state that all agents of a job share: the step, and memberships that are parsed once for all agents."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.received_at: dict[int, dict[str, float]] = {}
        """Time at which each agent received a generation, by generation and pod uid."""
        self.registered_at: dict[str, float] = {}
        """Time of each agent's last registration, by pod uid."""
        self.latencies: list[float] = []
        self.errors: dict[str, int] = {}
        self.changed = asyncio.Condition()
        self.parse_membership = functools.lru_cache(_CACHE_SIZE)(self._parse_membership)
        """Returns generation and members; with the flag, of a frame with the difference to an earlier generation."""
        self._memberships: BoundedDict[int, Membership] = BoundedDict(_CACHE_SIZE)
        self._stalled_at: float | None = None

    @property
    def step(self) -> int:
        """Completed steps: one a second while no member is missing."""
        return int((self._stalled_at or time.monotonic()) - self.started_at)

    def stall(self) -> None:
        """Stop the steps, because a member failed and the others wait for it."""
        self._stalled_at = self._stalled_at or time.monotonic()

    def resume(self) -> None:
        """Continue at the step at which the last generation stopped."""
        if self._stalled_at is not None:
            self.started_at += time.monotonic() - self._stalled_at
            self._stalled_at = None

    def _parse_membership(self, body: bytes, is_change: bool) -> tuple[int, frozenset[str]]:
        if is_change:
            difference = MembershipChange.model_validate_json(body)
            membership = apply_change(difference, self._memberships.get(difference.since))
        else:
            membership = Membership.model_validate_json(body)
        self._memberships[membership.generation] = membership
        return membership.generation, frozenset(member.pod_uid for member in membership.members)

    def count_error(self, kind: str) -> None:
        """Count a connection that failed."""
        self.errors[kind] = self.errors.get(kind, 0) + 1


@dataclass(slots=True)
class Agent:
    """A simulated agent."""

    pod: Pod
    shared: JobState
    endpoints: Sequence[Endpoint]
    registered: bool = False
    silent: bool = False
    generation: int = 0
    attempt: int = 0
    newest_generation: int = 0
    member: bool = False
    phase: WorkerPhase = WorkerPhase.STANDBY
    on_change: Callable[[], None] = lambda: None
    _failures: list[ProcessFailure] = field(default_factory=list)
    _restarts: list[RestartRecord] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _heartbeat_seconds: float = 1.0
    _full_heartbeat_seconds: float = 0.0
    _next_heartbeat_at: float = 0.0

    async def run(self) -> None:
        """Stay connected to the coordinator until cancelled."""
        backoff = 0.1
        while True:
            started_at = time.monotonic()
            for endpoint in random.sample(self.endpoints, len(self.endpoints)):
                try:
                    await self._serve_stream(endpoint)
                except DisconnectedError as error:
                    self.shared.count_error(str(error))
                except OSError as error:
                    self.shared.count_error(type(error).__name__)
                self.registered = False
            if time.monotonic() - started_at > 5.0:
                backoff = 0.1
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    def crash(self, *, in_this_pod: bool) -> None:
        """Restart in place after a process failed in this pod or, without `in_this_pod`, in another one."""
        now = time.time()
        if in_this_pod:
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
            cause=Cause.CRASH if in_this_pod else Cause.PEER_LOST,
            failed_at=now,
            detected_at=now,
            resumed_at=now + 1.0,
            step_before=self.shared.step,
            resume_step=self.shared.step,
        )
        self._restarts = [*self._restarts, record][-8:]
        self._changed.set()

    async def _serve_stream(self, endpoint: Endpoint) -> None:
        headers = {"Authorization": f"Bearer {self.pod.token}"}
        unacknowledged: list[float] = []
        registration: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def handle(kind: int, payload: bytes) -> None:
            if self.silent:
                return
            if kind in (FrameKind.MEMBERSHIP, FrameKind.MEMBERSHIP_CHANGE):
                self._apply_membership(payload, change=kind == FrameKind.MEMBERSHIP_CHANGE)
            elif kind == FrameKind.HEARTBEAT_ACK:
                self.shared.latencies.append(time.monotonic() - unacknowledged.pop(0))
                self._full_heartbeat_seconds = json.loads(payload)["fullHeartbeatSeconds"]
            elif kind == FrameKind.REGISTERED:
                self._handle_registration(payload)
                registration.set_result(None)
            elif kind == FrameKind.ERROR:
                status = json.loads(payload)["status"]
                if status == 409:
                    unacknowledged.pop(0)
                else:
                    stream.end(status)

        stream = StreamConnection(handle)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await stream.open(endpoint, headers, {"podUid": self.pod.uid, "after": self.newest_generation})
                if not stream.closed.done():
                    stream.send(FrameKind.REGISTER, _encode(self._register_request()))
                    first_of: set[asyncio.Future[Any]] = {registration, stream.closed}
                    await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
            heartbeats = asyncio.create_task(self._send_heartbeats(stream, unacknowledged))
            try:
                raise DisconnectedError(f"stream {await stream.closed}")
            finally:
                heartbeats.cancel()
        finally:
            stream.close()

    async def _send_heartbeats(self, stream: StreamConnection, unacknowledged: list[float]) -> None:
        self._next_heartbeat_at = time.monotonic() + random.uniform(0.0, self._heartbeat_seconds)
        last: HeartbeatRequest | None = None
        last_at, jitter = 0.0, 1.0
        while not stream.closed.done():
            if not self.silent:
                now, message = time.monotonic(), self._encode_heartbeat()
                must_send = must_send_now(last, message)
                if must_send or now - last_at >= self._full_heartbeat_seconds * jitter:
                    unacknowledged.append(now)
                    last, last_at, jitter = message, now, draw_jitter(random.random(), after_change=must_send)
                    stream.send(FrameKind.HEARTBEAT, _encode(message))
                else:
                    stream.send(FrameKind.KEEPALIVE, encode_keepalive(message))
            await self._wait_for_next_heartbeat()

    def _register_request(self) -> RegisterRequest:
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

    def _handle_registration(self, body: bytes) -> None:
        response = json.loads(body)
        self.registered = True
        self.shared.registered_at[self.pod.uid] = time.monotonic()
        self._heartbeat_seconds = response["heartbeatSeconds"]
        if response.get("membership"):
            self._apply_membership(json.dumps(response["membership"]).encode())
        self.on_change()

    async def _wait_for_next_heartbeat(self) -> None:
        now = time.monotonic()
        self._next_heartbeat_at = max(self._next_heartbeat_at + self._heartbeat_seconds * random.uniform(0.9, 1.1), now)
        self._changed.clear()
        try:
            async with asyncio.timeout(self._next_heartbeat_at - now):
                await self._changed.wait()
        except TimeoutError:
            if self.member:
                self.phase = WorkerPhase.TRAINING

    def _encode_heartbeat(self) -> HeartbeatRequest:
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

    def _apply_membership(self, body: bytes, *, change: bool = False) -> None:
        generation, members = self.shared.parse_membership(body, change)
        if generation <= self.newest_generation or self.silent:
            return
        self.newest_generation = generation
        self.shared.resume()
        self.shared.received_at.setdefault(generation, {})[self.pod.uid] = time.monotonic()
        self.member = self.pod.uid in members
        self.phase = WorkerPhase.STANDBY
        if self.member:
            self.generation, self.attempt, self.phase = generation, 0, WorkerPhase.JOINING
        self._changed.set()
        self.on_change()


def _encode(message: MessageModel) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_none=True).encode()
