"""Frames of the stream of an agent, and heartbeats that must be sent at once."""

from itertools import cycle, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.testing.operator import wire_messages
from trainium_contract.status.results import Alert
from trainium_contract.wire.messages import HeartbeatRequest, Membership, Progress, WorkerPhase
from trainium_contract.wire.stream import (
    HEAD_BYTES,
    FrameKind,
    FrameReader,
    FrameTooLongError,
    draw_jitter,
    encode_frame,
    must_send_now,
    parse_frame_header,
)


@given(
    st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=300)), max_size=8),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
)
def test_frames_are_read_back_from_any_split(frames: list[tuple[FrameKind, bytes]], cuts: list[int]) -> None:
    wire, reader, received = b"".join(encode_frame(kind, payload) for kind, payload in frames), FrameReader(300), []
    lengths, start = cycle(cuts), 0
    while start < len(wire):
        end = start + next(lengths)
        received += reader.split_frames(wire[start:end])
        start = end
    assert received == frames


@given(st.binary(max_size=4_000), st.integers(0, 200))
def test_a_frame_reader_buffers_at_most_one_frame(data: bytes, longest: int) -> None:
    reader = FrameReader(longest)
    try:
        assert all(len(payload) <= longest for _, payload in reader.split_frames(data))
    except FrameTooLongError:
        return
    assert len(reader._held) <= HEAD_BYTES + longest


def test_a_frame_that_is_too_long_is_refused_before_its_payload_is_received() -> None:
    head = encode_frame(FrameKind.HEARTBEAT, b"x" * 11)[:HEAD_BYTES]
    assert parse_frame_header(head) == (FrameKind.HEARTBEAT, 11)
    with pytest.raises(FrameTooLongError):
        list(FrameReader(10).split_frames(head))


def heartbeat(progress: dict[str, Any] | None = None, **changes: Any) -> HeartbeatRequest:
    return wire_messages.heartbeat(progress=None if progress is None else Progress(**progress), **changes)


STEP_9: dict[str, Any] = {"step": 9, "loss": 2.0, "resume_step": 5, "memory_step": 9, "updated": 100.0}
STEP_10: dict[str, Any] = STEP_9 | {"step": 10, "loss": 1.9, "memory_step": 10, "updated": 101.0, "samples": 3}


@pytest.mark.parametrize(
    ("sent", "current", "is_urgent"),
    [
        (None, heartbeat(), True),
        (heartbeat(STEP_9), heartbeat(STEP_9), False),
        (heartbeat(STEP_9), heartbeat(STEP_10), False),
        (heartbeat(STEP_9 | {"step": 5}), heartbeat(STEP_9 | {"step": 6}), True),
        (heartbeat(STEP_9), heartbeat(STEP_9 | {"resume_step": 8}), True),
        (heartbeat(), heartbeat(STEP_9), True),
        (heartbeat(STEP_9), heartbeat(), True),
        (heartbeat(STEP_9), heartbeat(STEP_9, phase=WorkerPhase.JOINING), True),
        (heartbeat(STEP_9), heartbeat(STEP_9, attempt=1), True),
        (heartbeat(STEP_9), heartbeat(STEP_9 | {"notice": "a damaged checkpoint was stepped over"}), True),
        (heartbeat(STEP_9), heartbeat(STEP_9 | {"alerts": (Alert(kind="LossSpike", step=9),)}), True),
        (heartbeat(STEP_9), heartbeat(STEP_9 | {"stage": "Export"}), True),
        (
            heartbeat(STEP_9 | {"stage": "Export"}),
            heartbeat(STEP_9 | {"stage": "Export", "stage_progress": 0.5}),
            False,
        ),
    ],
)
def test_only_heartbeats_with_plain_progress_may_wait(
    sent: HeartbeatRequest | None, current: HeartbeatRequest, is_urgent: bool
) -> None:
    assert must_send_now(sent, current) is is_urgent


def test_the_newest_step_follows_a_delayed_heartbeat() -> None:
    """128 agents that reported at once send again in each second of the pause."""
    pauses = sorted(10.0 * draw_jitter(number / 128, after_change=True) for number in range(128))
    assert max(later - before for before, later in pairwise(pauses)) < 1.0
    assert pauses[0] == 0.0
    assert [draw_jitter(fraction, after_change=False) for fraction in (0.0, 1.0)] == [0.5, 1.0]


@pytest.mark.parametrize("cause", [[], {}, ["Crash"], 1, None])
def test_a_cause_that_is_not_a_string_is_refused_like_any_other_wrong_field(cause: object) -> None:
    member = {"podUid": "u", "podName": "w-0", "podIp": "10.0.0.1", "nodeName": "n", "nodeRank": 0, "rendezvousPort": 1}
    wire = {"generation": 1, "transition": "Immediate", "cause": cause, "members": [member], "processesPerNode": 1}
    with pytest.raises(ValidationError):
        Membership.model_validate(wire)
    assert Membership.model_validate({**wire, "cause": "NotKnownYet"}).cause == "Resize"
