"""The node's control socket: one JSON object per line in, one per line out.

Answers are {"ok": true, ...} or {"ok": false, "error": "a sentence"}.
Invariants: the socket file is readable by its owner only; a bad request never disturbs the node.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from trainium_devcluster.node.api.objects import Json

_log = logging.getLogger(__name__)
_MAX_PATH = 107  # bytes; the kernel's limit for a Unix socket's path
_MAX_LINE = 1024 * 1024

Handler = Callable[[Json], Awaitable[Json]]


async def serve(path: Path, handle: Handler) -> asyncio.Server:
    """Listen on `path`.

    Raises:
        ValueError: when the path is too long for a socket.
    """
    if len(str(path).encode()) > _MAX_PATH:
        raise ValueError(f"--control-socket {path} must be shorter than {_MAX_PATH + 1} bytes, the limit of a socket")
    _remove_stale_socket(path)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await _answer(line, handle)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError) as error:
            _log.debug("control socket: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_unix_server(connected, str(path), limit=_MAX_LINE)
    os.chmod(path, 0o600)  # noqa: PTH101 - a metadata call; pathlib would be taken for slow I/O
    return server


def _remove_stale_socket(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)


async def _answer(line: bytes, handle: Handler) -> Json:
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            return {"ok": False, "error": "a request is a JSON object with the key op"}
        return {"ok": True, **await handle(request)}
    except (ValueError, KeyError, TypeError, OSError) as error:
        text = f"the request lacks {error}" if isinstance(error, KeyError) else str(error)
        return {"ok": False, "error": text}


def request(path: Path, body: Json, timeout: float = 10.0) -> Json:
    """Send one request and return the answer; for callers outside the node.

    Raises:
        OSError: when the node does not listen or does not answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        connection.sendall(json.dumps(body).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            chunk = connection.recv(65536)
            if not chunk:
                raise ConnectionError(f"the node behind {path} closed the connection without an answer")
            answer += chunk
    result: Json = json.loads(answer)
    return result
