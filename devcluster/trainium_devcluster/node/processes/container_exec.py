"""Run a command inside a running container, for exec probes and `kubectl exec`.

Guarantees:
- The command sees the container's file system, processes and host name.
- It is killed at its timeout.
- Output beyond the caller's limit is read and dropped, so that the command never blocks.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainium_devcluster.node.api.waiting import with_timeout
from trainium_devcluster.node.processes.command import ContainerCommand
from trainium_devcluster.node.processes.launcher_client import LaunchError, Process

_MAX_OUTPUT = 10 * 1024
NOT_EXECUTABLE = 126


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command inside a container; `timed_out` if it was killed at its timeout."""

    code: int
    output: str
    timed_out: bool = False


def build_exec_command(process: Process, argv: Sequence[str], base: ContainerCommand) -> ContainerCommand:
    """Return a command that joins the container of `process`, which was started with `base`."""
    return replace(base, argv=tuple(argv), join=process.pid, mounts=())


async def run(process: Process, argv: Sequence[str], base: ContainerCommand, timeout: float) -> ExecResult:
    """Run `argv` to its end, with standard output and error together."""
    read, write = os.pipe()
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        started = process.launcher.start(build_exec_command(process, argv, base), null, write, write)
    finally:
        os.close(null)
        os.close(write)
    output = asyncio.create_task(_collect(read))
    timed_out = False
    try:
        await with_timeout(asyncio.shield(started.running), timeout)
        ended = await with_timeout(asyncio.shield(started.exited), timeout)
        code = ended.code
    except LaunchError as error:
        output.cancel()
        return ExecResult(NOT_EXECUTABLE, str(error))
    except TimeoutError:
        timed_out, code = True, 137
    finally:
        started.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await with_timeout(asyncio.shield(output), 1.0)
    text = output.result() if output.done() and not output.cancelled() else ""
    return ExecResult(code, text, timed_out)


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
