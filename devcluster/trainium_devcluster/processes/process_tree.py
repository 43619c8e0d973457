"""Start processes that cannot outlive their supervisor, and signal them with all their descendants.

Guarantees:
- A child is the leader of a session and is killed by the kernel when the supervisor dies.
- A pid from a file is used only if its process started at the time in the file.
- A family is stopped from its root, so that no process escapes while it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_devcluster.processes import syscalls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SIGNAL_SECONDS = 5.0
"""Longest wait until all processes of a family have ended or stopped."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process; its start (clock ticks since boot) distinguishes it from a later one with the same number."""

    pid: int
    started: int

    def is_alive(self) -> bool:
        """Return whether this process still runs; a zombie does not."""
        stat = _read_stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state != "Z"

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process has ended."""
        if not self.is_alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def write(self, path: Path) -> None:
        """Store as a pid file."""
        staging = path.with_name(f".{path.name}.{os.getpid()}")
        staging.write_text(json.dumps({"pid": self.pid, "started": self.started}))
        staging.replace(path)

    @classmethod
    def read(cls, path: Path) -> ProcessId | None:
        """Read a pid file; return None if it is missing or damaged."""
        try:
            fields = json.loads(path.read_text())
            return cls(int(fields["pid"]), int(fields["started"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    parent: int
    started: int


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process."""
    stat = _read_stat(pid)
    return ProcessId(pid, stat.started) if stat is not None else None


def spawn(
    command: Sequence[str], *, log: Path, environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    """Start a command in a new session; the kernel kills it when the calling thread's process dies.

    Must be called from the main thread: the kernel's death signal is bound to the thread that forked.
    """
    supervisor = os.getpid()

    def before_exec() -> None:
        syscalls.die_with_parent(signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor died between fork and prctl
            os._exit(1)

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
            preexec_fn=before_exec,  # noqa: PLW1509 - the supervisor has one thread
        )


def list_tree(roots: Iterable[int]) -> list[int]:
    """Return the pids of these processes and all their descendants, parents before children."""
    table = {pid: stat.parent for pid in _list_pids() if (stat := _read_stat(pid)) is not None}
    children: dict[int, list[int]] = {}
    for child, parent in table.items():
        children.setdefault(parent, []).append(child)
    ordered = [pid for pid in roots if pid in table]
    for pid in ordered:
        ordered.extend(children.get(pid, ()))
    return ordered


def read_command_line(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def list_sockets(pid: int) -> list[tuple[int, str]]:
    """Return descriptor and inode of each socket of a process."""
    sockets = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = str(Path(entry.path).readlink()).partition(":")
                if kind == "socket":
                    sockets.append((int(entry.name), inode.strip("[]")))
    return sockets


def find_marked(variable: str, value: str, *, prefix: bool = False) -> list[int]:
    """Return the pids of this user's processes with an environment variable of this value (or prefix)."""
    expected = f"{variable}={value}".encode()
    pids = []
    for pid in _list_pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(entry.startswith(expected) if prefix else entry == expected for entry in entries):
                pids.append(pid)
    return pids


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_tree(root: int | None, variable: str, value: str, *, prefix: bool = False) -> None:
    """Kill a process, its descendants and all marked processes; give up after `_SIGNAL_SECONDS`."""
    deadline = time.monotonic() + _SIGNAL_SECONDS
    while True:
        members = _find_members(root, variable, value, prefix=prefix)
        if not members:
            return
        # Stop before the kill, and the root before its children, because a stopped process cannot start another one.
        send_signal(members, signal.SIGSTOP)
        send_signal(_find_members(root, variable, value, prefix=prefix), signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def freeze_tree(root: int, variable: str, value: str) -> None:
    """Stop a process and its family, the root first; return when all have stopped or after `_SIGNAL_SECONDS`.

    A process stops only when it is scheduled next, and may start another one before. So the family is listed again
    until all have stopped.
    """
    deadline = time.monotonic() + _SIGNAL_SECONDS
    while running := [pid for pid in _find_members(root, variable, value) if not _is_stopped(pid)]:
        send_signal(running, signal.SIGSTOP)
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)


def thaw_tree(root: int, variable: str, value: str) -> None:
    """Continue a frozen family, the root last, so that it never finds its children stopped."""
    send_signal(reversed(_find_members(root, variable, value)), signal.SIGCONT)


def read_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _find_members(root: int | None, variable: str, value: str, *, prefix: bool = False) -> list[int]:
    members = list_tree([root]) if root is not None else []
    members += find_marked(variable, value, prefix=prefix)
    alive = []
    for pid in dict.fromkeys(members):
        stat = _read_stat(pid)
        if stat is not None and stat.state not in "ZX":
            alive.append(pid)
    return alive


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a tracer, or has ended."""
    stat = _read_stat(pid)
    return stat is None or stat.state in "TtZX"


def _list_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names only, much faster


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command's name may contain anything, even spaces and brackets
    return _Stat(state=fields[0], parent=int(fields[1]), started=int(fields[19]))
