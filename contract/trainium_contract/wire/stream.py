"""An agent's stream: register, heartbeats and memberships over one connection, for as long as it lasts.

It starts as HTTP: `GET STREAM_PATH` with the agent's token, `Connection: Upgrade` and `Upgrade: UPGRADE`, query
`podUid` and `after` (the generation that the agent has; 0 for none), answered with 101. From then on both sides send
frames: one byte of kind, four of length, then the payload, which is a message as JSON. The agent's first frame is
REGISTER; nothing is answered before it.

An agent sends one frame each `heartbeatSeconds`: HEARTBEAT while the coordinator must see it at once, else KEEPALIVE,
whose payload is the newest step alone (eight bytes), and HEARTBEAT again after `fullHeartbeatSeconds` at the latest
(`must_send_now`). Each HEARTBEAT is answered in turn, by HEARTBEAT_ACK or by ERROR with 409; after any other ERROR the
coordinator closes the stream. Readers skip frames of unknown kinds and bound a length before they keep any data.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING

from trainium_contract.status.results import FIGURES
from trainium_contract.wire.messages import HeartbeatRequest, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

STREAM_PATH = "/v1/stream"
UPGRADE = "trainium-agent"
_HEAD = struct.Struct("!BI")
_STEP = struct.Struct("!Q")
_urgent_fields = attrgetter(*sorted(HeartbeatRequest.model_fields.keys() - {"progress", "timing", "protocol"}))
_PER_STEP_FIELDS = frozenset(
    {*FIGURES, "step", "samples", "memory_step", "durable_step", "updated", "productive_seconds", "stage_progress"}
)
"""Fields of the progress that change with each step."""
_urgent_progress = attrgetter(*sorted(Progress.model_fields.keys() - _PER_STEP_FIELDS))


class FrameKind(IntEnum):
    """Kind of a frame."""

    REGISTER = 1
    """RegisterRequest."""
    REGISTERED = 2
    """RegisterResponse."""
    HEARTBEAT = 3
    """HeartbeatRequest."""
    HEARTBEAT_ACK = 4
    """HeartbeatResponse."""
    KEEPALIVE = 5
    """Only values that change with each step have changed; see `encode_keepalive`."""
    MEMBERSHIP = 6
    """Membership."""
    PACKED_MEMBERSHIP = 7
    """Membership, in gzip's format."""
    ERROR = 8
    """ErrorResponse, with `status`."""
    MEMBERSHIP_CHANGE = 9
    """MembershipChange, from the generation that the agent has."""
    ROLE_ENDPOINTS = 10
    """RoleEndpoints; sent before a membership, and whenever they change."""
    IMPORTED_MODULES = 11
    """ImportedModules, in both directions."""


class FrameTooLongError(ValueError):
    """A frame is longer than its reader accepts."""


HEAD_BYTES = _HEAD.size


def parse_frame_header(data: bytes) -> tuple[int, int]:
    """Return kind and payload length from the first `HEAD_BYTES` of a frame."""
    kind, length = _HEAD.unpack(data)
    return kind, length


def encode_frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Encode a frame."""
    return _HEAD.pack(kind, len(payload)) + payload


def encode_keepalive(message: HeartbeatRequest) -> bytes:
    """Encode the payload of KEEPALIVE: the newest step, empty without one."""
    return _STEP.pack(message.progress.step) if message.progress is not None else b""


def decode_keepalive(payload: bytes) -> int:
    """Decode the newest step of a KEEPALIVE; -1 for none."""
    return int(_STEP.unpack(payload)[0]) if len(payload) == _STEP.size else -1


class FrameReader:
    """Collects bytes into whole frames."""

    __slots__ = ("_held", "_max_length")

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._held = b""

    def split_frames(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield kind and payload of each complete frame. Raises FrameTooLongError."""
        buffer = self._held + data if self._held else data
        at = 0
        while len(buffer) - at >= _HEAD.size:
            kind, length = _HEAD.unpack_from(buffer, at)
            if length > self._max_length:
                raise FrameTooLongError(f"a frame of {length} bytes, where {self._max_length} are allowed")
            end = at + _HEAD.size + length
            if len(buffer) < end:
                break
            yield kind, buffer[at + _HEAD.size : end]
            at = end
        self._held = buffer[at:]


def draw_jitter(drawn: float, *, after_change: bool) -> float:
    """Return the share of `fullHeartbeatSeconds` until the next unprompted HEARTBEAT; `drawn` is random, from 0 to 1.

    Changes come from all agents of a job at once. The heartbeats after a change are spread over the whole interval, so
    that the coordinator keeps receiving the newest step: silence of all agents would look like a hang.
    """
    return drawn if after_change else 0.5 + drawn / 2


def must_send_now(sent: HeartbeatRequest | None, now: HeartbeatRequest) -> bool:
    """Return whether the coordinator must see `now` at once; `sent` is the last message that it received.

    The first step of an attempt must be sent, because it ends a recovery.
    """
    if sent is None or _urgent_fields(sent) != _urgent_fields(now):
        return True
    before, after = sent.progress, now.progress
    if before is None or after is None:
        return before is not after
    first_step = before.step != after.step and before.step <= (before.resume_step or 0)
    return first_step or bool(_urgent_progress(before) != _urgent_progress(after))
