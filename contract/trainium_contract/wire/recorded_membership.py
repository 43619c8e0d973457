"""Read what the operator records in the ConfigMap `NAME-membership`: the members, and a status that was refused.

Invariants: uses only the format, none of the operator's code, so that tools outside the operator can check it. Never
unpacks more than `MAX_RECORD_BYTES`, whatever the object holds.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

from trainium_contract.stored_json import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_RECORD_BYTES = 4 * 2**20
"""Bytes of a record: about 14,000 members, and less than 0.1 s to read."""
MEMBERSHIP_KEY = "membership.json.gz"
STATUS_KEY = "status.json"
"""Key of the status that the API server has refused so far; absent while it accepts the job's status."""
REFUSAL_KEY = "status-refusal"
"""Key of the reason, a sentence."""
_GZIP = zlib.MAX_WBITS | 16


def unpack_membership(config_map: Mapping[str, Any]) -> bytes:
    """Unpack the record as JSON. Raises KeyError for a ConfigMap without one, ValueError if it cannot be unpacked."""
    packed = base64.b64decode(config_map["binaryData"][MEMBERSHIP_KEY])
    stream = zlib.decompressobj(_GZIP)
    try:
        text = stream.decompress(packed, MAX_RECORD_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"the membership cannot be unpacked: {error}") from error
    if not stream.eof or len(text) > MAX_RECORD_BYTES:
        raise ValueError("the membership is cut short, or longer than any membership")
    return text


def parse_membership(config_map: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the record. Raises KeyError if the ConfigMap has none, ValueError if it cannot be read."""
    record = json.loads(unpack_membership(config_map))
    if not isinstance(record, dict):
        raise ValueError("the membership is no JSON object")  # noqa: TRY004 - one kind of error for bad data
    return record


def parse_members(config_map: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the members by node rank. Raises KeyError if there is no record, ValueError if it cannot be read."""
    members: list[dict[str, Any]] = parse_membership(config_map)["members"]
    return members


def parse_refused_status(config_map: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the status that the API server has refused so far; None if there is none, or none that can be read."""
    data = config_map.get("data")
    try:
        status = read_json(str(data[STATUS_KEY]).encode()) if isinstance(data, dict) else None
    except (KeyError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def count_refused_writes(status: Mapping[str, Any]) -> int:
    """Return how many versions of a status the API server refused before it; of two, the one with more is newer."""
    count = status.get("refusedWrites")
    return count if isinstance(count, int) else 0
