"""The agent's end of a stream: addresses, acknowledgements, memberships, errors and unknown frames."""

import asyncio
import gzip
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.testing.operator import wire_messages
from tests.testing.operator.coordinator_fixture import register
from tests.unit.agent.fake_generation_store import build_membership
from trainium_agent.coordinator import connection
from trainium_agent.coordinator.client import Callbacks, CoordinatorClient, StreamSession, _Sent
from trainium_agent.coordinator.connection import (
    Address,
    Connector,
    CoordinatorUnavailableError,
    PodRefusedError,
    Stream,
    StreamEndedError,
    StreamRefusedError,
)
from trainium_agent.settings import Endpoint
from trainium_contract.wire.membership_change import MembershipChange, diff_memberships
from trainium_contract.wire.messages import (
    ErrorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    ImportedModules,
    Membership,
    RegisterRequest,
    RegisterResponse,
    RoleEndpoints,
    WorkerPhase,
)
from trainium_contract.wire.stream import HEAD_BYTES, FrameKind, encode_frame, parse_frame_header

MEMBERSHIP = build_membership(29500, nodes=1, generation=3)
REQUEST = RegisterRequest.model_validate(register())


def to_json(message: Any) -> bytes:
    return message.model_dump_json(by_alias=True).encode()


class FakeWriter:
    """The sending half of a connection, which records what is sent."""

    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False
        self.broken = False
        self.transport = self

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        if self.broken:
            raise ConnectionResetError("reset by peer")

    def abort(self) -> None:
        self.aborted = True


def create_stream(*frames: bytes, ended: bool = False) -> tuple[Stream, FakeWriter]:
    """Return a stream that has received these frames."""
    reader, writer = asyncio.StreamReader(limit=1 << 12), FakeWriter()
    reader.feed_data(b"".join(frames))
    if ended:
        reader.feed_eof()
    return Stream(reader, writer), writer  # type: ignore[arg-type]


REFUSAL = to_json(ErrorResponse(error="the pod was deleted", status=403))
CONFLICT = to_json(ErrorResponse(error="generation 2 is over", status=409))


async def test_a_registration_skips_frames_before_its_reply() -> None:
    welcome = RegisterResponse(heartbeat_seconds=3.0, time=7.0)
    stream, writer = create_stream(
        encode_frame(FrameKind.HEARTBEAT_ACK, b"{}"), encode_frame(FrameKind.REGISTERED, to_json(welcome))
    )
    assert await stream.register(REQUEST, 5.0) == welcome
    assert parse_frame_header(writer.sent[:HEAD_BYTES])[0] == FrameKind.REGISTER
    assert not writer.aborted


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ((encode_frame(FrameKind.ERROR, REFUSAL),), "the coordinator answered 403: the pod was deleted"),
        ((encode_frame(FrameKind.ERROR, b"no JSON"),), "refused with something that is not understood"),
        ((encode_frame(FrameKind.REGISTERED, b"no JSON"),), r"was not answered \(ValidationError\)"),
        ((encode_frame(FrameKind.REGISTERED)[:3],), "the coordinator closed the stream"),
        ((encode_frame(FrameKind.PACKED_MEMBERSHIP, b"no gzip"),), "the connection broke"),
        ((b"\x02\xff\xff\xff\xff",), "a frame of 4294967295 bytes"),
    ],
)
async def test_a_failed_registration_raises_one_sentence_and_closes_the_stream(
    frames: tuple[bytes, ...], sentence: str
) -> None:
    stream, writer = create_stream(*frames, ended=True)
    with pytest.raises(StreamEndedError, match=sentence):
        await stream.register(REQUEST, 5.0)
    assert writer.aborted


async def test_a_registration_without_reply_times_out() -> None:
    stream, writer = create_stream()
    with pytest.raises(StreamEndedError, match=r"was not answered \(TimeoutError\)"):
        await stream.register(REQUEST, 0.01)
    assert writer.aborted


async def test_a_broken_connection_raises_one_sentence() -> None:
    stream, writer = create_stream()
    writer.broken = True
    with pytest.raises(StreamEndedError, match=r"the connection broke \(reset by peer\)"):
        await stream.send(FrameKind.KEEPALIVE, b"")


