"""Send and serve requests over a Unix socket, one JSON object per line; for the supervisor and the nodes.

Responses are {"ok": true, ...} or {"ok": false, "error": "a sentence"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any

from trainium_contract.api_server.errors import ClientError
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

Json = dict[str, Any]
_MAX_LINE_BYTES = 1 << 20


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
    """Send a request and return its response; raise ClusterError if it is refused or takes over `timeout` seconds."""
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
        raise ClusterError(f"{message.get('op')}: no process listens at {path} ({error}); is it running?") from error
    try:
        response = json.loads(line)
    except ValueError:
        raise ClusterError(f"{message.get('op')}: {path} closed the connection without an answer.") from None
    if not isinstance(response, dict) or not response.get("ok"):
        reason = response.get("error") if isinstance(response, dict) else None
        raise ClusterError(str(reason or f"{message.get('op')} was refused without a reason."))
    return response


async def serve(path: Path, handle: Callable[[Json], Awaitable[Json]]) -> asyncio.Server:
    """Serve requests at a socket that only this user may use; a bad request gets an error."""

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ValueError):  # the caller disconnected, or sent too long a line
            while line := await reader.readline():
                writer.write(json.dumps(await _respond(line, handle)).encode() + b"\n")
                await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(serve_connection, sock=_bind(path), limit=_MAX_LINE_BYTES)


def _bind(path: Path) -> socket.socket:
    """Create the socket, only for this user, in place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    return listener


async def _respond(line: bytes, handle: Callable[[Json], Awaitable[Json]]) -> Json:
    try:
        message = json.loads(line)
        if not isinstance(message, dict):
            return {"ok": False, "error": "A request is a JSON object with the key op."}
        return {"ok": True, **await handle(message)}
    except (ClientError, ClusterError, OSError) as error:
        return {"ok": False, "error": str(error)}
    except (KeyError, TypeError, ValueError) as error:
        return {"ok": False, "error": f"The request is malformed: {error!r}."}
