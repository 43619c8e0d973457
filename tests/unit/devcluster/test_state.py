"""Specifications of clusters and nodes, and where their files are."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from trainium_devcluster.controlplane.components import Component, Ports, arguments, choose_ports
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.node.options import NodeOptions
from trainium_devcluster.nodepool.pool import node_environment
from trainium_devcluster.options import parse_labels
from trainium_devcluster.state import MARKER, ClusterPaths, ClusterSpec, NodeSpec, clusters_folder, short_socket

PORTS = Ports(etcd=1, etcd_peer=2, apiserver=3, controller_manager=4, scheduler=5)


def test_a_spec_survives_its_file() -> None:
    node = NodeSpec("node-1", neuron=2, labels={"zone": "a"}, taints=("k=v:NoSchedule",))
    spec = ClusterSpec("dev", (node,), node_monitor_grace_seconds=4.0, apiserver_args=("--v=2",))
    assert ClusterSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("name", ["", "Upper", "-dash", "dash-", "a" * 41, "dot.dot", "../up"])
def test_a_bad_name_is_a_sentence(name: str) -> None:
    with pytest.raises(ClusterError, match="cannot be the name of a cluster; use up to 40"):
        ClusterSpec(name)
    with pytest.raises(ClusterError, match="cannot be the name of a cluster"):
        ClusterPaths.of(name)


def test_bad_nodes_are_a_sentence() -> None:
    with pytest.raises(ClusterError, match="negative number of devices"):
        NodeSpec("node-1", neuron=-1)
    with pytest.raises(ClusterError, match="names a node twice"):
        ClusterSpec("dev", (NodeSpec("a"), NodeSpec("a")))
    with pytest.raises(ClusterError, match="not of the form key=value"):
        parse_labels(["zone"])


def test_clusters_lie_in_the_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ClusterPaths.of("dev").root == tmp_path / "trainium-devcluster" / "dev"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert clusters_folder() == Path("~/.local/state/trainium-devcluster").expanduser()


def test_a_cluster_runs_while_its_lock_is_held(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    assert not paths.is_running()
    with paths.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert paths.is_running()
    assert not paths.is_running()


def test_a_socket_path_is_never_too_long_and_always_the_same(tmp_path: Path) -> None:
    short = Path("/tmp/a.sock")
    assert short_socket(short) == short
    long = tmp_path / ("x" * 120) / "a.sock"
    assert len(str(short_socket(long))) < 100
    assert short_socket(long) == short_socket(long)
    assert short_socket(long) != short_socket(long.with_name("b.sock"))


def test_ports_are_distinct_and_survive_their_file() -> None:
    ports = choose_ports()
    assert len({ports.etcd, ports.etcd_peer, ports.apiserver, ports.controller_manager, ports.scheduler}) == 5
    assert Ports.from_json(ports.to_json()) == ports


def test_every_component_listens_on_loopback_and_verifies_tls(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    flags = {component: arguments(component, ClusterSpec("dev"), paths, PORTS) for component in Component}
    assert "--client-cert-auth" in flags[Component.ETCD]
    assert not any("http://" in flag for group in flags.values() for flag in group)
    apiserver = flags[Component.APISERVER]
    assert "--authorization-mode=Node,RBAC" in apiserver
    assert any(flag.startswith("--etcd-cafile=") for flag in apiserver)
    assert any(flag.startswith("--kubelet-certificate-authority=") for flag in apiserver)
    for component in (Component.APISERVER, Component.CONTROLLER_MANAGER, Component.SCHEDULER):
        assert "--bind-address=127.0.0.1" in flags[component]
        assert not any("insecure" in flag for flag in flags[component])


def test_the_callers_flags_come_last_so_that_they_win(tmp_path: Path) -> None:
    spec = ClusterSpec("dev", apiserver_args=("--v=4",), controller_manager_args=("--v=5",), scheduler_args=("--v=6",))
    paths = ClusterPaths(tmp_path)
    assert arguments(Component.APISERVER, spec, paths, PORTS)[-1] == "--v=4"
    assert arguments(Component.CONTROLLER_MANAGER, spec, paths, PORTS)[-1] == "--v=5"
    assert arguments(Component.SCHEDULER, spec, paths, PORTS)[-1] == "--v=6"


def test_the_grace_of_a_silent_node_is_kubernetes_own_unless_chosen(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    default = arguments(Component.CONTROLLER_MANAGER, ClusterSpec("dev"), paths, PORTS)
    assert not any("node-monitor" in flag for flag in default)
    quick = arguments(Component.CONTROLLER_MANAGER, ClusterSpec("dev", node_monitor_grace_seconds=4), paths, PORTS)
    assert "--node-monitor-grace-period=4s" in quick
    assert "--node-monitor-period=0.8s" in quick


def test_nodes_show_that_they_live_several_times_within_the_grace() -> None:
    assert ClusterSpec("dev").heartbeat_seconds == 10
    assert ClusterSpec("dev", node_monitor_grace_seconds=4).heartbeat_seconds == 1
    assert ClusterSpec("dev", node_monitor_grace_seconds=300).heartbeat_seconds == 10


def options_of(root: Path, **fields: Any) -> NodeOptions:
    spec = NodeSpec("node-1", **fields)
    ClusterPaths(root).node("node-1").mkdir(parents=True, exist_ok=True)
    return NodeOptions(str(root), spec, ("127.0.0.1", 3), "/venv/bin", 1.0)


def test_a_node_reads_all_options_that_its_supervisor_wrote(tmp_path: Path) -> None:
    options = options_of(tmp_path, neuron=4, cpu="2", memory="4Gi", labels={"zone": "a"}, taints=("k=v:NoExecute",))
    assert NodeOptions.read(options.write()) == options
    assert options.paths.node_socket("node-1").parent == options.state_dir


def test_a_node_registers_with_what_it_has(tmp_path: Path) -> None:
    options = options_of(tmp_path, neuron=16, efa=0, taints=("k=v:NoSchedule", "x:NoExecute"))
    assert options.capacity["aws.amazon.com/neuroncore"] == "32"
    assert "vpc.amazonaws.com/efa" not in options.capacity
    assert options.taints == [
        {"key": "k", "value": "v", "effect": "NoSchedule"},
        {"key": "x", "value": "", "effect": "NoExecute"},
    ]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"memory": "lots"}, "capacity of memory: 'lots' is not a quantity"),
        ({"taints": ("a=b:Sometimes",)}, "with an effect of NoSchedule"),
    ],
)
def test_a_wrong_option_of_a_node_is_refused_with_a_sentence(
    tmp_path: Path, wrong: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ClusterError, match=sentence):
        options_of(tmp_path, **wrong)


def test_a_node_carries_the_mark_by_which_its_processes_are_found(tmp_path: Path) -> None:
    environment = node_environment({"PATH": "/bin"}, ClusterPaths(tmp_path), "node-1", Path("/cache"))
    assert environment[MARKER] == f"{tmp_path}/node-1"
    assert environment["PATH"] == "/cache:/bin"
