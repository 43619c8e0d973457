"""Memberships as agents get them: encoded once, however many agents ask.

A membership of 1,000 nodes is 200 kB of JSON, and a thousand agents are told of it at the same moment. So its bytes are
made once, when the first one asks, and packed, which makes a fifth of it. Most agents know the one before and are told
the change alone.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.base import MessageModel
    from trainium_contract.wire.membership_change import MembershipChange
    from trainium_contract.wire.messages import Membership
    from trainium_operator.plan.model.names import JobId

SMALLEST_PACKED = 2048
_REMEMBERED = 512


@dataclass(slots=True)
class Spoken:
    """One membership."""

    membership: Membership
    _plain: bytes | None = field(default=None, repr=False)
    _packed: bytes | None = field(default=None, repr=False)
    _change: bytes | None = field(default=None, repr=False)

    @property
    def plain(self) -> bytes:
        """JSON."""
        if self._plain is None:
            self._plain = _encoded(self.membership)
        return self._plain

    @property
    def packed(self) -> bytes | None:
        """The bytes in gzip's format; None where that does not pay."""
        if self._packed is None and len(self.plain) >= SMALLEST_PACKED:
            self._packed = gzip.compress(self.plain, compresslevel=4, mtime=0)
        return self._packed

    def changed(self, change: MembershipChange) -> bytes:
        """What leads to it from the membership before it; there is one such change."""
        if self._change is None:
            self._change = _encoded(change)
        return self._change


class Phrasebook:
    """The newest memberships of all jobs, encoded."""

    def __init__(self) -> None:
        self._known: dict[JobId, Spoken] = {}

    def say(self, job_id: JobId, membership: Membership) -> Spoken:
        """The membership, encoded."""
        found = self._known.pop(job_id, None)
        if found is None or found.membership is not membership:
            found = Spoken(membership)
        self._known[job_id] = found  # last in order: the one that was not asked for longest is forgotten first
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return found


def _encoded(message: MessageModel) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_none=True).encode()
