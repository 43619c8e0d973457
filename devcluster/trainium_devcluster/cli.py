"""Run the command `trainium-devcluster`.

Guarantees:
- Results go to standard output, progress and errors to standard error.
- An error is one sentence and a non-zero exit code.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from trainium_contract.api_server.errors import ApiError, ClientError
from trainium_contract.command_line import describe_usage_error
from trainium_devcluster.binaries.command import prepare
from trainium_devcluster.cli_fault import fault_app, node_app
from trainium_devcluster.cluster import Cluster, create_node_specs, remove_leftovers
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.fleet.fake_nodes import FleetShape
from trainium_devcluster.options import (
    Cpu,
    Efa,
    Kubernetes,
    Memory,
    Name,
    Neuron,
    NodeLabels,
    NodeTaints,
    parse_labels,
)
from trainium_devcluster.progress import print_to_stderr
from trainium_devcluster.state import ClusterPaths, list_cluster_names

_NAME = "trainium-devcluster"
app = typer.Typer(
    name=_NAME,
    help="A real Kubernetes control plane on loopback with nodes that run pods as local processes. No Docker, no root.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(fault_app, name="fault")
app.add_typer(node_app, name="node")

NodeCount = Annotated[int, typer.Option("--nodes", min=0, help="How many nodes.")]
FleetCount = Annotated[
    int, typer.Option("--fleet", min=0, help="Number of fake nodes in addition; with them, --nodes is 0 unless given.")
]
GraceSeconds = Annotated[
    float | None, typer.Option("--node-monitor-grace", min=1, help="Seconds after which a silent node is NotReady.")
]


@app.command()
def up(
    *,
    name: Name = "trainium",
    nodes: Annotated[int | None, typer.Option("--nodes", min=0, help="Number of nodes; 4 without a fleet.")] = None,
    fleet: FleetCount = 0,
    neuron: Neuron = 16,
    efa: Efa = 8,
    cpu: Cpu = "8",
    memory: Memory = "32Gi",
    label: NodeLabels = None,
    taint: NodeTaints = None,
    node_monitor_grace: GraceSeconds = None,
    kubernetes: Kubernetes = None,
    kueue: Annotated[bool, typer.Option("--kueue", help="Run the real Kueue controller in it.")] = False,
) -> None:
    """Start a cluster and leave it running until `down`."""
    started = time.monotonic()
    count = (0 if fleet else 4) if nodes is None else nodes
    specs = create_node_specs(
        count, neuron=neuron, efa=efa, cpu=cpu, memory=memory, labels=parse_labels(label), taints=tuple(taint or ())
    )
    cluster = Cluster.start(
        name,
        specs,
        fleet=fleet,
        fleet_shape=FleetShape(neuron=neuron, efa=efa),
        node_monitor_grace_seconds=node_monitor_grace,
        kubernetes=kubernetes,
        kueue=kueue,
        detached=True,
        report=print_to_stderr,
    )
    server = cluster.ports.server
    print_to_stderr(
        f"cluster {name} is ready after {time.monotonic() - started:.1f} s: {server}, {count + fleet} nodes"
    )
    print_to_stderr(f"  use it:     eval $(trainium-devcluster env{_format_suffix(name)}); kubectl get nodes")
    print_to_stderr(f"  look:       trainium-devcluster status{_format_suffix(name)}   (logs: {cluster.paths.logs})")
    print_to_stderr(f"  stop it:    trainium-devcluster down{_format_suffix(name)}")


@app.command()
def down(
    name: Name = "trainium",
    every: Annotated[bool, typer.Option("--all", help="Stop every cluster of this user.")] = False,
) -> None:
    """Stop a cluster and remove its files."""
    names = list_cluster_names() if every else [name]
    for cluster_name in names:
        paths = ClusterPaths.of(cluster_name)
        if paths.is_running():
            Cluster.connect(cluster_name).stop()
            remove_leftovers(paths, even_kept=True)
            print_to_stderr(f"cluster {cluster_name} is down")
        elif paths.root.exists():
            ended = remove_leftovers(paths, even_kept=True)
            print_to_stderr(f"cluster {cluster_name} was not running; {ended} leftover processes ended, files removed")
        else:
            print_to_stderr(f"there is no cluster {cluster_name}")


@app.command()
def status(
    name: Name = "trainium", as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the components, nodes, processes and memory of a cluster."""
    cluster = Cluster.connect(name)
    state = cluster.read_status()
    try:
        ready = cluster.read_node_readiness()
    except ApiError:
        ready = {}
    if as_json:
        sys.stdout.write(json.dumps({**state, "name": name, "readyNodes": ready}, indent=1) + "\n")
        return
    console = Console()
    console.print(_format_status_table(name, state, ready))
    others = [other for other in list_cluster_names() if other != name]
    if others:
        console.print(f"other clusters: {', '.join(others)}")


