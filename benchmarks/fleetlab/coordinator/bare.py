"""A server's process, as the benchmark steers it, with an authority of its own: the bare one or another like it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from benchmarks.fleetlab.agents.control import ROOT
from benchmarks.fleetlab.operator_site import SERVER_NAME, free_port
from trainium_operator.coordinator.certificates import renewed

_START_SECONDS = 30.0


class BareServer:
    """It listens within its `async with` block."""

    def __init__(
        self, host: str = "127.0.0.3", *, module: str = "benchmarks.fleetlab.coordinator.bare_server", **options: Any
    ) -> None:
        """`options` are the module's own."""
        self._module = module
        self._more = options
        self.host = host
        self.port = free_port(host)
        material = renewed(None, (SERVER_NAME,), time.time())
        self.authority = material.ca_bundle.decode()
        self._material = material
        self._folder = tempfile.TemporaryDirectory(prefix="trainium-bench-")
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        folder = Path(self._folder.name)
        certificate, key = folder / "tls.crt", folder / "tls.key"
        certificate.write_bytes(self._material.server_cert)
        key.touch(mode=0o600)
        key.write_bytes(self._material.server_key)
        options = {"host": self.host, "port": self.port, "certificate": str(certificate), "key": str(key)}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            json.dumps(options | self._more),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            line = await self._process.stdout.readline()
        if line.strip() != b"ready":
            raise RuntimeError(f"{self._module} did not start")
        return self

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._folder.cleanup()
