"""The attackers' process as a benchmark steers it, and what of it was reached."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any, Self

from benchmarks.fleetlab.agents.control import ROOT

_FIRST_LINE_SECONDS = 30.0
_LAST = 19


class Flood:
    """Attacks for as long as its `async with` block lasts; on `core` alone, behind whatever else wants that core."""

    def __init__(self, host: str, port: int, *, core: int, tokens: float, idle: int, slow: int, sources: int) -> None:
        self._options = {"host": host, "port": port, "tokens": tokens, "idle": idle, "slow": slow, "sources": sources}
        self._core = core
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._told = asyncio.Event()
        self._seen: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.fleetlab.coordinator.attackers",
            json.dumps(self._options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        os.sched_setaffinity(self._process.pid, {self._core})
        os.setpriority(os.PRIO_PROCESS, self._process.pid, _LAST)
        self._reader = asyncio.create_task(self._read())
        async with asyncio.timeout(_FIRST_LINE_SECONDS):
            await self._told.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._seen.append(json.loads(line))
            self._told.set()

    def mark(self) -> None:
        """Figures count from now."""
        del self._seen[:-1]

    def figures(self) -> dict[str, float]:
        """Per second since the mark, and the median of connections that were open."""
        first, last = self._seen[0], self._seen[-1]
        took = max(last["at"] - first["at"], 1e-9)
        found = {key: (last[key] - first[key]) / took for key in ("tokens", "answers", "opened", "refused", "cpu")}
        middle = len(self._seen) // 2
        return found | {key: float(sorted(each[key] for each in self._seen)[middle]) for key in ("idle", "slow")}
