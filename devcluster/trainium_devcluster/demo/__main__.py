"""`python -m trainium_devcluster.demo`: what `make demo` runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trainium_devcluster.cluster import Cluster, node_specs, system_node
from trainium_devcluster.demo import report
from trainium_devcluster.demo.story import NAMESPACE, Story
from trainium_devcluster.demo.view import View
from trainium_devcluster.errors import ClusterError

_REPOSITORY = Path(__file__).resolve().parents[3]
_NODES = 5
_PLAIN_WIDTH = 110
"""Columns where the output is a file or a pipe."""


def demo(
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster up and say how to use it.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of the report, the picture and the run's files.")] = Path(
        "out/demo"
    ),
    name: Annotated[str | None, typer.Option("--name", help="Name of the cluster; by default a free one.")] = None,
) -> None:
    """Train a Llama model on a real control plane, through real faults, and compare it with an undisturbed run."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    out = out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        with View(console) as view:
            nodes = [*node_specs(_NODES, cpu="4", memory="8Gi"), system_node()]
            cluster = Cluster.start(name or ("demo" if keep else None), nodes, detached=keep, write=view.say)
            try:
                view.say(f"{_NODES} nodes for workers and one for the operator are ready")
                result = Story(cluster, view, _REPOSITORY, out).tell()
            finally:
                if not keep:
                    cluster.stop()
        report.write(result, out)
    except ClusterError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    console.print(report.table(result))
    console.print(
        f"loss after {result.steps} steps: {result.loss[result.steps]:.6f} with faults, "
        f"{result.reference[result.steps]:.6f} undisturbed; largest relative difference {result.max_difference:.1e}"
        f"{', none before the first resize' if result.identical_before_resize else ''}\n"
        f"every sample seen once: {'yes' if result.every_sample_once else 'NO'}; goodput {result.goodput:.1%} of a "
        f"{result.seconds:.0f} s run with {len(result.faults)} faults\n"
        f"picture: {out / 'loss.png'}   report: {out / 'report.json'}",
        highlight=False,
        soft_wrap=True,
    )
    if keep:
        console.print(
            f"\nThe cluster {cluster.name!r} is still up:\n"
            f"  eval $({_REPOSITORY / '.venv/bin/trainium-devcluster'} env --name {cluster.name})\n"
            f"  kubectl get trainingjobs,pods -n {NAMESPACE}\n"
            f"  trainium-devcluster down --name {cluster.name}",
            highlight=False,
            soft_wrap=True,
        )
    if not (result.completed and result.every_sample_once):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(demo)
