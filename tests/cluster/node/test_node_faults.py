"""Faults and refusals of the development cluster's nodes; power loss works on any cluster with a command for it."""

import time

import pytest

from tests.testing.cluster.pod_client import PodClient, status, terminated_state
from tests.testing.suite.timeouts import until
from trainium_devcluster.faults import Faults
from trainium_devcluster.node.api.objects import is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

COUNT = "import time\nfor i in range(10**6): print(i); time.sleep(0.02)"


@pytest.fixture
def faults(client: PodClient) -> Faults:
    if client.cluster.devcluster is None:
        pytest.skip("fault controls are the development cluster's")
    return client.cluster.devcluster.faults


def test_a_rebooted_node_restarts_or_fails_its_pods(client: PodClient) -> None:
    node = client.cluster.worker_nodes()[-1]
    always = client.create_pod("always", client.container("exec sleep 600"), restartPolicy="Always", nodeName=node)
    never = client.create_pod("never", client.container("exec sleep 600"), nodeName=node)
    for name in (always, never):
        client.wait_ready(name)
    client.cluster.power_off(node)
    client.cluster.power_on(node)
    end = terminated_state(client.wait_ended(never))
    assert (end["exitCode"], end["reason"]) == (255, "Unknown")
    pod = client.wait(always, lambda pod: status(pod)["restartCount"] == 1 and is_ready(pod), "it ran again")
    assert status(pod)["lastState"]["terminated"]["exitCode"] == 255
    client.delete(always, "--grace-period=1")


def test_a_partitioned_node_reports_after_it_is_healed(client: PodClient, faults: Faults) -> None:
    node = client.cluster.worker_nodes()[0]
    name = client.create_pod("cut", client.container("sleep 1; echo done"), nodeName=node)
    client.wait_ready(name)
    faults.partition_node(node)
    time.sleep(2)
    assert client.get(name)["status"]["phase"] == "Running"
    faults.heal_node(node)
    assert client.wait_ended(name)["status"]["phase"] == "Succeeded"


def test_a_partition_delays_packets_until_it_is_healed(client: PodClient, faults: Faults) -> None:
    nodes = client.cluster.worker_nodes()
    echo = (
        "import os, socket\n"
        "server = socket.create_server((os.environ['IP'], 9000)); print('up')\n"
        "peer, _ = server.accept()\n"
        "while data := peer.recv(100): peer.sendall(data)\n"
    )
    ip = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    server = client.create_pod("echo", client.python(echo, env=ip), nodeName=nodes[0])
    client.wait_for_log(server, "up")
    address = client.get(server)["status"]["podIP"]
    script = (
        "import socket, time\n"
        f"peer = socket.create_connection(('{address}', 9000)); peer.settimeout(0.5)\n"
        "for i in range(10**6):\n"
        "    time.sleep(0.1)\n"
        "    try:\n"
        "        peer.sendall(b'x'); peer.recv(100); print('answer')\n"
        "    except TimeoutError:\n"
        "        print('silence')\n"
    )
    caller = client.create_pod("client", client.python(script), nodeName=nodes[1])
    client.wait_for_log(caller, "answer")
    faults.partition_node(nodes[0])
    client.wait_for_log(caller, "silence\nsilence")
    faults.heal_node(nodes[0])
    count = client.logs(caller).count("answer")
    until(lambda: client.logs(caller).count("answer") > count, "the connection comes back", 20, pause=0.2)
    for pod in (server, caller):
        client.delete(pod, "--grace-period=1")


def test_a_slow_node_limits_processor_time(client: PodClient, faults: Faults) -> None:
    node = client.cluster.worker_nodes()[0]
    name = client.create_pod("slow", client.python(COUNT), nodeName=node)
    client.wait_for_log(name, "5")
    faults.slow_node(node, 0.2)
    time.sleep(0.3)
    before = len(client.logs(name).splitlines())
    time.sleep(1.5)
    slow = len(client.logs(name).splitlines()) - before
    faults.slow_node(node, 1)
    assert 0 < slow < 50  # 75 at full speed
    client.delete(name, "--grace-period=1")


def test_an_unsupported_field_is_refused_by_name(client: PodClient, faults: Faults) -> None:
    name = client.create_pod("refused", client.container("true", securityContext={"privileged": True}))
    pod = client.wait_ended(name)
    assert (pod["status"]["phase"], pod["status"]["reason"]) == ("Failed", "NotSupported")
    for message in (pod["status"]["message"], client.event(name, "NotSupported")["message"]):
        assert "securityContext.privileged" in message


def test_limits_that_are_not_enforced_are_announced_on_the_node(client: PodClient, faults: Faults) -> None:
    client.output(
        client.create_pod("limits", client.container("true", resources={"limits": {"memory": "64Mi", "cpu": "1"}}))
    )

    def is_announced() -> bool:
        events = client.cluster.get("events", "-n", "default")["items"]
        return any("resources.limits.memory" in e["message"] for e in events if e["reason"] == "NotEnforced")

    until(is_announced, "an event NotEnforced exists", 10, pause=0.2)