@app.command()
def env(name: Name = "trainium") -> None:
    """Print shell lines that point kubectl and helm at the cluster: eval $(trainium-devcluster env)."""
    for key, value in Cluster.connect(name).list_variables().items():
        sys.stdout.write(f"export {key}={shlex.quote(value)}\n")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the temporary cluster.")] = None,
    nodes: NodeCount = 2,
    neuron: Neuron = 16,
    kubernetes: Kubernetes = None,
) -> None:
    """Start a temporary cluster, run a command with its kubectl, helm and KUBECONFIG, and stop the cluster."""
    specs = create_node_specs(nodes, neuron=neuron)
    with Cluster.start(name, specs, kubernetes=kubernetes, report=print_to_stderr) as cluster:
        try:
            done = subprocess.run(command, env={**os.environ, **cluster.list_variables()}, check=False)
        except OSError as error:
            raise ClusterError(f"{command[0]!r} cannot be run: {error.strerror or error}.") from error
    raise typer.Exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


@app.command()
def binaries(
    kubernetes: Kubernetes = None,
    fleet: Annotated[bool, typer.Option("--fleet", help="Also kwok, which simulates fleets of fake nodes.")] = False,
    kueue: Annotated[bool, typer.Option("--kueue", help="Also Kueue, which admits jobs by quota.")] = False,
    s3: Annotated[bool, typer.Option("--s3", help="Also versitygw, an S3 server over a folder.")] = False,
    definition: Annotated[
        bool, typer.Option("--definition", help="Also the checks of definitions of the oldest and newest Kubernetes.")
    ] = False,
    helm: Annotated[bool, typer.Option("--helm", help="Only helm, which renders the chart: no control plane.")] = False,
) -> None:
    """Fetch or build all programs into the cache, and print the folder."""
    folder = prepare(kubernetes=kubernetes, fleet=fleet, kueue=kueue, s3=s3, definition=definition, helm=helm)
    sys.stdout.write(f"{folder}\n")


def main() -> None:
    """Run the command line; an error is one line."""
    try:
        code = app(prog_name=_NAME, standalone_mode=False)
    except (ClientError, ClusterError) as error:
        code = _fail(str(error))
    except typer.Abort:
        code = 130
    except BrokenPipeError:
        # The reader of our output has closed it; Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        sentence = describe_usage_error(error, _NAME)
        if sentence is None:
            raise
        code = _fail(sentence) if sentence else 0
    raise SystemExit(code)


def _fail(sentence: str) -> int:
    Console(stderr=True, soft_wrap=True).print(f"error: {sentence}", style="red", markup=False, highlight=False)
    return 1


def _format_suffix(name: str) -> str:
    return "" if name == "trainium" else f" --name {name}"


def _format_status_table(name: str, state: dict[str, Any], ready: dict[str, bool]) -> Table:
    rows = [state["supervisor"], *state["components"].values(), *state["nodes"].values()]
    rows += [state[part] for part in ("fleet", "kueue") if state[part]]
    total = sum(row["bytes"] for row in rows) / 1e6
    table = Table(title=f"cluster {name} at {state['server']}: {total:.0f} MB", title_justify="left")
    for column in ("what", "state", "pid", "memory", "restarts"):
        table.add_column(column, justify="right" if column in {"pid", "memory", "restarts"} else "left")

    def add(label: str, row: dict[str, Any], text: str) -> None:
        alive = row["code"] is None
        memory = f"{row['bytes'] / 1e6:.0f} MB" if alive else ""
        table.add_row(label, text, str(row["pid"]) if alive else "", memory, str(row.get("restarts", "")))

    add("supervisor", state["supervisor"], "running")
    for component, row in state["components"].items():
        add(component, row, row["state"])
    if state["fleet"] is not None:
        add("kwok", state["fleet"], f"{state['fleet']['state']}, {len(ready) - len(state['nodes'])} fake nodes")
    if state["kueue"] is not None:
        add("kueue", state["kueue"], state["kueue"]["state"])
    for node, row in sorted(state["nodes"].items()):
        api_view = {True: "Ready", False: "NotReady", None: "not registered"}[ready.get(node)]
        add(f"node {node}", row, f"{row['state']}, {api_view}")
    return table


if __name__ == "__main__":
    main()
