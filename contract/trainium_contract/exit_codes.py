"""Exit codes that training processes and the agent use on purpose; what they stand for is in `faults.signs`.

A process killed by signal n is reported as 128 + n, as a shell and a kubelet do.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes that training processes and the agent use on purpose."""

    FINISHED = 0
    USER_ERROR = 64
    NUMERICAL = 65
    OUT_OF_MEMORY = 66
    YIELDING = 75
    PEER_LOST = 76
    HUNG = 77
    """No process exits with it: the agent ended one that hung."""
    DEVICE_FAULT = 80
    STORAGE_UNAVAILABLE = 81
    NETWORK_FAULT = 82
    """Exit code of a worker whose network fails the test with its peers."""


def exit_code_of_wait_status(returncode: int) -> int:
    """Python's `returncode` (negative for a signal) as the exit code that a shell would show."""
    return 128 - returncode if returncode < 0 else returncode
