"""The coordinator's frames as the agent reads them: answers, refusals, and unknown messages."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from trainium_agent.coordinator import session as session_module
from trainium_agent.coordinator import stream as stream_module
from trainium_agent.coordinator.connection import CoordinatorUnavailableError
from trainium_agent.coordinator.session import Session
from trainium_agent.coordinator.stream import Stream, StreamEndedError
from trainium_contract.faults.causes import Cause
from trainium_contract.wire.membership_change import MembershipChange, diff_memberships
from trainium_contract.wire.messages import (
    ErrorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    Member,
    Membership,
    RegisterRequest,
    RegisterResponse,
    Transition,
    WorkerPhase,
)
from trainium_contract.wire.stream import HEAD_BYTES, FrameKind, frame, head_of

MEMBERSHIP = Membership(
    generation=3,
    transition=Transition.IMMEDIATE,
    cause=Cause.RESIZE,
    processes_per_node=1,
    members=(
        Member(pod_uid="u", pod_name="w-0", pod_ip="10.0.0.1", node_name="n", node_rank=0, rendezvous_port=29500),
    ),
)
REQUEST = RegisterRequest(
    namespace="team",
    job="llama",
    pod_name="w-0",
    pod_uid="u",
    pod_ip="10.0.0.1",
    node_name="n",
    rendezvous_port=29500,
    agent_version="1",
)


def encoded(message: Any) -> bytes:
    return message.model_dump_json(by_alias=True).encode()


class Writer:
    """The sending half of a connection."""

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


def connected(*reported: bytes, ended: bool = False) -> tuple[Stream, Writer]:
    """Return a stream on which the coordinator has sent this."""
    reader, writer = asyncio.StreamReader(limit=1 << 12), Writer()
    reader.feed_data(b"".join(reported))
    if ended:
        reader.feed_eof()
    return Stream(reader, writer), writer  # type: ignore[arg-type]


REFUSAL = encoded(ErrorResponse(error="the pod is gone", status=403))
CONFLICT = encoded(ErrorResponse(error="generation 2 is over", status=409))


async def test_a_registration_is_answered_with_a_welcome_whatever_comes_before_it() -> None:
    welcome = RegisterResponse(heartbeat_seconds=3.0, time=7.0)
    stream, writer = connected(frame(FrameKind.HEARTBEAT_ACK, b"{}"), frame(FrameKind.REGISTERED, encoded(welcome)))
    assert await stream.register(REQUEST, 5.0) == welcome
    assert head_of(writer.sent[:HEAD_BYTES])[0] == FrameKind.REGISTER
    assert not writer.aborted


@pytest.mark.parametrize(
    ("reported", "sentence"),
    [
        ((frame(FrameKind.ERROR, REFUSAL),), "the coordinator answered 403: the pod is gone"),
        ((frame(FrameKind.ERROR, b"no JSON"),), "refused with something that is not understood"),
        ((frame(FrameKind.REGISTERED, b"no JSON"),), r"was not answered \(ValidationError\)"),
        ((frame(FrameKind.REGISTERED)[:3],), "the coordinator closed the stream"),
        ((frame(FrameKind.PACKED_MEMBERSHIP, b"no gzip"),), "the connection broke"),
        ((b"\x02\xff\xff\xff\xff",), "a frame of 4294967295 bytes"),
    ],
)
async def test_a_registration_that_fails_is_one_sentence_and_closes_the_stream(
    reported: tuple[bytes, ...], sentence: str
) -> None:
    stream, writer = connected(*reported, ended=True)
    with pytest.raises(StreamEndedError, match=sentence):
        await stream.register(REQUEST, 5.0)
    assert writer.aborted


async def test_a_registration_that_nobody_answers_ends() -> None:
    stream, writer = connected()
    with pytest.raises(StreamEndedError, match=r"was not answered \(TimeoutError\)"):
        await stream.register(REQUEST, 0.01)
    assert writer.aborted


async def test_a_connection_that_breaks_while_we_send_is_one_sentence() -> None:
    stream, writer = connected()
    writer.broken = True
    with pytest.raises(StreamEndedError, match=r"the connection broke \(reset by peer\)"):
        await stream.send(FrameKind.KEEPALIVE, b"")


async def test_a_packed_membership_comes_unpacked() -> None:
    stream, _ = connected(frame(FrameKind.PACKED_MEMBERSHIP, gzip.compress(encoded(MEMBERSHIP))))
    kind, payload = await stream.receive()
    assert (kind, Membership.model_validate_json(payload)) == (FrameKind.MEMBERSHIP, MEMBERSHIP)


class Ears:
    """Record what came of the coordinator's messages."""

    def __init__(self, *reported: bytes, ended: bool = True) -> None:
        self.acknowledged: list[HeartbeatRequest] = []
        self.memberships: list[Membership] = []
        self.changes: list[MembershipChange] = []
        self.answers = 0
        self.stream, self.writer = connected(*reported, ended=ended)
        self.session = Session(
            self.stream,
            self.heartbeat,
            asyncio.Event(),
            on_acknowledged=lambda message, *_: self.acknowledged.append(message),
            on_membership=self.memberships.append,
            on_change=self.changes.append,
            on_answer=self._answered,
        )

    def _answered(self) -> None:
        self.answers += 1

    def heartbeat(self) -> HeartbeatRequest:
        return HeartbeatRequest(
            namespace="team", job="llama", pod_name="w-0", pod_uid="u", generation=3, phase=WorkerPhase.STANDBY
        )

    def report(self) -> None:
        """A heartbeat is on its way."""
        self.session._unanswered.append(session_module._Sent(self.heartbeat(), 0.0, 0.0))

    async def listen(self) -> str:
        with pytest.raises(CoordinatorUnavailableError) as caught:
            await self.session.receive_frames()
        return str(caught.value)


