"""What the kernel says about another process: its state, its processor time, where it sleeps, which signals it handles.

Invariant: a process that is gone, or that the kernel does not show, gives empty answers, never an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """State letter and processor time of a process."""

    letter: str
    """R, S, D, T, t, Z as in proc(5); empty when unknown."""
    cpu_seconds: float


def state_of(pid: int) -> ProcessState:
    """The state of a process as of now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # Fields 3 (state), 14 and 15 (ticks in user and kernel mode) of proc(5).
        return ProcessState(fields[0].decode(), (int(fields[11]) + int(fields[12])) / _TICKS)
    except (OSError, IndexError, ValueError):
        return ProcessState("", 0.0)


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, IndexError, ValueError):
        pass
    return False


def kernel_place(pid: int) -> str:
    """Where in the kernel a process sleeps, as far as it may be known: its kernel stack, else the wait channel."""
    for name in ("stack", "wchan"):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
        except OSError:
            continue
        if text and text != "0":
            return " < ".join(line.split()[-1].partition("+")[0] for line in text.splitlines()[:4])
    return ""
