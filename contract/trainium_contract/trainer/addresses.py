"""Recognize the address of a file or folder, such as `s3://bucket/prefix`."""

from __future__ import annotations

import re

OBJECT_STORES = (
    "s3",  # Amazon S3 and servers that speak its protocol
)
"""The schemes of object stores: `obstore` serves each of them, with the credentials of the environment."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_address(place: str) -> bool:
    """Return whether a place starts as an address does; a folder may have `://` later in its path."""
    return _SCHEME.match(place) is not None
