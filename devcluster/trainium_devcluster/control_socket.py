"""Send and serve requests over a Unix socket, one JSON object per line; for the supervisor and the nodes.

Answers are {"ok": true, ...} or {"ok": false, "error": "a sentence"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

Json = dict[str, Any]
_MAX_LINE = 1 << 20


def accepts_requests(path: Path) -> bool:
    """Return whether a process accepts requests at a socket; the file exists before that."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
    except OSError:
        return False
    return True


def request(path: Path, message: Mapping[str, Any], timeout: float = 60.0) -> Json:
    """Send one request and return its answer; raises ClusterError when refused or not answered in `timeout` seconds."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
    except TimeoutError:
        raise ClusterError(f"{message.get('op')}: no answer from {path} within {timeout:.0f} s.") from None
    except OSError as error:
        raise ClusterError(f"{message.get('op')}: nobody answers at {path} ({error}); is it running?") from error
    try:
        answer = json.loads(line)
    except ValueError:
        raise ClusterError(f"{message.get('op')}: {path} closed the connection without an answer.") from None
    if not isinstance(answer, dict) or not answer.get("ok"):
        reason = answer.get("error") if isinstance(answer, dict) else None
        raise ClusterError(str(reason or f"{message.get('op')} was refused without a reason."))
    return answer


async def serve(path: Path, handle: Callable[[Json], Awaitable[Json]]) -> asyncio.Server:
    """Answer requests at a socket that only this user may use; a bad request gets a sentence."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):  # the caller disconnected, or sent too long a line
            while line := await reader.readline():
                writer.write(json.dumps(await _answer(line, handle)).encode() + b"\n")
                await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(connected, sock=_bind(path), limit=_MAX_LINE)


def _bind(path: Path) -> socket.socket:
    """Create the socket, only for this user, in place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(str(path))
    path.chmod(0o600)
    return bound


async def _answer(line: bytes, handle: Callable[[Json], Awaitable[Json]]) -> Json:
    try:
        message = json.loads(line)
        if not isinstance(message, dict):
            return {"ok": False, "error": "A request is a JSON object with the key op."}
        return {"ok": True, **await handle(message)}
    except (ClusterError, OSError) as error:
        return {"ok": False, "error": str(error)}
    except (KeyError, TypeError, ValueError) as error:
        return {"ok": False, "error": f"The request is malformed: {error!r}."}
