"""Run the operator beside a fleet: the objects of the chart in the cluster, the operator as a process.

The process has only the permissions that the chart grants (a token of its ServiceAccount), and the arguments of the
chart's Deployment except for addresses. The kernel reports its processor time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from trainium_devcluster.ports import reserve_port
from trainium_devcluster.processes.process_tree import read_resident_bytes

if TYPE_CHECKING:
    from trainium_devcluster.cluster import Cluster
    from trainium_devcluster.node.api.client import Api

ROOT = Path(__file__).parents[2]
NAMESPACE = "trainium-system"
RELEASE = "trainium-operator"
SERVICE = f"{RELEASE}-coordinator"
SERVER_NAME = f"{SERVICE}.{NAMESPACE}.svc"
_SKIPPED_KINDS = ("Deployment", "PodDisruptionBudget", "NetworkPolicy")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ChartInstallation:
    """The objects of the chart, and the arguments of operators."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self.kubeconfig = folder / "operator.kubeconfig"
        self.arguments: list[str] = []

    def _apply(self, items: list[dict[str, Any]], *options: str) -> None:
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self._cluster.kubectl("apply", *options, "-f", "-", "--server-side", stdin=manifest)

    async def install(self, kube: Api) -> None:
        """Apply the chart except for the Deployment, and create credentials of the ServiceAccount."""
        rendered = self._cluster.helm("template", RELEASE, str(ROOT / "helm/trainium-operator"), "-n", NAMESPACE)
        documents = [document for document in yaml.safe_load_all(rendered) if document]
        deployment = next(document for document in documents if document["kind"] == "Deployment")
        self.arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        items = [document for document in documents if document["kind"] not in _SKIPPED_KINDS]
        # kubectl refuses -n for objects that name another namespace.
        elsewhere = [item for item in items if item["metadata"].get("namespace", NAMESPACE) != NAMESPACE]
        self._apply([namespace, *elsewhere])
        self._apply([item for item in items if item not in elsewhere], "-n", NAMESPACE)
        self._cluster.kubectl("wait", "--for=condition=Established", "crd/trainingjobs.trainium.dev")
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        response = await kube.create(path, {"spec": {"expirationSeconds": 86_400}})
        self._write_kubeconfig(response["status"]["token"])

    def _write_kubeconfig(self, token: str) -> None:
        content = json.loads(self._cluster.kubeconfig.read_text())
        content["users"][0]["user"] = {"token": token}
        content["contexts"][0]["context"]["namespace"] = NAMESPACE
        self.kubeconfig.write_text(json.dumps(content))
        self.kubeconfig.chmod(0o600)

    async def start(self, host: str = "127.0.0.1", port: int | None = None) -> OperatorProcess:
        """Start an operator, which may become a standby."""
        port = port or reserve_port()
        log = self._folder / f"operator-{host}-{time.time_ns()}.log"
        process = OperatorProcess(self, host, port, reserve_port(), log)
        await process.start()
        return process


class OperatorProcess:
    """An operator process."""

    def __init__(self, chart: ChartInstallation, host: str, port: int, metrics_port: int, log: Path) -> None:
        self.host = host
        self.port = port
        self.log = log
        self._metrics = f"http://{host}:{metrics_port}"
        self._process: asyncio.subprocess.Process | None = None
        replaced = ("--coordinator-port", "--metrics-port")
        kept = [argument for argument in chart.arguments if not argument.startswith(replaced)]
        self._command = [sys.executable, "-m", "trainium_operator.main", *kept]
        self._command += [f"--kubeconfig={chart.kubeconfig}", f"--namespace={NAMESPACE}", f"--bind-address={host}"]
        self._command += [f"--coordinator-port={port}", f"--metrics-port={metrics_port}"]

    async def start(self) -> None:
        """Start the process."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRAINIUM", "KUBE"))}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=environment, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    async def wait_until_leading(self, seconds: float = 60.0) -> None:
        """Wait until it leads and serves agents."""
        await self._wait_until_metrics_contain("trainingjob_operator_leader 1", seconds)

    async def wait_until_idle(self) -> None:
        """Wait until it has loaded everything and is idle."""
        before = self.read_cpu_seconds()
        for _ in range(120):
            await asyncio.sleep(0.5)
            now = self.read_cpu_seconds()
            if now - before < 0.03:
                return
            before = now

    async def wait_until_ready(self, seconds: float = 60.0) -> None:
        """Wait until it can take over."""
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with aiohttp.ClientSession() as session, session.get(f"{self._metrics}/readyz") as response:
                        if response.status == 200:
                            return
                self._check_running()
                await asyncio.sleep(0.1)

    async def _wait_until_metrics_contain(self, text: str, seconds: float) -> str:
        """Return the metrics once they contain this text."""
        try:
            async with asyncio.timeout(seconds):
                while text not in (metrics := await self.read_metrics()):
                    self._check_running()
                    await asyncio.sleep(0.05)
                return metrics
        except TimeoutError:
            raise TimeoutError(f"not within {seconds:.0f} s: {text}; log: {self.log}") from None

    def _check_running(self) -> None:
        assert self._process is not None
        if self._process.returncode is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"the operator ended with {self._process.returncode}: {lines[-3:]}")

    async def read_metrics(self) -> str:
        """Return the metrics; empty while it does not listen."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self._metrics}/metrics") as response:
                return await response.text()
        except (aiohttp.ClientError, OSError):
            return ""

    async def count_requests(self) -> dict[str, float]:
        """Return the number of requests to the API server so far, by verb; raise TimeoutError if it sent none."""
        name = "trainingjob_operator_api_requests_total"
        text = await self._wait_until_metrics_contain(name + "{", 30.0)
        requests: dict[str, float] = {}
        for verb, count in re.findall(name + r'\{code="\d+",verb="(\w+)"\} ([\d.e+]+)$', text, re.MULTILINE):
            requests[verb] = requests.get(verb, 0.0) + float(count)
        return requests

    def read_cpu_seconds(self) -> float:
        """Return the processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND

    def read_peak_mib(self) -> float:
        """Return the largest resident memory so far."""
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert match is not None
        return int(match[1]) / 1024

    def read_resident_mib(self) -> float:
        """Return the resident memory now."""
        return read_resident_bytes(self.pid) / 2**20

    async def stop(self) -> None:
        """Stop it with SIGTERM."""
        await self._signal(signal.SIGTERM)

    async def kill(self) -> None:
        """Stop it with SIGKILL."""
        await self._signal(signal.SIGKILL)

    async def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        await self._process.wait()