async def test_a_packed_membership_is_unpacked() -> None:
    stream, _ = create_stream(encode_frame(FrameKind.PACKED_MEMBERSHIP, gzip.compress(to_json(MEMBERSHIP))))
    kind, payload = await stream.receive()
    assert (kind, Membership.model_validate_json(payload)) == (FrameKind.MEMBERSHIP, MEMBERSHIP)


def build_callbacks(**callbacks: Any) -> Callbacks:
    """Return these callbacks; the others do nothing."""
    names = ("heartbeat", "on_membership", "on_acknowledged", "on_job_deleted")
    return Callbacks(**(dict.fromkeys(names, lambda *_: None) | callbacks))


class RecordingSession:
    """A session that records the callbacks of received frames."""

    def __init__(self, *frames: bytes, ended: bool = True) -> None:
        self.acknowledged: list[HeartbeatRequest] = []
        self.memberships: list[Membership] = []
        self.changes: list[MembershipChange] = []
        self.endpoints: list[RoleEndpoints] = []
        self.imported: list[ImportedModules] = []
        self.answers = 0
        self.stream, self.writer = create_stream(*frames, ended=ended)
        self.session = StreamSession(
            self.stream,
            build_callbacks(
                heartbeat=self.heartbeat, on_endpoints=self.endpoints.append, on_imported=self.imported.append
            ),
            asyncio.Event(),
            on_acknowledged=lambda message, *_: self.acknowledged.append(message),
            on_membership=self.memberships.append,
            on_change=self.changes.append,
            on_answer=self._answered,
        )

    def _answered(self) -> None:
        self.answers += 1

    def heartbeat(self) -> HeartbeatRequest:
        return wire_messages.heartbeat(generation=3, phase=WorkerPhase.STANDBY)

    def mark_heartbeat_sent(self) -> None:
        self.session._unanswered.append(_Sent(self.heartbeat(), 0.0, 0.0))

    async def listen(self) -> str:
        with pytest.raises(CoordinatorUnavailableError) as caught:
            await self.session.receive_frames()
        return str(caught.value)


ACKNOWLEDGED = encode_frame(
    FrameKind.HEARTBEAT_ACK, to_json(HeartbeatResponse(generation=3, full_heartbeat_seconds=9.0, time=1.0))
)


async def test_addresses_of_roles_are_passed_on() -> None:
    endpoints = RoleEndpoints(addresses={"rollout": ("10.0.0.1:8000",)})
    recorded = RecordingSession(encode_frame(FrameKind.ROLE_ENDPOINTS, to_json(endpoints)))
    await recorded.listen()
    assert recorded.endpoints == [endpoints]


async def test_modules_of_another_pod_are_passed_on() -> None:
    imported = ImportedModules(modules=("torch.optim", "wave"))
    recorded = RecordingSession(encode_frame(FrameKind.IMPORTED_MODULES, to_json(imported)))
    await recorded.listen()
    assert recorded.imported == [imported]


async def test_modules_that_are_none_end_the_stream() -> None:
    frame = encode_frame(FrameKind.IMPORTED_MODULES, b'{"protocol": 2, "modules": ["os;x"]}')
    assert "modules.0" in await RecordingSession(frame).listen()


async def test_each_reply_acknowledges_the_oldest_heartbeat_and_extra_replies_none() -> None:
    recorded = RecordingSession(ACKNOWLEDGED, ACKNOWLEDGED)
    recorded.mark_heartbeat_sent()
    assert await recorded.listen() == "the coordinator closed the stream"
    assert (len(recorded.acknowledged), recorded.answers) == (1, 2)
    assert recorded.session._full_heartbeat_seconds == 9.0


async def test_a_membership_is_handled_and_an_unknown_frame_skipped() -> None:
    recorded = RecordingSession(
        encode_frame(FrameKind.MEMBERSHIP, to_json(MEMBERSHIP)), b"\x63\x00\x00\x00\x01x", ACKNOWLEDGED
    )
    await recorded.listen()
    assert (recorded.memberships, recorded.answers) == ([MEMBERSHIP], 1)


