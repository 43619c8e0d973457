"""Compute the number of processes of a machine that can hold a model at once."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_MEMORY_FACTOR = 1.3
"""The memory for loading and using a model, relative to its size."""


def read_available_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int | None:
    """Return the memory that processes can still allocate within the container's limit; None if unknown."""
    limits = [int(line.split()[1]) * 1024 for line in _read_lines(meminfo) if line.startswith("MemAvailable:")]
    limit, used = _read_lines(group / "memory.max"), _read_lines(group / "memory.current")
    if limit and used and limit[0].isdecimal():
        limits.append(max(0, int(limit[0]) - int(used[0])))
    return min(limits, default=None)


def count_readers(model_bytes: int, available: int | None) -> int:
    """Return the number of processes that can load a model of that size; at least one."""
    if available is None:
        return 1
    return max(1, int(available // max(1, model_bytes * _MEMORY_FACTOR)))


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
