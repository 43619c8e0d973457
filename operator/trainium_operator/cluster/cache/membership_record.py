"""Keep and parse the membership in a ConfigMap.

Guarantees:
- The kept part is never larger than what the API server stores, so it costs this process no more than the cluster.
- It is decompressed only when the plan of its job needs it, and never beyond `MAX_RECORD_BYTES`.
- A record that cannot be parsed counts as none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.wire.messages import MAX_GENERATION, Membership
from trainium_contract.wire.recorded_membership import MEMBERSHIP_KEY, unpack_membership
from trainium_operator.plan.model.cached_property import cached_property

if TYPE_CHECKING:
    from trainium_contract.api_server.responses import Json

_MIN_ITEM_CHARACTERS = {b",": 8, b"{": 32, b"[": 32}
"""Minimum bytes of a membership for each value; a member has at least 85 bytes, with six commas."""
_FEW = 64


@dataclass(frozen=True)
class MembershipRecord:
    """The record as stored; without slots, because the parsed membership is cached."""

    packed: str
    """Base64 of gzip."""
    holds_more: bool = False
    """Whether the object has content besides the record."""

    @cached_property
    def membership(self) -> Membership | None:
        """Return the recorded membership; None when it cannot be parsed."""
        try:
            text = unpack_membership(self.to_config_map_data())
            membership = None if _is_crowded(text) else Membership.model_validate_json(text).share_fields_set()
        except ValueError:
            return None
        return membership if membership is not None and membership.generation <= MAX_GENERATION else None

    def set_parsed(self, membership: Membership) -> None:
        """Set the membership that was just written, so that it is not parsed again or kept twice."""
        self.__dict__["membership"] = membership  # the cached property's storage

    def to_config_map_data(self) -> Json:
        """Return its part of the ConfigMap."""
        return {"binaryData": {MEMBERSHIP_KEY: self.packed}}


def read_membership_record(raw: Json) -> MembershipRecord | None:
    """Return the record in a ConfigMap without parsing it; None when there is none."""
    data, packed = raw.get("data"), raw.get("binaryData")
    if not isinstance(packed, dict) or packed.get(MEMBERSHIP_KEY) is None:
        return None
    written = sum(len(part) for part in (data, packed) if isinstance(part, dict))
    return MembershipRecord(str(packed[MEMBERSHIP_KEY]), holds_more=written > 1)


def read_membership(raw: Json) -> Membership | None:
    """Return the membership in a ConfigMap; None when there is none, or none that can be parsed."""
    record = read_membership_record(raw)
    return record.membership if record is not None else None


def _is_crowded(text: bytes) -> bool:
    """Return whether it has more values than a membership of its length can have.

    Refusing a million empty members one by one would take seconds.
    """
    return any(text.count(sign) > len(text) // length + _FEW for sign, length in _MIN_ITEM_CHARACTERS.items())
