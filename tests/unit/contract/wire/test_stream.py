"""Frames of the stream of an agent, and heartbeats that must be sent at once."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainium_contract.status.results import Alert
from trainium_contract.wire.messages import HeartbeatRequest, Membership, Progress, WorkerPhase
from trainium_contract.wire.stream import (
    HEAD_BYTES,
    FrameKind,
    FrameReader,
    FrameTooLongError,
    encode_frame,
    jitter_fraction,
    must_send_now,
    parse_frame_header,
)


@given(
    st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=300)), max_size=8),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
)
def test_frames_are_read_back_from_any_split(reported: list[tuple[FrameKind, bytes]], cuts: list[int]) -> None:
    wire, reader, received = b"".join(encode_frame(kind, payload) for kind, payload in reported), FrameReader(300), []
    at = turn = 0
    while at < len(wire):
        piece = cuts[turn % len(cuts)]
        received += reader.frames(wire[at : at + piece])
        at, turn = at + piece, turn + 1
    assert received == reported


@given(st.binary(max_size=4_000), st.integers(0, 200))
def test_a_frame_reader_buffers_at_most_one_frame(data: bytes, longest: int) -> None:
    reader = FrameReader(longest)
    try:
        assert all(len(payload) <= longest for _, payload in reader.frames(data))
    except FrameTooLongError:
        return
    assert len(reader._held) <= HEAD_BYTES + longest


def test_a_frame_that_is_too_long_is_refused_before_its_payload_is_there() -> None:
    head = encode_frame(FrameKind.HEARTBEAT, b"x" * 11)[:HEAD_BYTES]
    assert parse_frame_header(head) == (FrameKind.HEARTBEAT, 11)
    with pytest.raises(FrameTooLongError):
        list(FrameReader(10).frames(head))


def beat(progress: dict[str, Any] | None = None, **changes: Any) -> HeartbeatRequest:
    about: dict[str, Any] = {
        "namespace": "team", "job": "llama", "pod_name": "w-0", "pod_uid": "uid", "generation": 1,
        "phase": WorkerPhase.TRAINING, "progress": None if progress is None else Progress(**progress),
    }  # fmt: skip
    return HeartbeatRequest(**about | changes)


STEP_9: dict[str, Any] = {"step": 9, "loss": 2.0, "resume_step": 5, "memory_step": 9, "updated": 100.0}
STEP_10: dict[str, Any] = STEP_9 | {"step": 10, "loss": 1.9, "memory_step": 10, "updated": 101.0, "samples": 3}


@pytest.mark.parametrize(
    ("reported", "now", "news"),
    [
        (None, beat(), True),
        (beat(STEP_9), beat(STEP_9), False),
        (beat(STEP_9), beat(STEP_10), False),
        (beat(STEP_9 | {"step": 5}), beat(STEP_9 | {"step": 6}), True),
        (beat(STEP_9), beat(STEP_9 | {"resume_step": 8}), True),
        (beat(), beat(STEP_9), True),
        (beat(STEP_9), beat(), True),
        (beat(STEP_9), beat(STEP_9, phase=WorkerPhase.JOINING), True),
        (beat(STEP_9), beat(STEP_9, attempt=1), True),
        (beat(STEP_9), beat(STEP_9 | {"notice": "a damaged checkpoint was stepped over"}), True),
        (beat(STEP_9), beat(STEP_9 | {"alerts": (Alert(kind="LossSpike", step=9),)}), True),
        (beat(STEP_9), beat(STEP_9 | {"stage": "Export"}), True),
        (beat(STEP_9 | {"stage": "Export"}), beat(STEP_9 | {"stage": "Export", "stage_progress": 0.5}), False),
    ],
)
def test_only_heartbeats_with_plain_progress_may_wait(
    reported: HeartbeatRequest | None, now: HeartbeatRequest, news: bool
) -> None:
    assert must_send_now(reported, now) is news


def test_the_newest_step_follows_a_delayed_heartbeat() -> None:
    """A job of 128 that reported everything at once: no second of the pause passes without some of them."""
    pauses = sorted(10.0 * jitter_fraction(number / 128, after_news=True) for number in range(128))
    assert max(later - before for before, later in pairwise(pauses)) < 1.0
    assert pauses[0] == 0.0
    assert [jitter_fraction(drawn, after_news=False) for drawn in (0.0, 1.0)] == [0.5, 1.0]


@pytest.mark.parametrize("cause", [[], {}, ["Crash"], 1, None])
def test_a_cause_that_is_no_text_is_refused_like_any_other_wrong_field(cause: object) -> None:
    member = {"podUid": "u", "podName": "w-0", "podIp": "10.0.0.1", "nodeName": "n", "nodeRank": 0, "rendezvousPort": 1}
    wire = {"generation": 1, "transition": "Immediate", "cause": cause, "members": [member], "processesPerNode": 1}
    with pytest.raises(ValidationError):
        Membership.model_validate(wire)
    assert Membership.model_validate({**wire, "cause": "NotKnownYet"}).cause == "Resize"
