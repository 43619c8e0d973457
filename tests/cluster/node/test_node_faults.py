"""Faults and refusals of the development cluster's nodes; power loss works on any site with a command for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.cluster.lab import condition, is_ready, status, terminated
from tests.testing.suite.patience import until

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


def test_a_lost_node_takes_all_its_processes_with_it_and_is_noticed(lab: Lab, faults: Faults) -> None:
    from trainium_devcluster.processes.process_families import with_command_line

    node = lab.site.worker_nodes()[-1]
    name = lab.pod("lost", lab.container("setsid sleep 654321 & exec sleep 654321"), nodeName=node)
    lab.running(name)
    assert len(with_command_line("sleep 654321")) == 2
    faults.kill_node(node)
    until(lambda: not with_command_line("sleep 654321"), "processes of the lost node end", 5)
    lab.site.wait("condition=Ready=Unknown", f"node/{node}", seconds=90)
    faults.start_node(node)
    lab.site.wait("condition=Ready", f"node/{node}", seconds=60)


def test_one_process_of_a_container_can_be_killed_and_the_container_too(lab: Lab, faults: Faults) -> None:
    script = "(sleep 123456; echo child ended; exec sleep 600)"
    name = lab.pod("kill", lab.container(f"{script}; true"))
    lab.running(name)
    faults.kill_container(lab.namespace, name, match="^sleep 123456")
    lab.logged(name, "child ended")
    assert is_ready(lab.get(name))
    faults.kill_container(lab.namespace, name)
    assert terminated(lab.ended(name))["exitCode"] == 137


def test_a_frozen_container_stops_and_goes_on(lab: Lab, faults: Faults) -> None:
    name = lab.pod("freeze", lab.python(COUNT))
    lab.logged(name, "5")
    faults.freeze_container(lab.namespace, name)
    time.sleep(0.2)
    frozen = lab.logs(name)
    time.sleep(0.5)
    assert lab.logs(name) == frozen
    faults.thaw_container(lab.namespace, name)
    time.sleep(0.5)
    assert len(lab.logs(name)) > len(frozen)
    lab.delete(name, "--grace-period=1")


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


def test_a_condition_can_be_set_and_cleared(lab: Lab, faults: Faults) -> None:
    node = lab.site.worker_nodes()[0]
    faults.set_condition(node, "NeuronHealth", "False", "Ecc", "uncorrectable")
    lab.site.wait("condition=NeuronHealth=False", f"node/{node}", seconds=10)
    assert condition(lab.site.get(f"node/{node}"), "NeuronHealth")["reason"] == "Ecc"
    faults.set_condition(node, "Ready", "False", "Injected", "bad")
    lab.site.wait("condition=Ready=False", f"node/{node}", seconds=10)
    faults.clear_condition(node, "Ready")
    lab.site.wait("condition=Ready=True", f"node/{node}", seconds=10)


PRIVILEGED = {"securityContext": {"privileged": True}}
GRPC = {"livenessProbe": {"grpc": {"port": 1}}}


@pytest.mark.parametrize(
    ("container", "spec", "field"),
    [
        (PRIVILEGED, {}, "securityContext.privileged"),
        ({}, {"hostPID": True}, "spec.hostPID"),
        ({}, {"shareProcessNamespace": True}, "spec.shareProcessNamespace"),
        (GRPC, {}, "livenessProbe.grpc"),
        ({"ports": [{"containerPort": 1, "hostPort": 1}]}, {}, "ports.hostPort"),
        ({"stdin": True}, {}, "stdin and tty"),
        ({"command": []}, {}, "command must be given"),
        ({}, {"volumes": [{"name": "n", "nfs": {"server": "s", "path": "/"}}]}, "volume n of kind nfs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_honoured_is_refused_by_name(
    lab: Lab, faults: Faults, container: dict[str, Any], spec: dict[str, Any], field: str
) -> None:
    name = lab.pod("refused", lab.container("true", **container), **spec)
    pod = lab.ended(name)
    assert (pod["status"]["phase"], pod["status"]["reason"]) == ("Failed", "NotSupported")
    assert field in pod["status"]["message"]
    assert field in lab.event(name, "NotSupported")["message"]


def test_limits_that_are_not_enforced_are_announced_on_the_node(lab: Lab, faults: Faults) -> None:
    lab.output(lab.pod("limits", lab.container("true", resources={"limits": {"memory": "64Mi", "cpu": "1"}})))

    def is_announced() -> bool:
        events = lab.site.get("events", "-n", "default")["items"]
        return any("resources.limits.memory" in e["message"] for e in events if e["reason"] == "NotEnforced")

    until(is_announced, "the node says so", 10, pause=0.2)