ACKNOWLEDGED = frame(
    FrameKind.HEARTBEAT_ACK, encoded(HeartbeatResponse(generation=3, full_heartbeat_seconds=9.0, time=1.0))
)


async def test_each_answer_acknowledges_the_oldest_heartbeat_and_one_too_many_does_no_harm() -> None:
    ears = Ears(ACKNOWLEDGED, ACKNOWLEDGED)
    ears.report()
    assert await ears.listen() == "the coordinator closed the stream"
    assert (len(ears.acknowledged), ears.answers) == (1, 2)
    assert ears.session._detail_seconds == 9.0


async def test_a_membership_is_passed_on_and_a_kind_of_a_later_version_is_passed_over() -> None:
    ears = Ears(frame(FrameKind.MEMBERSHIP, encoded(MEMBERSHIP)), b"\x63\x00\x00\x00\x01x", ACKNOWLEDGED)
    await ears.listen()
    assert (ears.memberships, ears.answers) == ([MEMBERSHIP], 1)


async def test_a_change_is_passed_on_as_one() -> None:
    change = diff_memberships(MEMBERSHIP, MEMBERSHIP.replaced(generation=4, processes_per_node=2))
    assert change is not None
    ears = Ears(frame(FrameKind.MEMBERSHIP_CHANGE, encoded(change)))
    await ears.listen()
    assert (ears.memberships, ears.changes) == ([], [change])


async def test_a_heartbeat_of_a_generation_that_is_over_is_answered_but_not_acknowledged() -> None:
    ears = Ears(frame(FrameKind.ERROR, CONFLICT), ACKNOWLEDGED, frame(FrameKind.ERROR, CONFLICT))
    ears.report()
    ears.report()
    assert await ears.listen() == "the coordinator closed the stream"
    assert (len(ears.acknowledged), ears.answers) == (1, 3)


@pytest.mark.parametrize(
    ("reported", "sentence"),
    [
        (frame(FrameKind.ERROR, REFUSAL), "the coordinator answered 403: the pod is gone"),
        (frame(FrameKind.MEMBERSHIP, b"{}"), "validation error"),
    ],
)
async def test_a_refusal_or_a_word_that_makes_no_sense_ends_the_stream(reported: bytes, sentence: str) -> None:
    assert sentence in await Ears(reported).listen()


async def test_a_coordinator_that_answers_no_heartbeat_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ears = Ears(ended=False)
    ears.report()  # at monotonic time 0: long ago
    with pytest.raises(CoordinatorUnavailableError, match="a heartbeat was not answered within"):
        await ears.session.send_heartbeats(1.0)


async def test_a_heartbeat_that_cannot_be_sent_ends_the_stream() -> None:
    ears = Ears(ended=False)
    ears.writer.broken = True
    with pytest.raises(CoordinatorUnavailableError, match="reset by peer"):
        await ears.session.send_heartbeats(1.0)


@pytest.mark.parametrize(
    ("head", "error", "sentence"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nno it", stream_module.StreamRefusedError, "404"),
        (b"HTTP/1.1 503 Later\r\n\r\n", stream_module.StreamRefusedError, "503"),
        (b"x" * 5000, ValueError, "no HTTP"),
        (b"nonsense\r\n\r\n", stream_module.StreamRefusedError, "0"),
    ],
)
async def test_what_is_no_stream_is_an_error(head: bytes, error: type[Exception], sentence: str) -> None:
    stream, _ = connected(head)
    with pytest.raises(error, match=sentence):
        await stream._upgraded()
