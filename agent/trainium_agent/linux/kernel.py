"""Call Linux functions that Python lacks: parent-death signal, child subreaper, thread priority, process title.

None of them needs a privilege. If the kernel refuses a cosmetic one, nothing else changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_LAST = (2 << 13) | 7
"""The lowest best-effort priority; the idle class would wait for ever on a busy disk."""
_LOW_NICE = 10
"""A tenth of a normal thread's share: training hardly slows down, and a busy node still becomes ready."""
_NAME_BYTES = 15

_libc = ctypes.CDLL(None, use_errno=True)


def _call_prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when the thread that created it ends."""
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of every orphaned descendant, as PID 1 already is."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def lower_thread_priority() -> None:
    """Lower the CPU and I/O priority of the calling thread only."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_NICE)
    number = _SYS_IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        _libc.syscall(number, _IOPRIO_WHO_PROCESS, threading.get_native_id(), _IOPRIO_LAST)


def raise_thread_priority(native_id: int) -> None:
    """Restore the normal CPU priority of a thread, if that is allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, native_id, 0)


def set_process_title(title: str) -> None:
    """Show `title` in ps and in /proc/self/cmdline, cut to the size of the original arguments."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        # Fields 48 and 49 of proc(5); the first one after the name is field 3.
        start, end = int(fields[45]), int(fields[46])
    except (OSError, IndexError, ValueError):
        return
    if 0 < start < end:
        capacity = end - start
        ctypes.memmove(start, title.encode()[: capacity - 1].ljust(capacity, b"\0"), capacity)
    _libc.prctl(_PR_SET_NAME, title.encode()[:_NAME_BYTES].ljust(_NAME_BYTES + 1, b"\0"), 0, 0, 0)


def list_thread_names() -> tuple[str, ...]:
    """Return the names of this process's threads except the main one, including native threads."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text().strip())
    return tuple(sorted(names))


def read_process_name(pid: int) -> str:
    """Return the name of a process and its pid."""
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} (pid {pid})"
    except OSError:
        return f"pid {pid}"


_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State letter and processor time of a process."""

    letter: str
    """R, S, D, T, t, Z as in proc(5); empty when unknown."""
    cpu_seconds: float


def read_process_state(pid: int) -> ProcessState:
    """Return the current state of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # Fields 3 (state), 14 and 15 (ticks in user and kernel mode) of proc(5).
        return ProcessState(fields[0].decode(), (int(fields[11]) + int(fields[12])) / _TICKS)
    except (OSError, IndexError, ValueError):
        return ProcessState("", 0.0)


def has_signal_handler(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, IndexError, ValueError):
        pass
    return False


def read_kernel_location(pid: int) -> str:
    """Return where in the kernel a process sleeps: its stack, else the wait channel; empty if unreadable."""
    for name in ("stack", "wchan"):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
        except OSError:
            continue
        if text and text != "0":
            return " < ".join(line.split()[-1].partition("+")[0] for line in text.splitlines()[:4])
    return ""


_SAMPLE_SECONDS = 5.0
_MIN_WANTED_NS = 50_000_000
"""Least processor time wanted within a sample; a rank that wants less waits for something else."""


class CpuWaitSampler:
    """Samples how long processes wait for a processor; used from one thread."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._samples: dict[int, tuple[float, int, int]] = {}
        self._shares: dict[int, float | None] = {}

    def share(self, pid: int, now: float) -> float | None:
        """Return the share of the wanted processor time spent waiting, over the newest sample of some seconds."""
        sample = self._samples.get(pid)
        if sample is not None and now - sample[0] < _SAMPLE_SECONDS:
            return self._shares.get(pid)
        ran, waited = self._read_totals(pid)
        self._samples[pid] = (now, ran, waited)
        if sample is not None:
            waited_for = max(0, waited - sample[2])
            wanted = max(0, ran - sample[1]) + waited_for
            self._shares[pid] = round(waited_for / wanted, 3) if wanted >= _MIN_WANTED_NS else None
        return self._shares.get(pid)

    def keep_only(self, pids: frozenset[int]) -> None:
        """Forget all processes but these."""
        for pid in self._samples.keys() - pids:
            del self._samples[pid]
            self._shares.pop(pid, None)

    def _read_totals(self, pid: int) -> tuple[int, int]:
        """Return the nanoseconds that all threads spent on a processor and waiting for one."""
        ran = waited = 0
        for path in (self._root / str(pid) / "task").glob("*/schedstat"):
            try:
                on, queued, *_ = path.read_text().split()
                ran, waited = ran + int(on), waited + int(queued)
            except (OSError, ValueError):  # a thread that has just ended, or a kernel without this file
                continue
        return ran, waited
