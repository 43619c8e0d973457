"""Replicas as real processes, with the agents' own client: hand-over by order and by a process that is stopped.

How long a hand-over takes is a matter of `test_operator_replicas.py` (virtual time) and of the benchmarks; here the
real signals, servers, sockets and certificates show that it works at all, so the limits are wide.
"""

import asyncio
import base64
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.testing.api.fake_api_server import FakeApiServer
from tests.testing.api.http_api_server import HttpApiServer
from tests.testing.api.objects import bind_pod, ready_node, training_job
from tests.testing.api.token_issuer import ISSUER
from tests.testing.operator.agent_settings import agent_settings
from tests.testing.suite.timeouts import async_until, scaled
from trainium_agent.coordinator.client import Callbacks, CoordinatorClient
from trainium_agent.settings import Endpoint
from trainium_contract.wire.messages import HeartbeatRequest, Membership, Progress, WorkerPhase
from trainium_devcluster.ports import reserve_port
from trainium_operator.cluster.api.resources import JOBS, LEASES, NODES, PODS, SECRETS

SERVICE = "localhost"
"""The coordinator's certificate bears the name of its Service, and agents must be able to resolve that."""


class Replica:
    """One operator process."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port
        self.process: asyncio.subprocess.Process

    async def start(self, kubeconfig: Path, log: Path) -> None:
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("TRAINIUM", "KUBE", "POD"))
        }
        ports = ("--bind-address", "127.0.0.1", "--coordinator-port", str(self.port), "--metrics-port", "0")
        with log.open("w") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "trainium_operator.main",
                "--kubeconfig",
                str(kubeconfig),
                "--coordinator-service",
                SERVICE,
                *ports,
                env=environment | {"POD_NAME": self.name, "POD_UID": f"uid-of-{self.name}"},
                stderr=output,
            )


class Agent:
    """A client of the coordinator as in an agent, with a record of its messages."""

    def __init__(self, pod: dict[str, Any], ports: list[int], folder: Path, bundle: str) -> None:
        self.memberships: list[Membership] = []
        self.acknowledged = 0
        self.pod = pod
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        (folder / f"{name}.token").write_text(ISSUER.token(name, uid, "default"))
        (folder / "ca.crt").write_text(bundle)
        settings = agent_settings(
            folder,
            coordinator=tuple(Endpoint(SERVICE, port) for port in ports),
            namespace="default",
            pod_name=name,
            pod_uid=uid,
            pod_ip=pod["status"]["podIP"],
            node_name=pod["spec"]["nodeName"],
            token_path=folder / f"{name}.token",
        )
        self.client = CoordinatorClient(
            settings,
            29500,
            "1",
            Callbacks(
                heartbeat=self._heartbeat,
                on_membership=self.memberships.append,
                on_acknowledged=self._acknowledge,
                on_job_deleted=lambda: None,
            ),
        )
        self.task = asyncio.create_task(self.client.run())

    def _acknowledge(self, _message: HeartbeatRequest) -> None:
        self.acknowledged += 1

    def _heartbeat(self) -> HeartbeatRequest:
        member = bool(self.memberships)
        return HeartbeatRequest(
            namespace="default",
            job="llama",
            pod_name=self.pod["metadata"]["name"],
            pod_uid=self.pod["metadata"]["uid"],
            generation=self.memberships[-1].generation if member else 0,
            phase=WorkerPhase.TRAINING if member else WorkerPhase.STANDBY,
            progress=Progress(step=1 + self.acknowledged, updated=time.time()) if member else None,
            ready=True,
        )


class HandoverHarness:
    """The API server, the replicas and the agents of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = FakeApiServer(time.time)
        self.server = HttpApiServer(self.cluster)
        self.replicas = [Replica(f"operator-{at}", reserve_port()) for at in range(3)]
        self.agents: list[Agent] = []

    async def start(self) -> None:
        self.cluster.add(SECRETS, {"metadata": {"name": f"{SERVICE}-tls", "namespace": "system"}, "type": "Opaque"})
        self.cluster.add(JOBS, training_job())
        for at in range(2):
            self.cluster.add(NODES, ready_node(f"node-{at}"))
        await self.server.start()

    async def operate(self, at: int) -> None:
        await self.replicas[at].start(self.server.kubeconfig(self.folder), self.folder / f"operator-{at}.log")

    def leader(self) -> str:
        key = (LEASES.plural, "system", "trainium-operator")
        holder: str = self.cluster.objects[key]["spec"]["holderIdentity"] if key in self.cluster.objects else ""
        return holder.partition("_")[0]

    def start_workers(self) -> None:
        """Bind and start the pods as scheduler and kubelets do."""
        bundle = base64.b64decode(self.cluster.get(SECRETS, "system", f"{SERVICE}-tls")["data"]["ca.crt"]).decode()
        for at, name in enumerate(self.cluster.names(PODS)):
            pod = self.cluster.change(PODS, "default", name, bind_pod(f"node-{at}", at))
            self.agents.append(Agent(pod, [replica.port for replica in self.replicas], self.folder, bundle))

    async def wait_for_replies(self) -> None:
        """Wait for three more replies to each agent."""
        before = [agent.acknowledged for agent in self.agents]
        await async_until(
            lambda: all(a.acknowledged >= b + 3 for a, b in zip(self.agents, before, strict=True)),
            lambda: "the operator receives heartbeats: " + (self.folder / "operator-1.log").read_text()[-2000:],
        )

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get(JOBS, "default", "llama").get("status") or {}
        return found

    async def stop(self) -> None:
        for agent in self.agents:
            agent.task.cancel()
        await asyncio.gather(*(agent.task for agent in self.agents), return_exceptions=True)
        for replica in self.replicas:
            process = getattr(replica, "process", None)
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        await self.server.stop()


