"""Signs what the agents of a generation write into their store: a value that none of them wrote is refused unread.

The store decides attempts and stops, and whoever reaches its port can write it. The key follows from the membership:
the uids of its pods are drawn at random and are known to those who may read pods in the job's namespace.

Guarantees:
- The key is on no command line and in no log.
- A value counts for its own name and its own generation only.
- Nothing is parsed before its signature is checked.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.wire.messages import Membership

LONGEST_VALUE = 4 << 20
_SIGNATURE_CHARACTERS = 32


class ForgedValueError(Exception):
    """A value that no agent of this generation wrote."""


class Seal:
    """Signs and verifies the values of one generation."""

    def __init__(self, membership: Membership) -> None:
        words = (str(membership.generation), *(member.pod_uid for member in membership.members))
        self._key = hashlib.sha256("\0".join(("trainium store", *words)).encode()).digest()

    def close(self, name: str, value: str) -> str:
        """Return the value as it is stored under this name."""
        return self._sign(name, value) + value

    def open(self, name: str, stored: bytes | str) -> str:
        """Return the value that is stored under this name. Raises ForgedValueError."""
        if len(stored) > LONGEST_VALUE:
            raise ForgedValueError(f"{name} in the generation's store is longer than anything that agents write")
        text = stored.decode("utf-8", "replace") if isinstance(stored, bytes) else stored
        signature, value = text[:_SIGNATURE_CHARACTERS], text[_SIGNATURE_CHARACTERS:]
        if not hmac.compare_digest(signature.encode(), self._sign(name, value).encode()):
            raise ForgedValueError(f"{name} in the generation's store was not written by an agent of this generation")
        return value

    def _sign(self, name: str, value: str) -> str:
        return hmac.new(self._key, f"{name}\0{value}".encode(), hashlib.sha256).hexdigest()[:_SIGNATURE_CHARACTERS]
