"""Encode memberships for agents, once each, however many agents need them.

A membership of 1,000 nodes is 200 kB of JSON, and a thousand agents receive it at the same moment. Its bytes are
created when the first agent needs them, and compressed to a fifth. Most agents hold the previous membership and receive
only the difference.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_operator.bounded_dict import BoundedDict

if TYPE_CHECKING:
    from trainium_contract.base import MessageModel
    from trainium_contract.wire.membership_change import MembershipChange
    from trainium_contract.wire.messages import Membership
    from trainium_operator.plan.model.names import JobId

MIN_PACKED_BYTES = 2048
"""Shorter memberships are not compressed."""
_REMEMBERED = 512


@dataclass(slots=True)
class EncodedMembership:
    """One membership, encoded on first use."""

    membership: Membership
    _plain: bytes | None = field(default=None, repr=False)
    _packed: bytes | None = field(default=None, repr=False)
    _change: bytes | None = field(default=None, repr=False)

    @property
    def plain(self) -> bytes:
        """The membership as JSON."""
        if self._plain is None:
            self._plain = _encode(self.membership)
        return self._plain

    @property
    def packed(self) -> bytes | None:
        """The membership as gzipped JSON; None where that is not smaller."""
        if self._packed is None and len(self.plain) >= MIN_PACKED_BYTES:
            self._packed = gzip.compress(self.plain, compresslevel=4, mtime=0)
        return self._packed

    def encode_change(self, change: MembershipChange) -> bytes:
        """Return the JSON of the difference to the previous membership; there is one such change."""
        if self._change is None:
            self._change = _encode(change)
        return self._change


class MembershipCache:
    """The newest membership of each job, encoded."""

    def __init__(self) -> None:
        self._known: BoundedDict[JobId, EncodedMembership] = BoundedDict(_REMEMBERED)

    def encode(self, job_id: JobId, membership: Membership) -> EncodedMembership:
        """Return the membership, encoded."""
        encoded = self._known.get(job_id)
        if encoded is None or encoded.membership is not membership:
            encoded = EncodedMembership(membership)
        self._known[job_id] = encoded  # also if it is known, so that the least recently used entry is evicted first
        return encoded


def _encode(message: MessageModel) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_none=True).encode()
