"""Start the child processes of a supervisor with log and pid file, and collect them when they end.

Guarantees:
- Only the main thread starts processes.
- Every ended process is collected, including adopted orphans, so none remains a zombie.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_devcluster.errors import ClusterError
from trainium_devcluster.processes.process_tree import ProcessId, identify, read_resident_bytes, spawn

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Coroutine, Mapping, Sequence

    from trainium_devcluster.state import ClusterPaths


@dataclass(slots=True)
class Child:
    """A started process, which may have ended."""

    process: subprocess.Popen[bytes]
    identity: ProcessId
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    code: int | None = None
    """Exit code as in subprocess: negative for a signal; None while it runs."""

    @property
    def pid(self) -> int | None:
        """The pid while the process runs."""
        return self.identity.pid if self.identity.is_alive() else None

    async def wait(self, seconds: float) -> bool:
        """Wait for the end; return False after `seconds`."""
        try:
            await asyncio.wait_for(self.ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def build_status_row(self, state: str) -> dict[str, object]:
        """Return the part of `status` about the process; memory in bytes."""
        pid = self.identity.pid
        return {"pid": pid, "state": state, "code": self.code, "bytes": read_resident_bytes(pid)}


class Children:
    """Starts and collects processes."""

    def __init__(self, paths: ClusterPaths) -> None:
        self._paths = paths
        self._running: dict[int, Child] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start a process that writes to `<name>.log`; raises ClusterError when it cannot be started."""
        log = self._paths.logs / f"{name}.log"
        try:
            process = spawn(command, log=log, environment=environment, folder=self._paths.root)
        except OSError as error:
            raise ClusterError(f"{name} cannot be started: {error}.") from error
        identity = identify(process.pid)
        if identity is None:  # a child that is not collected yet is at least a zombie
            raise ClusterError(f"{name} vanished while it was started; its log is {log}.")
        child = Child(process, identity)
        self._running[process.pid] = child
        self._paths.pids.mkdir(exist_ok=True)
        identity.write(self._paths.pids / f"{name}.json")
        return child

    def reap(self) -> None:
        """Collect every ended child; the handler of SIGCHLD."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._running.pop(pid, None)
            if child is not None:
                child.code = os.waitstatus_to_exitcode(status)
                child.process.returncode = child.code  # subprocess would warn about a child whose end it did not see
                child.ended.set()

    def run_in_background(self, work: Coroutine[object, object, None]) -> None:
        """Run a task beside the supervisor until it ends or the cluster does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel_background(self) -> None:
        """Cancel all tasks of `run_in_background`."""
        for task in tuple(self._tasks):
            task.cancel()
