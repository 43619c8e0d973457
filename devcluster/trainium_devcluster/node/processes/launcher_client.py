"""Use the launcher from the node: container processes as asyncio objects.

Guarantees:
- The launcher's message reports an exit; there is no polling.
- `Process.exited` is set exactly once, also if the process never executed its command.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from trainium_devcluster.node.processes.command import ContainerCommand
from trainium_devcluster.node.processes.launcher import MAX_MESSAGE


class LaunchError(Exception):
    """The container's command could not be started; `stage` is the step that failed."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage = stage


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The end of a process: `code` as in a shell (128 + signal), `at` in seconds since the epoch."""

    code: int
    signal: int
    at: float


@dataclass(slots=True, eq=False)
class Process:
    """A process of the launcher; `pid` is its id on the machine, 0 until it is known."""

    name: str
    launcher: "Launcher"
    pid: int = 0
    running: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    exited: asyncio.Future[ExitStatus] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; no effect if the process has ended."""
        if not self.exited.done():
            self.launcher.send_signal(self.name, number)


class Launcher:
    """Starts processes and reports their ends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._processes: dict[str, Process] = {}
        self._names = itertools.count(1)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(sock.fileno(), self._receive)

    def start(self, command: ContainerCommand, stdin: int, stdout: int, stderr: int) -> Process:
        """Start a process. The caller keeps the descriptors and may close them at once.

        `Process.running` becomes done when the command runs, or fails with `LaunchError`.
        """
        process = Process(f"p{next(self._names)}", self)
        self._processes[process.name] = process
        payload = os.memfd_create("container")
        read_error, write_error = os.pipe()
        try:
            os.write(payload, pickle.dumps(command))
            message = json.dumps({"op": "start", "id": process.name}).encode()
            self._send(message, [payload, stdin, stdout, stderr, write_error])
        finally:
            os.close(payload)
            os.close(write_error)
        os.set_blocking(read_error, False)
        asyncio.get_running_loop().add_reader(read_error, self._receive_start_result, process, read_error)
        return process

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Signal the process through the launcher, because only it knows whether the process is reaped."""
        self._send(json.dumps({"op": "signal", "id": name, "signal": int(number)}).encode(), [])

    def _send(self, message: bytes, fds: list[int]) -> None:
        self._socket.setblocking(True)  # the launcher always drains its socket, so this blocks for microseconds only
        try:
            socket.send_fds(self._socket, [message], fds)
        finally:
            self._socket.setblocking(False)

    def _receive_start_result(self, process: Process, fd: int) -> None:
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
            process.running.exception()  # a waiter gets the exception; without one it is no error
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
        process.exited.set_result(ExitStatus(code, number, message["time"]))

    def close(self) -> None:
        """End the launcher, and with it all its processes."""
        with contextlib.suppress(ValueError):
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