@pytest.mark.timeout(180)
async def test_agents_follow_the_leadership_after_sigterm_and_after_sigstop(tmp_path: Path) -> None:
    harness = HandoverHarness(tmp_path)
    await harness.start()
    try:
        await harness.operate(0)
        await async_until(lambda: len(harness.cluster.names(PODS)) == 2, "the leader makes the pods")
        await harness.operate(1)
        harness.start_workers()
        await async_until(
            lambda: all(agent.memberships for agent in harness.agents), "the first generation is published"
        )
        await async_until(lambda: harness.status().get("phase") == "Running", "the job runs")
        uids = {
            name: harness.cluster.get(PODS, "default", name)["metadata"]["uid"] for name in harness.cluster.names(PODS)
        }
        await async_until(lambda: "standing by" in (tmp_path / "operator-1.log").read_text(), "a standby is there")

        # In order: SIGTERM.
        harness.replicas[0].process.send_signal(signal.SIGTERM)
        await async_until(lambda: harness.leader() == "operator-1", "the standby leads")
        await harness.wait_for_replies()
        assert await harness.replicas[0].process.wait() == 0

        # The process is stopped: another leads, and it finds out when it continues.
        await harness.operate(2)
        await async_until(
            lambda: "standing by" in (tmp_path / "operator-2.log").read_text(), "another standby is there"
        )
        harness.replicas[1].process.send_signal(signal.SIGSTOP)
        await async_until(lambda: harness.leader() == "operator-2", "the next one leads")
        await harness.wait_for_replies()
        harness.replicas[1].process.send_signal(signal.SIGCONT)
        assert await asyncio.wait_for(harness.replicas[1].process.wait(), scaled(30)) == 1
        assert "LeaseLostError" in (tmp_path / "operator-1.log").read_text()
        await harness.wait_for_replies()

        status = harness.status()
        assert status["phase"] == "Running"
        assert status["restarts"].get("total", 0) == 0
        assert status["membership"]["generation"] == 1
        assert [agent.memberships[-1].generation for agent in harness.agents] == [1, 1]
        assert {name: harness.cluster.get(PODS, "default", name)["metadata"]["uid"] for name in uids} == uids
        assert json.dumps(status)
    finally:
        await harness.stop()
