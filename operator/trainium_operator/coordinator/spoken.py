"""Memberships as agents get them: encoded once, however many agents ask.

A membership of 1,000 nodes is 200 kB of JSON, and a thousand agents are told of it at the same moment. So its bytes are
made once per protocol, and once more packed, which makes a fifth of it: for streams, and for agents that say by HTTP
that they can unpack (`Accept-Encoding: gzip`).
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Membership
    from trainium_operator.plan.model.job_id import JobId

SMALLEST_PACKED = 2048
_REMEMBERED = 512


@dataclass(slots=True)
class Spoken:
    """One membership in one protocol."""

    membership: Membership
    plain: bytes
    _packed: bytes | None = field(default=None, repr=False)

    @property
    def packed(self) -> bytes | None:
        """The bytes in gzip's format; None where that does not pay."""
        if self._packed is None and len(self.plain) >= SMALLEST_PACKED:
            self._packed = gzip.compress(self.plain, compresslevel=4, mtime=0)
        return self._packed


class Phrasebook:
    """The newest memberships of all jobs, encoded."""

    def __init__(self) -> None:
        self._known: dict[tuple[JobId, int], Spoken] = {}

    def say(self, job_id: JobId, membership: Membership, protocol: int) -> Spoken:
        """The membership in the protocol that the agent speaks; both have the same fields."""
        key = (job_id, protocol)
        found = self._known.pop(key, None)
        if found is None or found.membership is not membership:
            wire = membership.replaced(protocol=protocol)
            found = Spoken(membership, wire.model_dump_json(by_alias=True, exclude_none=True).encode())
        self._known[key] = found  # last in order: the one that was not asked for longest is forgotten first
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return found
