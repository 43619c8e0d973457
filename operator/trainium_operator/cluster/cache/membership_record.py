"""Keep and parse the membership in a ConfigMap.

Guarantees:
- The kept part is never larger than what the API server stores, so it costs this process no more than the cluster.
- It is decompressed only when the plan of its job needs it, in steps, and never beyond `LARGEST_TEXT`.
- A record that cannot be parsed counts as none. Of two forms in one object the newer generation counts.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.wire.messages import LATEST_GENERATION, Membership
from trainium_operator.plan.model import names
from trainium_operator.plan.model.cached_property import cached_property

if TYPE_CHECKING:
    from trainium_operator.cluster.api.client import Json

LARGEST_TEXT = 4 * 2**20
"""Bytes of a membership: about 14,000 members, and less than 0.1 s to read."""
_SHORTEST = {b",": 8, b"{": 32, b"[": 32}
"""Bytes of a membership for each of these, at least; a member is never shorter than 85, with six commas."""
_FEW = 64
_GZIP = zlib.MAX_WBITS | 16


@dataclass(frozen=True)
class MembershipRecord:
    """The record as stored; without slots, because the parsed membership is cached."""

    text: str = ""
    packed: str = ""
    """Base64 of gzip."""
    holds_more: bool = False
    """Somebody has put something else beside it."""

    @cached_property
    def membership(self) -> Membership | None:
        """Newest membership that can be parsed; None when there is none."""
        texts = (self.text.encode(errors="replace") or None, _unpacked(self.packed))
        found = [read for text in texts if text is not None and (read := _read(text)) is not None]
        return max(found, key=lambda each: each.generation, default=None)

    def reads_as(self, membership: Membership) -> None:
        """Set the membership that was just written: it need not be parsed, and is not kept twice."""
        self.__dict__["membership"] = membership  # where the property keeps what it has read

    def content(self) -> Json:
        """Its part of the ConfigMap."""
        found: Json = {}
        if self.text:
            found["data"] = {names.MEMBERSHIP_KEY: self.text}
        if self.packed:
            found["binaryData"] = {names.MEMBERSHIP_PACKED_KEY: self.packed}
        return found


def membership_record(raw: Json) -> MembershipRecord | None:
    """Return what a ConfigMap holds, unread; None when it holds neither form."""
    data, packed = raw.get("data"), raw.get("binaryData")
    text = data.get(names.MEMBERSHIP_KEY) if isinstance(data, dict) else None
    binary = packed.get(names.MEMBERSHIP_PACKED_KEY) if isinstance(packed, dict) else None
    if text is None and binary is None:
        return None
    written = sum(len(part) for part in (data, packed) if isinstance(part, dict))
    return MembershipRecord(str(text or ""), str(binary or ""), holds_more=written > bool(text) + bool(binary))


def membership_of(raw: Json) -> Membership | None:
    """Return the membership in a ConfigMap; None when it holds none, or none that can be read."""
    record = membership_record(raw)
    return record.membership if record is not None else None


def _read(text: bytes) -> Membership | None:
    if len(text) > LARGEST_TEXT or _is_crowded(text):
        return None
    try:
        found = Membership.model_validate_json(text).lean()
    except ValueError:
        return None
    return found if found.generation <= LATEST_GENERATION else None


def _is_crowded(text: bytes) -> bool:
    """More values than a membership of this length has: a million empty members take seconds to refuse one by one."""
    return any(text.count(sign) > len(text) // length + _FEW for sign, length in _SHORTEST.items())


def _unpacked(packed: str) -> bytes | None:
    """At most one byte more than is read: the rest stays packed, whatever its length."""
    if not packed:
        return None
    try:
        stream = zlib.decompressobj(_GZIP)
        text = stream.decompress(base64.b64decode(packed), LARGEST_TEXT + 1)
    except (binascii.Error, ValueError, zlib.error):
        return None
    return text if stream.eof else None  # cut short, or longer than any membership
