"""The operator beside a fleet: the chart's objects in the cluster, the operator itself as a process of its own.

Invariants: the process has the rights that the chart gives it and no others (a token of its ServiceAccount), and the
arguments of the chart's Deployment but for addresses; its processor time and memory are read from the kernel.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.fleetlab.kube import Kube
    from trainium_devcluster.cluster import Cluster

ROOT = Path(__file__).parents[2]
NAMESPACE = "trainium-system"
RELEASE = "trainium-operator"
SERVICE = f"{RELEASE}-coordinator"
SERVER_NAME = f"{SERVICE}.{NAMESPACE}.svc"
_LEFT_OUT = ("Deployment", "PodDisruptionBudget", "NetworkPolicy")
_TICKS = os.sysconf("SC_CLK_TCK")


class OperatorSite:
    """The chart's objects, and what operators are started with."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self.kubeconfig = folder / "operator.kubeconfig"
        self.arguments: list[str] = []

    async def install(self, kube: Kube) -> None:
        """Apply everything of the chart but the Deployment, and take credentials for the ServiceAccount."""
        rendered = self._cluster.helm("template", RELEASE, str(ROOT / "helm/trainium-operator"), "-n", NAMESPACE)
        documents = [each for each in yaml.safe_load_all(rendered) if each]
        deployment = next(each for each in documents if each["kind"] == "Deployment")
        self.arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        self._cluster.kubectl("create", "namespace", NAMESPACE)
        kept = [each for each in documents if each["kind"] not in _LEFT_OUT]
        items = json.dumps({"apiVersion": "v1", "kind": "List", "items": kept})
        self._cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", "--server-side", stdin=items)
        self._cluster.kubectl("wait", "--for=condition=Established", "crd/trainingjobs.trainium.dev")
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        answer = await kube.request("POST", path, {"spec": {"expirationSeconds": 86_400}})
        self._write_kubeconfig(answer["status"]["token"])

    def _write_kubeconfig(self, token: str) -> None:
        authority = (self._cluster.paths.pki / "ca.crt").read_bytes()
        cluster = {
            "server": self._cluster.ports.server,
            "certificate-authority-data": base64.b64encode(authority).decode(),
        }
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))
        self.kubeconfig.chmod(0o600)

    async def start(self, host: str = "127.0.0.1", port: int | None = None, *options: str) -> OperatorRun:
        """Start one operator, with more options than the chart's; it may be a follower."""
        port = port or free_port(host)
        log = self._folder / f"operator-{host}-{time.time_ns()}.log"
        run = OperatorRun(self, host, port, free_port(host), log, options)
        await run.begin()
        return run


class OperatorRun:
    """One process."""

    def __init__(
        self, site: OperatorSite, host: str, port: int, metrics_port: int, log: Path, options: Sequence[str] = ()
    ) -> None:
        self.host = host
        self.port = port
        self.log = log
        self._site = site
        self._metrics = f"http://{host}:{metrics_port}"
        self._process: asyncio.subprocess.Process | None = None
        replaced = ("--coordinator-port", "--metrics-port")
        kept = [each for each in site.arguments if not each.startswith(replaced)]
        self._command = [sys.executable, "-m", "trainium_operator.main", *kept]
        self._command += [f"--kubeconfig={site.kubeconfig}", f"--namespace={NAMESPACE}", f"--bind-address={host}"]
        self._command += [f"--coordinator-port={port}", f"--metrics-port={metrics_port}", *options]

    async def begin(self) -> None:
        """Start the process."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRAINIUM", "KUBE"))}
        if profile := os.environ.get("BENCH_PROFILE"):
            self._command[1:3] = ["-m", "cProfile", "-o", profile, "-m", "trainium_operator.main"]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=environment, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    async def leads(self, seconds: float = 60.0) -> None:
        """Wait until it leads and answers agents."""
        await self._until("trainingjob_operator_leader 1", seconds)

    async def settles(self) -> None:
        """Wait until it has loaded everything and has nothing to do."""
        before = self.cpu_seconds()
        for _ in range(120):
            await asyncio.sleep(0.5)
            now = self.cpu_seconds()
            if now - before < 0.03:
                return
            before = now

    async def ready(self, seconds: float = 60.0) -> None:
        """Wait until it could take over."""
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with aiohttp.ClientSession() as session, session.get(f"{self._metrics}/readyz") as answer:
                        if answer.status == 200:
                            return
                self._check()
                await asyncio.sleep(0.1)

    async def _until(self, text: str, seconds: float) -> str:
        """The metrics, once this text is in them."""
        try:
            async with asyncio.timeout(seconds):
                while text not in (found := await self.metrics()):
                    self._check()
                    await asyncio.sleep(0.05)
                return found
        except TimeoutError:
            raise TimeoutError(f"not within {seconds:.0f} s: {text}; log: {self.log}") from None

    def _check(self) -> None:
        assert self._process is not None
        if self._process.returncode is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"the operator ended with {self._process.returncode}: {lines[-3:]}")

    async def metrics(self) -> str:
        """What Prometheus would scrape; empty while it does not listen."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self._metrics}/metrics") as answer:
                return await answer.text()
        except (aiohttp.ClientError, OSError):
            return ""

    async def requests(self) -> dict[str, float]:
        """Requests to the API server so far, by verb; raises TimeoutError where the operator tells none."""
        name = "trainingjob_operator_api_requests_total"
        text = await self._until(name + "{", 30.0)
        found: dict[str, float] = {}
        for verb, count in re.findall(name + r'\{code="\d+",verb="(\w+)"\} ([\d.e+]+)$', text, re.MULTILINE):
            found[verb] = found.get(verb, 0.0) + float(count)
        return found

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        return cpu_seconds(self.pid)

    def peak_mib(self) -> float:
        """Largest resident memory so far."""
        return self._memory("VmHWM")

    def resident_mib(self) -> float:
        """Resident memory now."""
        return self._memory("VmRSS")

    def _memory(self, key: str) -> float:
        return memory_mib(self.pid, key)

    async def stop(self) -> float:
        """End it in order; seconds."""
        began = time.monotonic()
        self._signal(signal.SIGTERM)
        await self._ended()
        return time.monotonic() - began

    async def kill(self) -> None:
        """End it as a crash does."""
        self._signal(signal.SIGKILL)
        await self._ended()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _ended(self) -> None:
        assert self._process is not None
        await self._process.wait()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_mib(pid: int, key: str = "VmRSS") -> float:
    """Resident memory of a process now."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def free_port(host: str) -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {"cores": os.cpu_count(), "processor": model[1] if model else "unknown", "load": os.getloadavg()[0]}
