"""Answers of the API server for a client that reads JSON in its own way (kopf's): none of them is too deep for it.

Invariant: what such a client reads without trouble is handed on byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import aiohttp
from pydantic_core import from_json

from trainium_contract.stored_json import read_json, shallow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.connector import Connection


class StoredAnswer(aiohttp.ClientResponse):
    """To be the `response_class` of such a client's session."""

    async def json(self, **_how: Any) -> Any:
        """See aiohttp.ClientResponse. Raises ValueError."""
        return read_json(await self.read())

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """See aiohttp.ClientResponse."""
        started = await super().start(connection)
        if self.url.query.get("watch"):
            self.content = cast("aiohttp.StreamReader", _Lines(self.content))
        return started


class _Lines:
    """A watch, an event a line."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """See aiohttp.StreamReader; in whole lines."""
        held = b""
        async for data in self._content.iter_chunked(size):
            lines, end, held = (held + data).rpartition(b"\n")
            if end:
                yield b"\n".join(_readable(line) for line in lines.split(b"\n")) + end
        if held:
            yield _readable(held)


def _readable(line: bytes) -> bytes:
    try:
        from_json(line)
    except ValueError:
        return shallow(line).decode("utf-8", "replace").encode()
    return line