async def test_a_membership_change_is_handled() -> None:
    change = diff_memberships(MEMBERSHIP, MEMBERSHIP.replaced(generation=4, processes_per_node=2))
    assert change is not None
    recorded = RecordingSession(encode_frame(FrameKind.MEMBERSHIP_CHANGE, to_json(change)))
    await recorded.listen()
    assert (recorded.memberships, recorded.changes) == ([], [change])


async def test_a_conflict_reply_acknowledges_no_heartbeat() -> None:
    recorded = RecordingSession(
        encode_frame(FrameKind.ERROR, CONFLICT), ACKNOWLEDGED, encode_frame(FrameKind.ERROR, CONFLICT)
    )
    recorded.mark_heartbeat_sent()
    recorded.mark_heartbeat_sent()
    assert await recorded.listen() == "the coordinator closed the stream"
    assert (len(recorded.acknowledged), recorded.answers) == (1, 3)


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        (encode_frame(FrameKind.ERROR, REFUSAL), "the coordinator answered 403: the pod was deleted"),
        (encode_frame(FrameKind.MEMBERSHIP, b"{}"), "validation error"),
    ],
)
async def test_an_error_or_an_invalid_frame_ends_the_stream(frames: bytes, sentence: str) -> None:
    assert sentence in await RecordingSession(frames).listen()


async def test_an_unanswered_heartbeat_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordingSession(ended=False)
    recorded.mark_heartbeat_sent()  # at monotonic time 0, so that it is overdue
    with pytest.raises(CoordinatorUnavailableError, match="a heartbeat was not answered within"):
        await recorded.session.send_heartbeats(1.0)


async def test_a_heartbeat_that_cannot_be_sent_ends_the_stream() -> None:
    recorded = RecordingSession(ended=False)
    recorded.writer.broken = True
    with pytest.raises(CoordinatorUnavailableError, match="reset by peer"):
        await recorded.session.send_heartbeats(1.0)


@pytest.mark.parametrize(
    ("head", "error", "sentence"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nno it", StreamRefusedError, "404"),
        (b"HTTP/1.1 503 Later\r\n\r\n", StreamRefusedError, "503"),
        (b"x" * 5000, ValueError, "no HTTP"),
        (b"nonsense\r\n\r\n", StreamRefusedError, "0"),
    ],
)
async def test_a_refused_upgrade_is_an_error(head: bytes, error: type[Exception], sentence: str) -> None:
    stream, _ = create_stream(head)
    with pytest.raises(error, match=sentence):
        await stream._await_upgrade()


NAME = "coordinator.svc"


class FakeResolver:
    """A replacement of the host's resolver."""

    def __init__(self) -> None:
        self.answer: list[str] | None = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
        """None: there is no such name."""
        self.lookups = 0
        self.answers = threading.Event()
        self.answers.set()

    def __call__(self, host: str, port: int, *, type: int) -> list[tuple[object, ...]]:  # noqa: A002
        assert (host, type) == (NAME, socket.SOCK_STREAM)
        self.lookups += 1
        self.answers.wait()
        if self.answer is None:
            raise OSError("no such name")
        return [(2, 1, 6, "", (ip, port)) for ip in self.answer]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeResolver]:
    fake = FakeResolver()
    monkeypatch.setattr(socket, "getaddrinfo", fake)
    yield fake
    fake.answers.set()


@pytest.fixture
def connector() -> Connector:
    return Connector(SimpleNamespace(coordinator=(Endpoint(NAME, 8443),)))


async def test_each_address_of_a_name_is_listed_once(resolver: FakeResolver, connector: Connector) -> None:
    assert await connector.resolve_addresses() == [Address(NAME, "10.0.0.1", 8443), Address(NAME, "10.0.0.2", 8443)]
    assert resolver.lookups == 1


async def test_a_name_that_does_not_resolve_is_an_error(resolver: FakeResolver, connector: Connector) -> None:
    resolver.answer = None
    with pytest.raises(CoordinatorUnavailableError, match=r"coordinator\.svc does not resolve"):
        await connector.resolve_addresses()


