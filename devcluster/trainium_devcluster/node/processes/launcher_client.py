"""The node's side of the launcher: container processes as asyncio objects.

Invariants: an exit is known the moment the launcher's message arrives, nothing polls; `Process.exited` is set exactly
once, also when the process never got as far as its command.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainium_devcluster.node.processes.container_root import Mount
from trainium_devcluster.node.processes.isolation import Isolation
from trainium_devcluster.node.processes.launcher import MAX_MESSAGE

# What container runtimes grant by default; the numbers are those of capabilities(7).
CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "MKNOD": 27, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip
ADDABLE_CAPABILITIES = CAPABILITIES | {
    "NET_ADMIN": 12, "IPC_LOCK": 14, "IPC_OWNER": 15, "SYS_PTRACE": 19, "SYS_NICE": 23, "SYS_RESOURCE": 24,
}  # fmt: skip


class LaunchError(Exception):
    """The container's command could not be started; `stage` is the step that failed."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage = stage


@dataclass(frozen=True, slots=True)
class Exit:
    """End of a process: `code` as a shell shows it (128 + signal), `at` in seconds since the epoch."""

    code: int
    signal: int
    at: float


@dataclass(frozen=True, slots=True)
class Command:
    """Command to start. `scratch`, `shm` and `hidden` are directories, see `container_root.RootPlan`."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = "/"
    hostname: str = ""
    mounts: tuple[Mount, ...] = ()
    scratch: str = ""
    shm: str = ""
    hidden: str = ""
    read_only_root: bool = False
    capabilities: tuple[int, ...] | None = None
    no_new_privileges: bool = False
    join: int | None = None  # process id of the container in which the command is to run, None for a new container

    def payload(self) -> bytes:
        """Encode a request for the launcher."""
        body: dict[str, Any] = {
            "argv": list(self.argv), "env": dict(self.env), "cwd": self.cwd, "hostname": self.hostname,
            "mounts": [{"source": m.source, "target": m.target, "read_only": m.read_only} for m in self.mounts],
            "scratch": self.scratch, "shm": self.shm, "hidden": self.hidden, "read_only_root": self.read_only_root,
            "capabilities": self.capabilities, "no_new_privileges": self.no_new_privileges, "join": self.join,
        }  # fmt: skip
        return json.dumps(body).encode()


@dataclass(slots=True, eq=False)
class Process:
    """One process that the launcher started; `pid` is its id on the machine, 0 until it is known."""

    name: str
    launcher: "Launcher"
    pid: int = 0
    running: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    exited: asyncio.Future[Exit] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        if not self.exited.done():
            self.launcher.send_signal(self.name, number)


class Launcher:
    """Starts processes and reports their ends."""

    def __init__(self, sock: socket.socket, isolation: Isolation) -> None:
        self.isolation = isolation
        self._socket = sock
        self._socket.setblocking(False)
        self._processes: dict[str, Process] = {}
        self._names = itertools.count(1)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(sock.fileno(), self._receive)

    def start(self, command: Command, stdin: int, stdout: int, stderr: int) -> Process:
        """Start a process. The descriptors remain the caller's, who may close them at once.

        `Process.running` becomes done when the command runs, or fails with `LaunchError`.
        """
        process = Process(f"p{next(self._names)}", self)
        self._processes[process.name] = process
        payload = os.memfd_create("container")
        read_error, write_error = os.pipe()
        try:
            os.write(payload, command.payload())
            message = json.dumps({"op": "start", "id": process.name}).encode()
            self._send(message, [payload, stdin, stdout, stderr, write_error])
        finally:
            os.close(payload)
            os.close(write_error)
        os.set_blocking(read_error, False)
        asyncio.get_running_loop().add_reader(read_error, self._learn_start, process, read_error)
        return process

    async def run(self, command: Command, stdin: int, stdout: int, stderr: int) -> Process:
        """Start a process and wait until its command runs.

        Raises:
            LaunchError: when it could not be started.
        """
        process = self.start(command, stdin, stdout, stderr)
        await asyncio.shield(process.running)
        return process

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Have the launcher signal the process, which it alone knows not to be reaped yet."""
        self._send(json.dumps({"op": "signal", "id": name, "signal": int(number)}).encode(), [])

    def _send(self, message: bytes, fds: list[int]) -> None:
        self._socket.setblocking(
            True
        )  # the launcher always drains its socket; blocking here is a matter of microseconds
        try:
            socket.send_fds(self._socket, [message], fds)
        finally:
            self._socket.setblocking(False)

    def _learn_start(self, process: Process, fd: int) -> None:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        if process.running.done():
            return
        if data:
            report = json.loads(data)
            process.running.set_exception(LaunchError(report["stage"], report["message"]))
            process.running.exception()  # a waiter gets it; without one it is no error
        else:
            process.running.set_result(None)

    def _receive(self) -> None:
        while True:
            try:
                data = self._socket.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
                if not self.ended.done():
                    self.ended.set_result(None)
                return
            self._handle(json.loads(data))

    def _handle(self, message: dict[str, Any]) -> None:
        process = self._processes[message["id"]]
        if message["event"] == "started":
            process.pid = message["pid"]
            return
        del self._processes[process.name]
        status = message["status"]
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = 128 + number if number else os.WEXITSTATUS(status)
        process.exited.set_result(Exit(code, number, message["time"]))

    def close(self) -> None:
        """Let the launcher end, and with it every process it started."""
        with contextlib.suppress(ValueError):
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
