"""Keep and parse the membership in a ConfigMap.

Guarantees:
- The kept part is never larger than what the API server stores, so it costs this process no more than the cluster.
- It is decompressed only when the plan of its job needs it, and never beyond `LARGEST_TEXT`.
- A record that cannot be parsed counts as none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.wire.messages import LATEST_GENERATION, Membership
from trainium_contract.wire.recorded_membership import MEMBERSHIP_KEY, recorded_text
from trainium_operator.plan.model.cached_property import cached_property

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Json

_SHORTEST = {b",": 8, b"{": 32, b"[": 32}
"""Bytes of a membership for each of these, at least; a member is never shorter than 85, with six commas."""
_FEW = 64


@dataclass(frozen=True)
class MembershipRecord:
    """The record as stored; without slots, because the parsed membership is cached."""

    packed: str
    """Base64 of gzip."""
    holds_more: bool = False
    """Somebody has put something else beside it."""

    @cached_property
    def membership(self) -> Membership | None:
        """Membership that it holds; None when that cannot be parsed."""
        try:
            text = recorded_text(self.content())
            found = None if _is_crowded(text) else Membership.model_validate_json(text).lean()
        except ValueError:
            return None
        return found if found is not None and found.generation <= LATEST_GENERATION else None

    def reads_as(self, membership: Membership) -> None:
        """Set the membership that was just written: it need not be parsed, and is not kept twice."""
        self.__dict__["membership"] = membership  # where the property keeps what it has read

    def content(self) -> Json:
        """Its part of the ConfigMap."""
        return {"binaryData": {MEMBERSHIP_KEY: self.packed}}


def membership_record(raw: Json) -> MembershipRecord | None:
    """Return what a ConfigMap holds, unread; None when it holds no membership."""
    data, packed = raw.get("data"), raw.get("binaryData")
    if not isinstance(packed, dict) or packed.get(MEMBERSHIP_KEY) is None:
        return None
    written = sum(len(part) for part in (data, packed) if isinstance(part, dict))
    return MembershipRecord(str(packed[MEMBERSHIP_KEY]), holds_more=written > 1)


def membership_of(raw: Json) -> Membership | None:
    """Return the membership in a ConfigMap; None when it holds none, or none that can be read."""
    record = membership_record(raw)
    return record.membership if record is not None else None


def _is_crowded(text: bytes) -> bool:
    """More values than a membership of this length has: a million empty members take seconds to refuse one by one."""
    return any(text.count(sign) > len(text) // length + _FEW for sign, length in _SHORTEST.items())