async def test_an_invalid_name_is_an_error() -> None:
    connector = Connector(SimpleNamespace(coordinator=(Endpoint("." * 300, 8443),)))
    with pytest.raises(CoordinatorUnavailableError, match="does not resolve"):
        await connector.resolve_addresses()


async def test_a_failed_lookup_returns_the_last_addresses(resolver: FakeResolver, connector: Connector) -> None:
    before = await connector.resolve_addresses()
    resolver.answer = None
    assert await connector.resolve_addresses() == before
    resolver.answer = ["10.0.0.3"]
    assert [address.ip for address in await connector.resolve_addresses()] == ["10.0.0.3"]


async def test_a_silent_name_server_leaves_the_known_addresses_and_one_pending_lookup(
    resolver: FakeResolver, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LOOKUP_SECONDS", 0.01)
    before = await connector.resolve_addresses()
    resolver.answers.clear()
    resolver.answer = ["10.0.0.3"]
    for _ in range(3):
        assert await connector.resolve_addresses() == before
    assert resolver.lookups == 2
    monkeypatch.setattr(connection, "LOOKUP_SECONDS", 30)
    resolver.answers.set()
    assert [address.ip for address in await connector.resolve_addresses()] == ["10.0.0.3"]
    assert resolver.lookups == 2


def build_client() -> CoordinatorClient:
    """Return a client without callbacks."""
    settings: Any = SimpleNamespace(
        **REQUEST.model_dump(exclude={"protocol", "agent_version", "rendezvous_port"}), coordinator=(), ca_path=None
    )
    return CoordinatorClient(settings, 1, "1", build_callbacks())


async def pauses_after(error: CoordinatorUnavailableError, monkeypatch: pytest.MonkeyPatch, count: int) -> list[float]:
    """Return how long a client waits after each failure to connect, in virtual time."""
    clock, pauses = [1000.0], []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds
        if len(pauses) == count:
            raise asyncio.CancelledError

    async def refuse() -> Any:
        raise error

    monkeypatch.setattr("trainium_agent.coordinator.client.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("trainium_agent.coordinator.client.random.uniform", lambda _low, high: high)
    client = build_client()
    monkeypatch.setattr(client, "_connect", refuse)
    monkeypatch.setattr("trainium_agent.coordinator.client.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await client.run()
    return pauses


@pytest.mark.parametrize(
    ("kind", "longest", "lines"), [(CoordinatorUnavailableError, 3.0, 5), (PodRefusedError, 30.0, 2)]
)
async def test_a_pod_of_no_job_is_refused_and_reports_what_to_do_rarely(
    kind: type[CoordinatorUnavailableError],
    longest: float,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sentence = "pod a is not a worker of any TrainingJob that exists: kubectl delete pod a"
    pauses = await pauses_after(kind(sentence), monkeypatch, count=50)
    assert pauses[0] == 0.1
    assert max(pauses) == longest
    assert len(caplog.records) in (lines, lines + 1)
    assert all(sentence in record.getMessage() for record in caplog.records)


async def test_the_address_whose_stream_broke_is_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without power drops packets, so each attempt there costs the whole time limit."""
    leader, standby = Address("operator", "10.0.0.1", 8443), Address("operator", "10.0.0.2", 8443)
    attempts: list[Address] = []

    async def list_addresses() -> list[Address]:
        return [leader, standby]

    async def open_stream(address: Address) -> tuple[Any, RegisterResponse]:
        attempts.append(address)
        return None, RegisterResponse(time=0.0)

    async def break_stream(*_: object) -> None:
        if len(attempts) == 2:
            raise asyncio.CancelledError
        raise CoordinatorUnavailableError("a heartbeat was not answered within 3 s")

    client = build_client()
    monkeypatch.setattr(client, "_connector", SimpleNamespace(resolve_addresses=list_addresses))
    monkeypatch.setattr(client, "_open", open_stream)
    monkeypatch.setattr(client, "_serve", break_stream)
    monkeypatch.setattr("trainium_agent.coordinator.client.random.shuffle", lambda _addresses: None)
    monkeypatch.setattr("trainium_agent.coordinator.client._FIRST_BACKOFF_SECONDS", 0.0)
    with pytest.raises(asyncio.CancelledError):
        await client.run()
    assert attempts == [leader, standby]
