"""A coordinator for tests over real HTTPS, which can refuse, move its leadership, and publish memberships."""

import asyncio
import json
import re
import ssl
import time

import trustme

from tests.testing.operator.wire_messages import member, membership
from trainium_contract.faults.classify import classify_exit_code
from trainium_contract.faults.responses import Response
from trainium_contract.wire import messages as m
from trainium_contract.wire.stream import HEAD_BYTES, FrameKind, encode_frame, parse_frame_header


class Authority:
    """A certificate authority of one test."""

    def __init__(self) -> None:
        self._authority = trustme.CA()

    @property
    def pem(self) -> bytes:
        return self._authority.cert_pem.bytes()

    def server_context(self, ip: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._authority.issue_cert(ip).configure_cert(context)
        return context


class CoordinatorState:
    """The state that all replicas of the coordinator share."""

    def __init__(self) -> None:
        self.heartbeat_seconds = 0.2
        self.registered: dict[str, m.RegisterRequest] = {}
        self.registrations: list[tuple[str, str]] = []
        self.heartbeats: dict[str, list[m.HeartbeatRequest]] = {}
        self.membership: m.Membership | None = None
        self.refused: list[tuple[str, int]] = []
        self.changed = asyncio.Condition()
        self.endpoints: m.RoleEndpoints | None = None
        self.imported: m.ImportedModules | None = None
        self.token = "token-1"
        self.failed = False
        """Whether the job has failed, whatever its agents report."""
        self.deleted = False
        """Whether the job is deleted; its pods still run."""

    async def publish_endpoints(self, endpoints: m.RoleEndpoints) -> None:
        async with self.changed:
            self.endpoints = endpoints
            self.changed.notify_all()

    async def publish(
        self,
        pods: list[str],
        transition: m.Transition = m.Transition.IMMEDIATE,
        processes: int = 1,
        grace_seconds: float | None = None,
    ) -> m.Membership:
        addresses = {"pod_uid", "pod_ip", "node_name", "rendezvous_port"}
        members = [
            member(pod, grace_seconds=grace_seconds, **self.registered[pod].model_dump(include=addresses))
            for pod in pods
        ]
        generation = (self.membership.generation if self.membership else 0) + 1
        async with self.changed:
            self.membership = membership(generation, *members, transition=transition, processes_per_node=processes)
            self.changed.notify_all()
        return self.membership


class CoordinatorReplica:
    """One replica of the coordinator."""

    def __init__(self, state: CoordinatorState, ip: str, authority: Authority) -> None:
        self.state, self.ip, self.authority = state, ip, authority
        self.port = 0
        self._leads = True
        self._server: asyncio.Server | None = None
        self._streams: set[asyncio.Task] = set()

    @property
    def leader(self) -> bool:
        return self._leads

    @leader.setter
    def leader(self, leads: bool) -> None:
        """Set whether this replica leads; end its streams if it does not."""
        self._leads = leads
        if not leads:
            self.end_streams()

    def end_streams(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._handle_connection, self.ip, self.port, ssl=self.authority.server_context(self.ip), reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self.end_streams()
            await asyncio.gather(*self._streams, return_exceptions=True)
            self._server = None

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._streams.add(task)
        try:
            await self._stream(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._streams.discard(task)
            writer.transport.abort()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if refusal := self._refusal(head):
            status, body = refusal[0], json.dumps({"error": refusal[1]})
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        publisher = asyncio.create_task(self._send_memberships(writer, int(re.search(r"after=(\d+)", head)[1])))
        try:
            while True:
                kind, length = parse_frame_header(await reader.readexactly(HEAD_BYTES))
                self._receive(writer, kind, await reader.readexactly(length))
        finally:
            publisher.cancel()

    def _refusal(self, head: str) -> tuple[int, str] | None:
        if not self._leads:
            refusal = 503, "not leader"
        elif self.state.deleted:
            refusal = 410, "the job no longer exists"
        elif f"Authorization: Bearer {self.state.token}\r\n" not in head:
            refusal = 401, "the token is not valid"
        else:
            return None
        self.state.refused.append((self.ip, refusal[0]))
        return refusal

    def _receive(self, writer: asyncio.StreamWriter, kind: int, payload: bytes) -> None:
        state = self.state
        current = state.membership.generation if state.membership else 0
        if kind == FrameKind.REGISTER:
            request = m.RegisterRequest.model_validate_json(payload)
            state.registered[request.pod_name] = request
            state.registrations.append((request.pod_name, self.ip))
            response = m.RegisterResponse(
                heartbeat_seconds=state.heartbeat_seconds, membership=state.membership, time=time.time()
            )
            send(writer, FrameKind.REGISTERED, response)
            if state.imported is not None:
                send(writer, FrameKind.IMPORTED_MODULES, state.imported)
        elif kind == FrameKind.IMPORTED_MODULES:
            state.imported = m.ImportedModules.model_validate_json(payload)
        elif kind == FrameKind.HEARTBEAT:
            heartbeat = m.HeartbeatRequest.model_validate_json(payload)
            if heartbeat.generation < current:
                refusal = m.ErrorResponse(error="older generation", generation=current, status=409)
                send(writer, FrameKind.ERROR, refusal)
                return
            state.heartbeats.setdefault(heartbeat.pod_name, []).append(heartbeat)
            verdict = heartbeat.verdict
            # As the operator decides; the test decides about the other codes.
            failed = verdict is not None and classify_exit_code(verdict.exit_code).response is Response.STOP
            response = m.HeartbeatResponse(
                generation=current, full_heartbeat_seconds=0.0, time=time.time(), job_failed=failed or state.failed
            )
            send(writer, FrameKind.HEARTBEAT_ACK, response)

    async def _send_memberships(self, writer: asyncio.StreamWriter, after: int) -> None:
        sent: m.RoleEndpoints | None = None
        async with self.state.changed:
            while True:
                membership, endpoints = self.state.membership, self.state.endpoints
                if endpoints is not None and endpoints != sent:
                    sent = endpoints
                    send(writer, FrameKind.ROLE_ENDPOINTS, endpoints)
                if membership is not None and membership.generation > after:
                    after = membership.generation
                    send(writer, FrameKind.MEMBERSHIP, membership)
                await self.state.changed.wait()


def send(writer: asyncio.StreamWriter, kind: FrameKind, message: m.WireMessage) -> None:
    writer.write(encode_frame(kind, message.model_dump_json(by_alias=True, exclude_none=True).encode()))
