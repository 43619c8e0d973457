"""How much of the processor time that a rank wants it has to wait for, because others use the processors.

Asked per process of the scheduler (`/proc/PID/task/*/schedstat`), not of the pressure of the node, which also counts
others and is switched off on many kernels. Invariant: a kernel that does not tell gives None, never an error.
"""

from __future__ import annotations

from pathlib import Path

_SAMPLE_SECONDS = 5.0
_LEAST_WANTED_NS = 50_000_000
"""Of processor time within a sample; a rank that wants less waits for something else."""


class CpuWait:
    """The waits of some processes, sampled; used from one thread."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._samples: dict[int, tuple[float, int, int]] = {}
        self._shares: dict[int, float | None] = {}

    def share(self, pid: int, now: float) -> float | None:
        """Share of the wanted time that was waited for, over the newest sample of some seconds."""
        known = self._samples.get(pid)
        if known is not None and now - known[0] < _SAMPLE_SECONDS:
            return self._shares.get(pid)
        ran, waited = self._totals(pid)
        self._samples[pid] = (now, ran, waited)
        if known is not None:
            waited_for = max(0, waited - known[2])
            wanted = max(0, ran - known[1]) + waited_for
            self._shares[pid] = round(waited_for / wanted, 3) if wanted >= _LEAST_WANTED_NS else None
        return self._shares.get(pid)

    def forget_others(self, pids: frozenset[int]) -> None:
        """Only these processes are there still."""
        for pid in self._samples.keys() - pids:
            del self._samples[pid]
            self._shares.pop(pid, None)

    def _totals(self, pid: int) -> tuple[int, int]:
        """Nanoseconds on a processor and in the queue for one, of all threads."""
        ran = waited = 0
        for path in (self._root / str(pid) / "task").glob("*/schedstat"):
            try:
                on, queued, *_ = path.read_text().split()
                ran, waited = ran + int(on), waited + int(queued)
            except (OSError, ValueError):  # a thread that has just ended, or a kernel that does not tell
                continue
        return ran, waited
