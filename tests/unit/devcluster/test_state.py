"""Specifications of clusters and nodes, their files, ports and command lines."""

import fcntl
import socket
from pathlib import Path
from typing import Any

import pytest

from trainium_devcluster.controlplane.components import Component, Ports, choose_ports, list_arguments
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.node.options import NodeOptions
from trainium_devcluster.nodepool.pool import build_node_environment
from trainium_devcluster.options import parse_labels
from trainium_devcluster.ports import reserve_port
from trainium_devcluster.state import (
    MARKER,
    ClusterPaths,
    ClusterSpec,
    NodeSpec,
    find_clusters_folder,
    shorten_socket_path,
)

PORTS = Ports(etcd=1, etcd_peer=2, apiserver=3, controller_manager=4, scheduler=5)


def test_a_spec_is_read_as_written() -> None:
    node = NodeSpec("node-1", neuron=2, labels={"zone": "a"}, taints=("k=v:NoSchedule",))
    spec = ClusterSpec("dev", (node,), node_monitor_grace_seconds=4.0, apiserver_args=("--v=2",))
    assert ClusterSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", ["", "Upper", "-dash", "dash-", "a" * 41, "dot.dot", "../up"])
def test_an_invalid_name_is_an_error(name: str) -> None:
    with pytest.raises(ClusterError, match="cannot be the name of a cluster; use up to 40"):
        ClusterSpec(name)
    with pytest.raises(ClusterError, match="cannot be the name of a cluster"):
        ClusterPaths.of(name)


def test_invalid_nodes_are_an_error() -> None:
    with pytest.raises(ClusterError, match="negative number of devices"):
        NodeSpec("node-1", neuron=-1)
    with pytest.raises(ClusterError, match="names a node twice"):
        ClusterSpec("dev", (NodeSpec("a"), NodeSpec("a")))
    with pytest.raises(ClusterError, match="not of the form key=value"):
        parse_labels(["zone"])


def test_clusters_are_in_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ClusterPaths.of("dev").root == tmp_path / "trainium-devcluster" / "dev"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert find_clusters_folder() == Path("~/.local/state/trainium-devcluster").expanduser()


def test_a_cluster_runs_while_its_lock_is_held(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    assert not paths.is_running()
    with paths.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert paths.is_running()
    assert not paths.is_running()


def test_a_long_socket_path_is_shortened_deterministically(tmp_path: Path) -> None:
    short = Path("/tmp/a.sock")
    assert shorten_socket_path(short) == short
    long = tmp_path / ("x" * 120) / "a.sock"
    assert len(str(shorten_socket_path(long))) < 100
    assert shorten_socket_path(long) == shorten_socket_path(long)
    assert shorten_socket_path(long) != shorten_socket_path(long.with_name("b.sock"))


def test_ports_are_distinct_and_read_as_written() -> None:
    ports = choose_ports()
    assert len({ports.etcd, ports.etcd_peer, ports.apiserver, ports.controller_manager, ports.scheduler}) == 5
    assert Ports.from_json(ports.to_json()) == ports


def test_every_component_listens_on_loopback_and_verifies_tls(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    flags = {component: list_arguments(component, ClusterSpec("dev"), paths, PORTS) for component in Component}
    assert "--client-cert-auth" in flags[Component.ETCD]
    assert not any("http://" in flag for group in flags.values() for flag in group)
    apiserver = flags[Component.APISERVER]
    assert "--authorization-mode=Node,RBAC" in apiserver
    assert any(flag.startswith("--etcd-cafile=") for flag in apiserver)
    assert any(flag.startswith("--kubelet-certificate-authority=") for flag in apiserver)
    for component in (Component.APISERVER, Component.CONTROLLER_MANAGER, Component.SCHEDULER):
        assert "--bind-address=127.0.0.1" in flags[component]
        assert not any("insecure" in flag for flag in flags[component])


def test_flags_of_the_spec_override_the_defaults(tmp_path: Path) -> None:
    spec = ClusterSpec("dev", apiserver_args=("--v=4",), controller_manager_args=("--v=5",), scheduler_args=("--v=6",))
    paths = ClusterPaths(tmp_path)
    assert list_arguments(Component.APISERVER, spec, paths, PORTS)[-1] == "--v=4"
    assert list_arguments(Component.CONTROLLER_MANAGER, spec, paths, PORTS)[-1] == "--v=5"
    assert list_arguments(Component.SCHEDULER, spec, paths, PORTS)[-1] == "--v=6"


def test_the_node_monitor_grace_period_defaults_to_that_of_kubernetes(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    default = list_arguments(Component.CONTROLLER_MANAGER, ClusterSpec("dev"), paths, PORTS)
    assert not any("node-monitor" in flag for flag in default)
    quick = list_arguments(Component.CONTROLLER_MANAGER, ClusterSpec("dev", node_monitor_grace_seconds=4), paths, PORTS)
    assert "--node-monitor-grace-period=4s" in quick
    assert "--node-monitor-period=0.8s" in quick


def test_nodes_send_several_heartbeats_within_the_grace_period() -> None:
    assert ClusterSpec("dev").heartbeat_seconds == 10
    assert ClusterSpec("dev", node_monitor_grace_seconds=4).heartbeat_seconds == 1
    assert ClusterSpec("dev", node_monitor_grace_seconds=300).heartbeat_seconds == 10


def options_of(root: Path, **fields: Any) -> NodeOptions:
    spec = NodeSpec("node-1", **fields)
    ClusterPaths(root).find_node_folder("node-1").mkdir(parents=True, exist_ok=True)
    return NodeOptions(str(root), spec, ("127.0.0.1", 3), "/venv/bin", 1.0, "1.36.3")


def test_node_options_are_read_as_written(tmp_path: Path) -> None:
    options = options_of(tmp_path, neuron=4, cpu="2", memory="4Gi", labels={"zone": "a"}, taints=("k=v:NoExecute",))
    assert NodeOptions.read(options.write()) == options
    assert options.paths.find_node_socket("node-1").parent == options.state_dir


def test_a_node_registers_its_capacity_and_taints(tmp_path: Path) -> None:
    options = options_of(tmp_path, neuron=16, efa=0, taints=("k=v:NoSchedule", "x:NoExecute"))
    assert options.capacity["aws.amazon.com/neuroncore"] == "32"
    assert "vpc.amazonaws.com/efa" not in options.capacity
    assert options.taints == [
        {"key": "k", "value": "v", "effect": "NoSchedule"},
        {"key": "x", "value": "", "effect": "NoExecute"},
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"memory": "lots"}, "capacity of memory: 'lots' is not a quantity"),
        ({"taints": ("a=b:Sometimes",)}, "with an effect of NoSchedule"),
    ],
)
def test_an_invalid_option_of_a_node_is_an_error(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ClusterError, match=sentence):
        options_of(tmp_path, **options)


def test_the_environment_of_a_node_has_its_mark(tmp_path: Path) -> None:
    environment = build_node_environment({"PATH": "/bin"}, ClusterPaths(tmp_path), "node-1", Path("/cache"))
    assert environment[MARKER] == f"{tmp_path}/node-1"
    assert environment["PATH"] == "/cache:/bin"


def test_a_reserved_port_is_exclusive_and_can_be_listened_on() -> None:
    port = reserve_port()
    assert port != reserve_port()
    for pod_address in ("127.0.0.1", "127.0.0.2", "0.0.0.0"):  # a process node gives each pod a separate address
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((pod_address, port))
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((address, port))
            server.listen()
