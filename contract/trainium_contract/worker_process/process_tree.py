"""List the processes that a process has started."""

from __future__ import annotations

import contextlib
from pathlib import Path


def list_descendants(pid: int) -> list[int]:
    """Return every live descendant of a process, parents before children."""
    processes: list[int] = []
    pending = [pid]
    while pending:
        new = list_children(pending.pop())
        processes += new
        pending += new
    return processes


def list_children(pid: int) -> list[int]:
    """Return the children of a process."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids
