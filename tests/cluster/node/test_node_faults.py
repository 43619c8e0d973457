"""Faults and refusals of the development cluster's nodes; power loss works on any site with a command for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.testing.cluster.lab import is_ready, status, terminated
from tests.testing.suite.timeouts import until

if TYPE_CHECKING:
    from tests.testing.cluster.lab import Lab
    from trainium_devcluster.faults import Faults

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

COUNT = "import time\nfor i in range(10**6): print(i); time.sleep(0.02)"


@pytest.fixture
def faults(lab: Lab) -> Faults:
    if lab.site.cluster is None:
        pytest.skip("fault controls are the development cluster's")
    return lab.site.cluster.faults


def test_a_rebooted_node_restarts_some_pods_and_fails_the_others(lab: Lab) -> None:
    node = lab.site.worker_nodes()[-1]
    always = lab.pod("always", lab.container("exec sleep 600"), restartPolicy="Always", nodeName=node)
    never = lab.pod("never", lab.container("exec sleep 600"), nodeName=node)
    for name in (always, never):
        lab.running(name)
    lab.site.power_off(node)
    lab.site.power_on(node)
    end = terminated(lab.ended(never))
    assert (end["exitCode"], end["reason"]) == (255, "Unknown")
    pod = lab.wait(always, lambda p: status(p)["restartCount"] == 1 and is_ready(p), "it ran again")
    assert status(pod)["lastState"]["terminated"]["exitCode"] == 255
    lab.delete(always, "--grace-period=1")


def test_a_partitioned_node_runs_on_and_catches_up_when_it_is_healed(lab: Lab, faults: Faults) -> None:
    node = lab.site.worker_nodes()[0]
    name = lab.pod("cut", lab.container("sleep 1; echo done"), nodeName=node)
    lab.running(name)
    faults.partition_node(node)
    time.sleep(2)
    assert lab.get(name)["status"]["phase"] == "Running"
    faults.heal_node(node)
    assert lab.ended(name)["status"]["phase"] == "Succeeded"


def test_a_partition_swallows_what_is_sent_to_a_pod_and_healing_delivers_it(lab: Lab, faults: Faults) -> None:
    nodes = lab.site.worker_nodes()
    echo = (
        "import os, socket\n"
        "server = socket.create_server((os.environ['IP'], 9000)); print('up')\n"
        "peer, _ = server.accept()\n"
        "while data := peer.recv(100): peer.sendall(data)\n"
    )
    ip = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    server = lab.pod("echo", lab.python(echo, env=ip), nodeName=nodes[0])
    lab.logged(server, "up")
    address = lab.get(server)["status"]["podIP"]
    ask = (
        "import socket, time\n"
        f"peer = socket.create_connection(('{address}', 9000)); peer.settimeout(0.5)\n"
        "for i in range(10**6):\n"
        "    time.sleep(0.1)\n"
        "    try:\n"
        "        peer.sendall(b'x'); peer.recv(100); print('answer')\n"
        "    except TimeoutError:\n"
        "        print('silence')\n"
    )
    client = lab.pod("client", lab.python(ask), nodeName=nodes[1])
    lab.logged(client, "answer")
    faults.partition_node(nodes[0])
    lab.logged(client, "silence\nsilence")
    faults.heal_node(nodes[0])
    seen = lab.logs(client).count("answer")
    until(lambda: lab.logs(client).count("answer") > seen, "the connection comes back", 20, pause=0.2)
    for pod in (server, client):
        lab.delete(pod, "--grace-period=1")


def test_a_slow_node_gives_its_containers_a_share_of_the_time(lab: Lab, faults: Faults) -> None:
    node = lab.site.worker_nodes()[0]
    name = lab.pod("slow", lab.python(COUNT), nodeName=node)
    lab.logged(name, "5")
    faults.slow_node(node, 0.2)
    time.sleep(0.3)
    before = len(lab.logs(name).splitlines())
    time.sleep(1.5)
    slow = len(lab.logs(name).splitlines()) - before
    faults.slow_node(node, 1)
    assert 0 < slow < 50  # 75 at full speed
    lab.delete(name, "--grace-period=1")


def test_what_is_not_honoured_is_refused_by_name(lab: Lab, faults: Faults) -> None:
    name = lab.pod("refused", lab.container("true", securityContext={"privileged": True}))
    pod = lab.ended(name)
    assert (pod["status"]["phase"], pod["status"]["reason"]) == ("Failed", "NotSupported")
    for message in (pod["status"]["message"], lab.event(name, "NotSupported")["message"]):
        assert "securityContext.privileged" in message


def test_limits_that_are_not_enforced_are_announced_on_the_node(lab: Lab, faults: Faults) -> None:
    lab.output(lab.pod("limits", lab.container("true", resources={"limits": {"memory": "64Mi", "cpu": "1"}})))

    def is_announced() -> bool:
        events = lab.site.get("events", "-n", "default")["items"]
        return any("resources.limits.memory" in e["message"] for e in events if e["reason"] == "NotEnforced")

    until(is_announced, "the node says so", 10, pause=0.2)
