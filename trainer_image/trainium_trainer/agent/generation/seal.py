"""What the agents of a generation write into their store, sealed: a value that none of them wrote is refused unread.

The store decides attempts and stops, and whoever reaches its port can write it. The key follows from the membership:
the uids of its pods are drawn at random and are known to those who may read pods in the job's namespace, which is the
border that holds everywhere. Invariants: the key is on no command line and in no log; a value counts for its own name
and its own generation only; nothing is parsed before its seal is right.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Membership

LONGEST_VALUE = 4 << 20
_MARK_CHARACTERS = 32


class ForgedValueError(Exception):
    """A value that no agent of this generation wrote."""


class Seal:
    """Of one generation. Where an agent of it cannot seal, because it is of an older version, nobody does."""

    def __init__(self, membership: Membership) -> None:
        self._key: bytes | None = None
        if all(member.seals for member in membership.members):
            words = (str(membership.generation), *(member.pod_uid for member in membership.members))
            self._key = hashlib.sha256("\0".join(("trainium store", *words)).encode()).digest()

    def close(self, name: str, value: str) -> str:
        """The value as it is stored under this name."""
        return value if self._key is None else self._mark(name, value) + value

    def open(self, name: str, stored: bytes | str) -> str:
        """The value that is stored under this name. Raises ForgedValueError."""
        if len(stored) > LONGEST_VALUE:
            raise ForgedValueError(f"{name} in the generation's store is longer than anything that agents write")
        text = stored.decode("utf-8", "replace") if isinstance(stored, bytes) else stored
        if self._key is None:
            return text
        mark, value = text[:_MARK_CHARACTERS], text[_MARK_CHARACTERS:]
        if not hmac.compare_digest(mark.encode(), self._mark(name, value).encode()):
            raise ForgedValueError(f"{name} in the generation's store was not written by an agent of this generation")
        return value

    def _mark(self, name: str, value: str) -> str:
        assert self._key is not None, "only who seals marks"
        return hmac.new(self._key, f"{name}\0{value}".encode(), hashlib.sha256).hexdigest()[:_MARK_CHARACTERS]
