"""A coordinator that knows the keys of `ISSUER`; pods called `w-…` are its workers."""

import asyncio
import ssl
import time
from typing import Any

from tests.testing.api.token_issuer import ISSUER
from tests.testing.operator import wire_messages
from tests.testing.operator.stream_client import SWITCHING, StreamClient
from trainium_contract.wire.messages import Membership
from trainium_contract.wire.stream import FrameKind
from trainium_operator.coordinator.authentication import Authenticator
from trainium_operator.coordinator.certificates import renew_material
from trainium_operator.coordinator.server import CoordinatorServer
from trainium_operator.coordinator.state import CoordinatorState
from trainium_operator.coordinator.token_verifier import KeysUnavailableError, TokenVerifier
from trainium_operator.http.errors import PodDeletedError
from trainium_operator.http.tls import ServerTls
from trainium_operator.plan.model.names import JobId

LLAMA = JobId("team", "llama", "job-uid")


def membership(generation: int, *pods: str) -> Membership:
    return wire_messages.membership(generation, *map(wire_messages.member, pods or ("w-0", "w-1")))


def _identity(pod: str) -> dict[str, Any]:
    return {"namespace": "team", "job": "llama", "protocol": 2, "podName": pod, "podUid": f"uid-{pod}"}


def register(pod: str = "w-0", **changes: Any) -> dict[str, Any]:
    address = {"podIp": "127.0.0.2", "nodeName": "n", "rendezvousPort": 29500, "agentVersion": "1"}
    return {**_identity(pod), **address, **changes}


def heartbeat(pod: str = "w-0", **changes: Any) -> dict[str, Any]:
    return {**_identity(pod), "generation": 1, "phase": "Training", **changes}


def tls_of_server() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server, and of clients that trust it."""
    material, tls = renew_material(None, ("localhost",), time.time()), ServerTls()
    tls.load(material.server_cert, material.server_key)
    return tls.context, ssl.create_default_context(cadata=material.ca_bundle.decode())


class CoordinatorFixture:
    """A coordinator, and a stream for each pod that sends something."""

    def __init__(self) -> None:
        self.state = CoordinatorState(time.time)
        self.leading = True
        self.orphaned: set[str] = set()
        """Pods whose job was deleted."""
        self.serving_event: asyncio.Event | None = None
        self.api_up = True
        self.notifications: list[tuple[str, str, bool]] = []
        self.server = CoordinatorServer(
            self.state,
            Authenticator(TokenVerifier(self.read_keys).verify, self.find_job),
            is_serving=lambda: self.leading,
            notify=lambda *notification: self.notifications.append(notification),
            until_serving=lambda: self.serving_event.wait() if self.serving_event is not None else None,
        )
        self.port = 0
        self.trust: ssl.SSLContext | None = None
        """Of the streams that `send` opens; none without TLS."""
        self._streams: dict[tuple[str, str | None], StreamClient] = {}

    def find_job(self, namespace: str, pod_name: str, pod_uid: str) -> JobId | None:
        if pod_name in self.orphaned:
            raise PodDeletedError(f"the TrainingJob of pod {pod_name} no longer exists")
        return LLAMA if pod_uid == f"uid-{pod_name}" and pod_name.startswith("w-") else None

    async def read_keys(self) -> tuple[str, dict[str, Any]]:
        if not self.api_up:
            raise KeysUnavailableError("the API server is away")
        return await ISSUER.read()

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        self.port = await self.server.start("127.0.0.1", 0, context)

    async def stop(self) -> None:
        await self.server.stop()
        for stream in self._streams.values():
            stream.close()

    async def send(self, kind: FrameKind, body: Any, pod: str = "w-0", token: str | None = None) -> tuple[int, Any]:
        """Send a frame over the pod's stream; return the status and the content of the response.

        A stream is opened if there is none, or if the coordinator has closed it.
        """
        stream = self._streams.get((pod, token))
        if stream is None or stream.status != SWITCHING or stream.reader.at_eof():
            stream = await StreamClient.open(self.port, pod, trust=self.trust, token=token)
            self._streams[pod, token] = stream
        status, response = await stream.exchange(kind, body)
        if status not in (200, 409):
            stream.close()
            self._streams.pop((pod, token))
        return status, response

    async def register(self, pod: str = "w-0") -> Any:
        """Register the pod and return the response."""
        status, welcome = await self.send(FrameKind.REGISTER, register(pod), pod)
        assert status == 200
        return welcome
