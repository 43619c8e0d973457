"""The child processes of a supervisor: started with log and pid file, and collected when they end.

Invariants: only the main thread starts processes; every ended process is collected, adopted orphans too, so none stays
a zombie.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainium_devcluster.errors import ClusterError
from trainium_devcluster.processes.process_families import ProcessId, identify, resident_bytes, spawn

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Coroutine, Mapping, Sequence

    from trainium_devcluster.state import ClusterPaths


@dataclass(slots=True)
class Child:
    """A process that was started and may have ended."""

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
        """Wait for the end; False when it did not come within `seconds`."""
        try:
            await asyncio.wait_for(self.ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def row(self, state: str) -> dict[str, object]:
        """Return the part of `status` about the process; memory in bytes."""
        pid = self.identity.pid
        return {"pid": pid, "state": state, "code": self.code, "bytes": resident_bytes(pid)}


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
        if identity is None:  # a child that nobody has collected yet is at least a zombie
            raise ClusterError(f"{name} vanished while it was started; its log is {log}.")
        child = Child(process, identity)
        self._running[process.pid] = child
        self._paths.pids.mkdir(exist_ok=True)
        identity.write(self._paths.pids / f"{name}.json")
        return child

    def collect(self) -> None:
        """Collect every ended child; for SIGCHLD."""
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
                child.process.returncode = child.code  # subprocess would complain of a child that it never saw end
                child.ended.set()

    def watch(self, work: Coroutine[object, object, None]) -> None:
        """Run something beside the supervisor until it ends or the cluster does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_watching(self) -> None:
        """Cancel all that `watch` started."""
        for task in tuple(self._tasks):
            task.cancel()
