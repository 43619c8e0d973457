"""Define the exit codes that training processes and the agent use; their meanings are in `faults.signs`.

A process killed by signal n is reported as 128 + n, as by a shell and a kubelet.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes that training processes and the agent use deliberately."""

    FINISHED = 0
    USER_ERROR = 64
    NUMERICAL = 65
    OUT_OF_MEMORY = 66
    YIELDING = 75
    PEER_LOST = 76
    HUNG = 77
    """Never used by a process: the agent ended one that hung."""
    DEVICE_FAULT = 80
    STORAGE_UNAVAILABLE = 81
    NETWORK_FAULT = 82
    """Exit code of a worker whose network fails the test with its peers."""


SIGNAL_BASE = 128
"""A shell's exit code of a process that a signal ended is this plus the signal's number."""
KILLED = SIGNAL_BASE + 9


def is_killed(code: int) -> bool:
    """Return whether the code shows a signal that others send, as a kernel without memory does: no reason is known."""
    return code in (KILLED, SIGNAL_BASE + 15)


def exit_code_from_returncode(returncode: int) -> int:
    """Convert Python's `returncode` (negative for a signal) to the exit code that a shell would show."""
    return 128 - returncode if returncode < 0 else returncode
