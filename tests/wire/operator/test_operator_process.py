"""The real command as a process: kopf, the Kubernetes client, servers, signals; against a fake API server over HTTP."""

import asyncio
import base64
import json
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.api.http_api_server import HttpApiServer
from tests.testing.api.objects import training_job
from tests.testing.suite.timeouts import async_until, scaled
from trainium_contract.wire.log_line import LogSource, read_log_line
from trainium_operator.cluster.api.resources import EVENTS, JOBS, LEASES, PODS, SECRETS

SECRET = "trainium-operator-coordinator-tls"


class Operator:
    """One process; its log is lines of the schema."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            text = line.decode()
            read = read_log_line(text)
            assert read is not None, f"no line of the schema: {text!r}"
            assert read.to_wire() == json.loads(text), "a field that the schema does not know, or cannot take"
            assert read.source is LogSource.OPERATOR
            self.lines.append(read.to_wire())

    async def wait_for_line(self, text: str) -> str:
        found = lambda: [line["message"] for line in self.lines if text in line["message"]]  # noqa: E731
        await async_until(lambda: bool(found()) or self.process.returncode is not None, self.log, 30)
        assert found(), self.log()
        return str(found()[0])

    async def wait_for_exit(self) -> int:
        async with asyncio.timeout(scaled(20)):
            code = await self.process.wait()
            await self._reader
        return code

    def log(self) -> str:
        return "\n".join(str(line) for line in self.lines)


async def spawn(*arguments: str) -> Operator:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRAINIUM", "KUBE", "POD_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trainium_operator.main", *arguments, env=environment, stderr=asyncio.subprocess.PIPE
    )
    return Operator(process)


@asynccontextmanager
async def run_operator(cluster: FakeApiServer, folder: Path, *arguments: str) -> AsyncIterator[Operator]:
    server = HttpApiServer(cluster)
    await server.start()
    config = str(server.kubeconfig(folder))
    ports = ("--bind-address", "127.0.0.1", "--coordinator-port", "0", "--metrics-port", "0")
    operator = await spawn("--kubeconfig", config, *ports, *arguments)
    try:
        yield operator
    finally:
        if operator.process.returncode is None:
            operator.process.kill()
            await operator.wait_for_exit()
        await server.stop()


def fake_cluster() -> FakeApiServer:
    cluster = FakeApiServer(time.time)
    cluster.add(SECRETS, {"metadata": {"name": SECRET, "namespace": "system"}, "type": "Opaque"})
    return cluster


async def test_the_operator_watches_only_listed_namespaces(
    tmp_path: Path,
) -> None:
    cluster = fake_cluster()
    for namespace in ("red", "blue", "grey"):
        job = training_job("early")
        job["metadata"]["namespace"] = namespace
        cluster.add(JOBS, job)
    async with run_operator(cluster, tmp_path, "--watch-namespaces", "red,blue") as operator:
        await operator.wait_for_line("leading as")
        for namespace in ("red", "blue"):
            await async_until(lambda: cluster.names(PODS, namespace) == ["early-w-0", "early-w-1"], operator.log, 20)  # noqa: B023
        await async_until(lambda: cluster.open_streams(JOBS) == 2, operator.log, 20)
        late = training_job("late")
        late["metadata"]["namespace"] = "blue"
        cluster.add(JOBS, late)
        await async_until(lambda: "late-w-1" in cluster.names(PODS, "blue"), operator.log, 20)
        assert cluster.names(PODS, "grey") == []
        operator.process.send_signal(signal.SIGTERM)
        assert await operator.wait_for_exit() == 0


async def test_secure_metrics_are_served_over_https_alone(tmp_path: Path) -> None:
    cluster = fake_cluster()
    cluster.tokens["good"] = {"username": "prometheus", "groups": []}
    cluster.may = lambda spec: spec["nonResourceAttributes"]["path"] == "/metrics"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        plain = probe.getsockname()[1]
    ours = ("--secure-metrics", "true", "--https-port", "0", "--metrics-port", str(plain))
    async with run_operator(cluster, tmp_path, *ours) as operator:
        port = int((await operator.wait_for_line("readers are served on port")).rpartition(" ")[2])
        bundle = cluster.get(SECRETS, "system", SECRET)["data"]["ca.crt"]
        trust = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
        async with aiohttp.ClientSession() as session:

            async def get(url: str, **headers: str) -> tuple[int, str]:
                async with session.get(url, ssl=trust, headers=headers) as response:
                    return response.status, await response.text()

            status, text = await get(f"https://127.0.0.1:{port}/metrics", Authorization="Bearer good")
            assert (status, "trainingjob_operator_leader" in text) == (200, True)
            assert (await get(f"https://127.0.0.1:{port}/metrics"))[0] == 401
            assert (await get(f"http://127.0.0.1:{plain}/livez"))[0] == 200
            assert (await get(f"http://127.0.0.1:{plain}/metrics"))[0] == 404
        # kopf logs its pending request when it is stopped during its start.
        await async_until(lambda: cluster.open_streams(JOBS) > 0, operator.log, 20)
        operator.process.send_signal(signal.SIGTERM)
        assert await operator.wait_for_exit() == 0, operator.log()
        assert not [line for line in operator.lines if line.get("level") == "error"], operator.log()


async def test_the_operator_leads_serves_agents_and_stops(tmp_path: Path) -> None:
    cluster = fake_cluster()
    cluster.add(JOBS, training_job("early"))
    async with run_operator(cluster, tmp_path) as operator:
        port = int((await operator.wait_for_line("agents are served on port")).rpartition(" ")[2])
        await operator.wait_for_line("leading as")
        await async_until(lambda: cluster.names(PODS) == ["early-w-0", "early-w-1"], operator.log, 20)
        await async_until(lambda: cluster.open_streams(JOBS) == 1, operator.log, 20)
        cluster.add(JOBS, training_job("late"))
        await async_until(lambda: "late-w-1" in cluster.names(PODS), operator.log, 20)
        bundle = cluster.get(SECRETS, "system", SECRET)["data"]["ca.crt"]
        trust = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
        url = f"https://127.0.0.1:{port}/v1/stream"
        async with aiohttp.ClientSession() as session, session.get(url, ssl=trust) as response:
            assert response.status == 401
        jobs = {key[2]: raw for key, raw in cluster.objects.items() if key[0] == JOBS.plural}
        assert all("finalizers" not in raw["metadata"] for raw in jobs.values())
        assert all("annotations" not in raw["metadata"] for raw in jobs.values())

        operator.process.send_signal(signal.SIGTERM)
        assert await operator.wait_for_exit() == 0, operator.log()
        assert cluster.get(LEASES, "system", "trainium-operator")["spec"]["holderIdentity"] == ""
        assert not [line for line in operator.lines if line.get("level") == "error"], operator.log()
        kinds = {write.path.rpartition("/")[2] for write in cluster.writes if write.path.startswith("/api/v1")}
        assert EVENTS.plural not in kinds  # kopf posts none


async def test_a_replaced_lease_holder_ends_the_process(tmp_path: Path) -> None:
    cluster = fake_cluster()
    async with run_operator(cluster, tmp_path) as operator:
        await operator.wait_for_line("leading as")
        cluster.change(LEASES, "system", "trainium-operator", lambda raw: raw["spec"].update(holderIdentity="thief"))
        assert await operator.wait_for_exit() == 1
        await operator.wait_for_line("thief holds the lease now")
    assert cluster.get(LEASES, "system", "trainium-operator")["spec"]["holderIdentity"] == "thief"


async def test_a_missing_secret_is_reported_with_the_command_that_creates_it(tmp_path: Path) -> None:
    async with run_operator(FakeApiServer(time.time), tmp_path) as operator:
        assert "kubectl create secret generic" in await operator.wait_for_line(f"Secret system/{SECRET} is missing")
