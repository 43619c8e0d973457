"""Find out from the counters of the container's cgroup when the kernel kills one of its processes for memory.

Unlike /dev/kmsg they need no privilege. cgroup v2 counts in `memory.events`, v1 in `memory.oom_control` (Linux 4.13 and
later) and `memory.failcnt`, which stays 0 on newer kernels (seen: 6.18): there the highest usage shows whether the
limit was reached. Both also count the page cache, which the kernel drops before it kills: where much of it is left, the
limit of the container was not the reason. The kernel counts a kill in the cgroup of the killed process before it sends
the signal, also when the node and not the cgroup ran out of memory; the second counter distinguishes these.

Source: the kernel's admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, and `memcg_memory_event` in its
memcontrol.h.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainium_contract.faults.signs import MEMORY_LIMIT_REACHED, NODE_MEMORY_EXHAUSTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainium_agent.exits.kernel_log import KernelEvents

_ONE_KILL_SECONDS = 10.0
"""The counters of one kill may be read this long apart: the kernel reclaims memory between the limit and the kill."""
_LIMIT_MARGIN_BYTES = 1 << 20
"""The kernel reserves memory in batches of 64 pages, so a usage this close has reached the limit."""
_MAX_CACHE_SHARE = 0.125
"""Share of the limit that may still be page cache when the kernel kills at the limit."""
_UNLIMITED = 1 << 60
"""v1 shows "no limit" as the largest multiple of a page."""


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """The files of one version of the interface."""

    kills: str
    limit_hits: str
    """Name of the key in `kills` (v2), or a file (v1), that counts how often the limit was reached."""
    limit: str
    peak: str = ""
    """Name of the file of the highest usage, where the second counter may not count."""


_V1 = _CgroupFiles("memory.oom_control", "memory.failcnt", "memory.limit_in_bytes", "memory.max_usage_in_bytes")
_V2 = _CgroupFiles("memory.events", "oom", "memory.max")


@dataclass(frozen=True, slots=True)
class _Counters:
    kills: int
    limit_hits: int


class MemoryKills:
    """Adds a kernel event when a process of this container was killed for memory; thread-safe."""

    def __init__(
        self, events: KernelEvents, root: Path = Path("/"), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events, self._clock = events, clock
        self._lock = threading.Lock()
        self._found = _find_cgroup(root)
        self._last = self._read()
        self._limit_hit_at = -math.inf

    def observe(self) -> None:
        """Compare the counters with those of the last call."""
        with self._lock:
            last, self._last = self._last, self._read()
            new = self._last
            if last is not None and new is not None and new.limit_hits > last.limit_hits:
                self._limit_hit_at = self._clock()
            is_limit_hit = self._clock() - self._limit_hit_at < _ONE_KILL_SECONDS
        if last is None or new is None or new.kills <= last.kills:
            return
        limit = self._read_limit()
        # Without a limit only the node stops a program that needs too much.
        if limit is None:
            text = f"{MEMORY_LIMIT_REACHED}, which is the memory of the node"
        elif (is_limit_hit or (new.limit_hits == 0 and self._has_reached(limit))) and not self._holds_cache(limit):
            text = f"{MEMORY_LIMIT_REACHED} of {limit >> 20:,} MiB"
        else:
            text = f"{NODE_MEMORY_EXHAUSTED} of {limit >> 20:,} MiB"
        self._events.add(f"{text} when the kernel killed a process of it (oom_kill {new.kills})", time.time())

    def _read(self) -> _Counters | None:
        if self._found is None:
            return None
        folder, files = self._found
        counters = _read_keys(folder / files.kills)
        if "oom_kill" not in counters:
            return None
        hits = counters.get(files.limit_hits)
        return _Counters(counters["oom_kill"], _read_number(folder / files.limit_hits) or 0 if hits is None else hits)

    def _has_reached(self, limit: int) -> bool:
        """Return whether the highest usage has reached the limit, where the kernel shows it."""
        if self._found is None or not self._found[1].peak:
            return False
        peak = _read_number(self._found[0] / self._found[1].peak)
        return peak is not None and peak >= limit - _LIMIT_MARGIN_BYTES

    def _holds_cache(self, limit: int) -> bool:
        """Return whether much of the limit is page cache, where the counters of the limit include it (v1)."""
        if self._found is None or self._found[1] is not _V1:
            return False
        counts = _read_keys(self._found[0] / "memory.stat")
        return counts.get("total_active_file", 0) + counts.get("total_inactive_file", 0) > limit * _MAX_CACHE_SHARE

    def _read_limit(self) -> int | None:
        if self._found is None:
            return None
        folder, files = self._found
        limit = _read_number(folder / files.limit)
        return None if limit is None or limit >= _UNLIMITED else limit


def _find_cgroup(root: Path) -> tuple[Path, _CgroupFiles] | None:
    """Return the folder of this process's memory cgroup; None if the container does not see it."""
    for folder, files in _list_candidates(root):
        if (folder / files.kills).is_file():
            return folder, files
    return None


def _list_candidates(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    paths: dict[str, str] = {}
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in _read_lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        top, mount_point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            files, path = _V1, paths.get("memory", "/")
        elif kind == "cgroup2":
            files, path = _V2, paths.get("", "/")
        else:
            continue
        mounted = root / mount_point.lstrip("/")
        # A runtime mounts the cgroup of the container itself, but the path may be that on the node.
        if path.startswith(top.rstrip("/") + "/"):
            yield mounted / path[len(top.rstrip("/")) :].lstrip("/"), files
        yield mounted, files


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_keys(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read_lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read_number(path: Path) -> int | None:
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
