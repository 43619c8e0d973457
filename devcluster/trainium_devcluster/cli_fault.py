"""Run the commands `node ...` and `fault ...`, which add and remove nodes and inject faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainium_devcluster.cluster import Cluster
from trainium_devcluster.controlplane.components import Component  # noqa: TC001 - typer reads annotations at run time
from trainium_devcluster.faults import Faults
from trainium_devcluster.options import Cpu, Efa, Memory, Name, Neuron, NodeLabels, NodeTaints, parse_labels
from trainium_devcluster.progress import print_to_stderr
from trainium_devcluster.state import NodeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

node_app = typer.Typer(help="Add and remove nodes.", no_args_is_help=True)
fault_app = typer.Typer(help="Inject faults.", no_args_is_help=True)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
PodName = Annotated[str, typer.Argument(metavar="POD", help="The pod's name.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="The pod's namespace.")]
Container = Annotated[str | None, typer.Option("--container", "-c", help="The container; by default the pod's first.")]


@node_app.command("add")
def add_node(
    node: NodeName,
    *,
    name: Name = "trainium",
    neuron: Neuron = 16,
    efa: Efa = 8,
    cpu: Cpu = "8",
    memory: Memory = "32Gi",
    label: NodeLabels = None,
    taint: NodeTaints = None,
) -> None:
    """Start one more node and wait until it is Ready."""
    labels, taints = parse_labels(label), tuple(taint or ())
    spec = NodeSpec(name=node, neuron=neuron, efa=efa, cpu=cpu, memory=memory, labels=labels, taints=taints)
    Cluster.connect(name).add_node(spec)
    print_to_stderr(f"node {node} is Ready")


@node_app.command("remove")
def remove_node(node: NodeName, name: Name = "trainium") -> None:
    """Shut a node down gracefully and delete its Node object."""
    Cluster.connect(name).remove_node(node)
    print_to_stderr(f"node {node} is removed")


def _add_node_fault(command: str, inject: Callable[[Faults, str], None], text: str, outcome: str) -> None:
    """Add a command that injects a fault into a node; `text` is its help, `outcome` what it prints."""

    @fault_app.command(command, help=text)
    def run(node: NodeName, name: Name = "trainium") -> None:
        inject(Cluster.connect(name).faults, node)
        print_to_stderr(outcome.format(node=node))


_add_node_fault(
    "kill-node",
    Faults.kill_node,
    "Power loss: the node and all its pods' processes end at once.",
    "node {node} lost its power; bring it back with: fault start-node {node}",
)
_add_node_fault("start-node", Faults.start_node, "Power on after kill-node.", "node {node} is starting")
_add_node_fault(
    "freeze-node",
    Faults.freeze_node,
    "Freeze every process of a node, as on a hung machine.",
    "node {node} is frozen; continue it with: fault thaw-node {node}",
)
_add_node_fault("thaw-node", Faults.thaw_node, "Let a frozen node continue.", "node {node} continues")


@fault_app.command("slow-node")
def slow_node(
    node: NodeName,
    *,
    name: Name = "trainium",
    share: Annotated[
        float, typer.Option("--share", help="Share of the time that its pods run; 1 is full speed.")
    ] = 0.25,
) -> None:
    """Let the pods of a node run only a share of the time."""
    Cluster.connect(name).faults.slow_node(node, share)
    print_to_stderr(f"node {node} runs {share:.0%} of the time")


_add_node_fault(
    "partition-node",
    Faults.partition_node,
    "Cut the node off from the API server; its pods continue to run.",
    "node {node} is cut off; reconnect it with: fault heal-node {node}",
)
_add_node_fault("heal-node", Faults.heal_node, "Mend a partition.", "node {node} is connected again")


@fault_app.command("set-condition")
def set_condition(
    node: NodeName,
    kind: Annotated[str, typer.Argument(metavar="TYPE", help="Type of the condition.")],
    status: Annotated[str, typer.Argument(metavar="STATUS", help="True, False or Unknown.")],
    *,
    name: Name = "trainium",
    reason: Annotated[str, typer.Option("--reason", help="One word in CamelCase.")] = "SetByHand",
    message: Annotated[str, typer.Option("--message", help="A sentence.")] = "",
) -> None:
    """Set a condition of the Node object, as a health monitor does."""
    Cluster.connect(name).faults.set_condition(node, kind, status, reason, message)
    print_to_stderr(f"node {node}: {kind}={status}")


@fault_app.command("clear-condition")
def clear_condition(
    node: NodeName,
    kind: Annotated[str, typer.Argument(metavar="TYPE", help="Type of the condition.")],
    name: Name = "trainium",
) -> None:
    """Clear a condition that `set-condition` set."""
    Cluster.connect(name).faults.clear_condition(node, kind)
    print_to_stderr(f"node {node}: {kind} cleared")


@fault_app.command("kill-container")
def kill_container(
    pod: PodName,
    *,
    name: Name = "trainium",
    namespace: Namespace = "default",
    container: Container = None,
    signal: Annotated[int, typer.Option("--signal", min=1, max=64, help="Number of the signal.")] = 9,
    match: Annotated[
        str | None, typer.Option("--match", help="Only the first process whose command line matches this expression.")
    ] = None,
) -> None:
    """Signal a container's main process, or one process in it."""
    Cluster.connect(name).faults.kill_container(namespace, pod, container, signal=signal, match=match)
    print_to_stderr(f"signal {signal} sent in pod {namespace}/{pod}")


@fault_app.command("freeze-container")
def freeze_container(
    pod: PodName, name: Name = "trainium", namespace: Namespace = "default", container: Container = None
) -> None:
    """Freeze all processes of a container."""
    Cluster.connect(name).faults.freeze_container(namespace, pod, container)
    print_to_stderr(f"pod {namespace}/{pod} is frozen")


@fault_app.command("thaw-container")
def thaw_container(
    pod: PodName, name: Name = "trainium", namespace: Namespace = "default", container: Container = None
) -> None:
    """Let a frozen container continue."""
    Cluster.connect(name).faults.thaw_container(namespace, pod, container)
    print_to_stderr(f"pod {namespace}/{pod} continues")


@fault_app.command("stop-component")
def stop_component(component: Component, name: Name = "trainium") -> None:
    """Kill a component of the control plane and do not restart it."""
    Cluster.connect(name).faults.stop(component, seconds=0.0)
    print_to_stderr(f"{component} is stopped; start it again with: fault start-component {component}")


@fault_app.command("start-component")
def start_component(component: Component, name: Name = "trainium") -> None:
    """Start a component of the control plane again and wait until it is ready."""
    Cluster.connect(name).faults.start(component)
    print_to_stderr(f"{component} is ready")


@fault_app.command("restart-apiserver")
def restart_apiserver(name: Name = "trainium") -> None:
    """Kill the API server and start it again at the same address."""
    Cluster.connect(name).faults.restart_apiserver()
    print_to_stderr("the API server is ready")
