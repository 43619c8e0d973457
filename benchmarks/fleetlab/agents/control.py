"""The simulated agents' process, as the benchmark steers it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_devcluster.cluster import Cluster

ROOT = Path(__file__).parents[3]
_MORE = 30.0


class AgentsError(Exception):
    """A command failed; the text says why."""


class AgentsProcess:
    """Agents of one or more jobs against one or more coordinators; ends with its `async with` block."""

    def __init__(
        self, cluster: Cluster, *jobs: str, addresses: Sequence[tuple[str, int]], name: str, streams: bool = True
    ) -> None:
        """`streams` off: agents as they were in the version before."""
        self._options: dict[str, Any] = {"cluster": cluster.name, "jobs": jobs, "addresses": list(addresses)}
        self._options |= {"name": name, "streams": streams}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.fleetlab.agents.process",
            json.dumps(self._options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    async def ask(self, op: str, *, seconds: float = 60.0, **fields: Any) -> dict[str, Any]:
        """One command, to the agents of the first job or of the one that the field `job` names; raises AgentsError."""
        assert self._process is not None
        assert self._process.stdin is not None
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        command = {"id": number, "op": op, "seconds": seconds, **fields}
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        try:
            async with asyncio.timeout(seconds + _MORE):
                found = await answer
        finally:
            del self._answers[number]
        if "error" in found:
            raise AgentsError(f"{op} {fields}: {found['error']} {found.get('state', '')}")
        return found

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            found = json.loads(line)
            waiting = self._answers.get(found.pop("id"))
            if waiting is not None and not waiting.done():
                waiting.set_result(found)
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_result({"error": "the agents' process ended"})
