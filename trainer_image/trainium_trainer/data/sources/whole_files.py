"""Small files that are remembered in the cache, written by whichever processes come to it, without a lock.

Invariant: a file appears whole, also when processes of several nodes write it at once. Neither a process's number nor
an object's place in memory tells them apart: pods count their processes alike, and ranks are forks of one process.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A stream whose contents become the file at the end; nothing is left of one that fails."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("xb") as stream:
            yield stream
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
