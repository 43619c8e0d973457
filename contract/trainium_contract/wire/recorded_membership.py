"""Read the membership that the operator records in the ConfigMap `NAME-membership`.

Invariants: knows the form alone, none of the operator's code, so that what reads it from outside is an independent
witness; never unpacks more than `LARGEST_TEXT`, whatever the object holds.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGEST_TEXT = 4 * 2**20
"""Bytes of a record: about 14,000 members, and less than 0.1 s to read."""
MEMBERSHIP_KEY = "membership.json.gz"
_GZIP = zlib.MAX_WBITS | 16


def recorded_text(config_map: Mapping[str, Any]) -> bytes:
    """Unpack the record as JSON. Raises KeyError for a ConfigMap without one, ValueError when it cannot be unpacked."""
    packed = base64.b64decode(config_map["binaryData"][MEMBERSHIP_KEY])
    stream = zlib.decompressobj(_GZIP)
    try:
        text = stream.decompress(packed, LARGEST_TEXT + 1)
    except zlib.error as error:
        raise ValueError(f"the membership cannot be unpacked: {error}") from error
    if not stream.eof or len(text) > LARGEST_TEXT:
        raise ValueError("the membership is cut short, or longer than any membership")
    return text


def recorded_membership(config_map: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the record. Raises KeyError when the ConfigMap holds none, ValueError when it cannot be read."""
    record = json.loads(recorded_text(config_map))
    if not isinstance(record, dict):
        raise ValueError("the membership is no JSON object")  # noqa: TRY004 - one kind of error for bad data
    return record


def members_of(config_map: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the members by node rank. Raises KeyError when there is no record, ValueError when it cannot be read."""
    members: list[dict[str, Any]] = recorded_membership(config_map)["members"]
    return members
