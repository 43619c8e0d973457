"""Serve `kubectl exec`: the standard streams of a command inside a container, over one WebSocket.

Every binary message begins with a channel byte: 0 standard input, 1 output, 2 error, 3 the result (a metav1.Status), 4
the terminal's size, 255 (protocol v5) the end of a channel.

The result is the last message. The command ends when its caller disconnects.
"""

import asyncio
import contextlib
import json
import os
import signal
from typing import Any

from aiohttp import WSMsgType, web

from trainium_devcluster.node.api.objects import Json
from trainium_devcluster.node.processes.command import ContainerCommand
from trainium_devcluster.node.processes.launcher_client import ExitStatus, Launcher, LaunchError

_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_CHUNK = 32768
_DRAIN_SECONDS = 1.0


async def serve(
    request: web.Request, launcher: Launcher, command: ContainerCommand, with_stdin: bool
) -> web.WebSocketResponse:
    """Run `command` and connect it with the caller until it ends."""
    socket = web.WebSocketResponse(protocols=_PROTOCOLS)
    await socket.prepare(request)
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    if not with_stdin:
        os.close(in_write)
    try:
        process = launcher.start(command, in_read, out_write, err_write)
    finally:
        for fd in (in_read, out_write, err_write):
            os.close(fd)
    pumps = [
        asyncio.create_task(_pump(out_read, _STDOUT, socket)),
        asyncio.create_task(_pump(err_read, _STDERR, socket)),
    ]
    feeder = asyncio.create_task(_feed(socket, in_write if with_stdin else None))
    try:
        either: set[asyncio.Future[Any]] = {process.exited, feeder}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not process.exited.done():
            process.signal(signal.SIGKILL)
        ended = await process.exited
        await asyncio.wait(pumps, timeout=_DRAIN_SECONDS)
        with contextlib.suppress(ConnectionError):
            error = process.running.exception() if process.running.done() else None
            await socket.send_bytes(bytes([_ERROR]) + json.dumps(_build_result(ended, error)).encode())
    finally:
        process.signal(signal.SIGKILL)
        for task in (*pumps, feeder):
            task.cancel()
        await asyncio.gather(*pumps, feeder, return_exceptions=True)
        await socket.close()
    return socket


async def _pump(fd: int, channel: int, socket: web.WebSocketResponse) -> None:
    """Send the output of `fd` to the caller."""
    reader = asyncio.StreamReader(limit=_CHUNK)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        while chunk := await reader.read(_CHUNK):
            await socket.send_bytes(bytes([channel]) + chunk)
    except ConnectionError:
        pass
    finally:
        transport.close()


async def _feed(socket: web.WebSocketResponse, fd: int | None) -> None:
    """Write the caller's messages to the command's standard input; return when the caller disconnects."""
    try:
        async for message in socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == _STDIN and data and fd is not None:
                await asyncio.to_thread(_write_all, fd, data)
            elif channel == _CLOSE and data[:1] == bytes([_STDIN]) and fd is not None:
                os.close(fd)
                fd = None
    finally:
        if fd is not None:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


def _build_result(ended: ExitStatus, error: BaseException | None) -> Json:
    if isinstance(error, LaunchError):
        return {"metadata": {}, "status": "Failure", "reason": "InternalError", "message": str(error), "code": 500}
    if ended.code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {ended.code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(ended.code)}]},
    }
