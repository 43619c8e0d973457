"""Running a command inside a running container: exec probes, lifecycle hooks and `kubectl exec`.

Invariants: the command sees the container's file system, processes and host name; it is killed when its time is up;
output beyond what the caller wants is read and dropped, so that the command never blocks on it.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainium_devcluster.node.api.waiting import within
from trainium_devcluster.node.processes.launcher_client import Command, LaunchError, Process

_MAX_OUTPUT = 10 * 1024
NOT_EXECUTABLE = 126


@dataclass(frozen=True, slots=True)
class InsideResult:
    """Result of a command inside a container; `timed_out` if it was killed for taking too long."""

    code: int
    output: str
    timed_out: bool = False


def command_inside(process: Process, argv: Sequence[str], base: Command) -> Command:
    """Return a command that joins the container of `process`, which was started with `base`."""
    return replace(base, argv=tuple(argv), join=process.pid, mounts=())


async def run(process: Process, argv: Sequence[str], base: Command, timeout: float | None) -> InsideResult:
    """Run `argv` to its end, with standard output and error together."""
    read, write = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        started = process.launcher.start(command_inside(process, argv, base), null, write, write)
    finally:
        os.close(null)
        os.close(write)
    output = asyncio.create_task(_collect(read))
    timed_out = False
    try:
        await within(asyncio.shield(started.running), timeout)
        ended = await within(asyncio.shield(started.exited), timeout)
        code = ended.code
    except LaunchError as error:
        output.cancel()
        return InsideResult(NOT_EXECUTABLE, str(error))
    except TimeoutError:
        timed_out, code = True, 137
    finally:
        started.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await within(asyncio.shield(output), 1.0)
    text = output.result() if output.done() and not output.cancelled() else ""
    return InsideResult(code, text, timed_out)


async def _collect(fd: int) -> str:
    """Read `fd` to its end and keep the beginning."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    kept = bytearray()
    try:
        while chunk := await reader.read(_MAX_OUTPUT):
            kept += chunk[: _MAX_OUTPUT - len(kept)]
    finally:
        transport.close()
    return kept.decode(errors="replace")
