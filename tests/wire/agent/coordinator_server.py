"""A coordinator for tests: real HTTPS, the contract's messages, and knobs for every way in which it can misbehave."""

from __future__ import annotations

import asyncio
import ssl

import trustme
from aiohttp import web

from trainium_contract.faults.causes import Cause
from trainium_contract.wire import messages as m


class Authority:
    """A certificate authority made for one test."""

    def __init__(self) -> None:
        self._authority = trustme.CA()

    @property
    def pem(self) -> bytes:
        return self._authority.cert_pem.bytes()

    def server(self, ip: str) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._authority.issue_cert(ip).configure_cert(context)
        return context


class Jobs:
    """What all replicas of the coordinator know: it survives any of them."""

    def __init__(self) -> None:
        self.heartbeat_seconds = 0.2
        self.registered: dict[str, m.RegisterRequest] = {}
        self.registrations: list[tuple[str, str]] = []
        self.heartbeats: dict[str, list[m.HeartbeatRequest]] = {}
        self.membership: m.Membership | None = None
        self.refused: list[tuple[str, int]] = []
        self.changed = asyncio.Condition()
        self.token = "token-1"

    async def publish(
        self, pods: list[str], transition: m.Transition = m.Transition.IMMEDIATE, processes: int = 1
    ) -> m.Membership:
        members = [
            m.Member(
                pod_uid=self.registered[pod].pod_uid,
                pod_name=pod,
                pod_ip=self.registered[pod].pod_ip,
                node_name=self.registered[pod].node_name,
                node_rank=rank,
                rendezvous_port=self.registered[pod].rendezvous_port,
                seals=self.registered[pod].seals,
            )
            for rank, pod in enumerate(pods)
        ]
        generation = (self.membership.generation if self.membership else 0) + 1
        async with self.changed:
            self.membership = m.Membership(
                generation=generation,
                transition=transition,
                cause=Cause.RESIZE,
                members=tuple(members),
                processes_per_node=processes,
            )
            self.changed.notify_all()
        return self.membership

    def last(self, pod: str) -> m.HeartbeatRequest | None:
        beats = self.heartbeats.get(pod)
        return beats[-1] if beats else None


class Server:
    """One replica of the coordinator."""

    def __init__(self, jobs: Jobs, ip: str, authority: Authority) -> None:
        self.jobs, self.ip, self.authority = jobs, ip, authority
        self.leader = True
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post(m.REGISTER_PATH, self._register)
        app.router.add_post(m.HEARTBEAT_PATH, self._heartbeat)
        app.router.add_get(m.MEMBERSHIP_PATH, self._membership)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner,
            self.ip,
            self.port,
            ssl_context=self.authority.server(self.ip),
            reuse_address=True,
        )
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _refuse(self, request: web.Request) -> web.Response | None:
        status = 0
        if not self.leader:
            status, error = 503, "not leader"
        elif request.headers.get("Authorization") != f"Bearer {self.jobs.token}":
            status, error = 401, "the token is not valid"
        if not status:
            return None
        self.jobs.refused.append((self.ip, status))
        return answer(m.ErrorResponse(error=error), status)

    async def _register(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        body = m.RegisterRequest.model_validate(await request.json())
        self.jobs.registered[body.pod_name] = body
        self.jobs.registrations.append((body.pod_name, self.ip))
        return answer(
            m.RegisterResponse(heartbeat_seconds=self.jobs.heartbeat_seconds, membership=self.jobs.membership)
        )

    async def _heartbeat(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        body = m.HeartbeatRequest.model_validate(await request.json())
        current = self.jobs.membership.generation if self.jobs.membership else 0
        if body.generation < current:
            return answer(m.ErrorResponse(error="older generation", generation=current), 409)
        self.jobs.heartbeats.setdefault(body.pod_name, []).append(body)
        return answer(m.HeartbeatResponse(generation=current))

    async def _membership(self, request: web.Request) -> web.Response:
        if refusal := self._refuse(request):
            return refusal
        after = int(request.query["after"])

        def newer() -> bool:
            return self.jobs.membership is not None and self.jobs.membership.generation > after

        async with self.jobs.changed:
            try:
                await asyncio.wait_for(self.jobs.changed.wait_for(newer), float(request.query["timeoutSeconds"]))
            except TimeoutError:
                return web.Response(status=204)
        return answer(self.jobs.membership)


def answer(message: m.MessageModel, status: int = 200) -> web.Response:
    return web.json_response(message.to_wire(), status=status)
