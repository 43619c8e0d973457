"""`python -m trainium_devcluster.demo`: what `make demo` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainium_devcluster.demo import report
from trainium_devcluster.demo.story import DemoStory
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.story.command import REPOSITORY, cluster, console, fresh, how_to_look
from trainium_devcluster.story.curves import fault_table
from trainium_devcluster.story.view import View


def demo(
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster up and say how to use it.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of the report, the picture and the run's files.")] = Path(
        "out/demo"
    ),
    name: Annotated[str | None, typer.Option("--name", help="Name of the cluster; by default a free one.")] = None,
) -> None:
    """Train a Llama model on a real control plane, through real faults, and compare it with an undisturbed run."""
    screen, out = console(), fresh(out)
    try:
        with View(screen) as view, cluster(view, name or ("demo" if keep else None), keep=keep) as started:
            result = DemoStory(started, view, REPOSITORY, out).tell()
        report.write(result, out)
    except ClusterError as error:
        screen.print(f"demo: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    curves = result.curves
    screen.print(fault_table(curves.faults))
    screen.print(
        f"loss after {curves.steps} steps: {curves.loss[curves.steps]:.6f} with faults, "
        f"{curves.reference[curves.steps]:.6f} undisturbed; largest relative difference {curves.max_difference:.1e}"
        f"{', none before the first resize' if curves.identical_before_resize else ''}\n"
        f"every sample seen once: {'yes' if result.every_sample_once else 'NO'}; goodput {result.goodput:.1%} of a "
        f"{result.seconds:.0f} s run with {len(curves.faults)} faults\n"
        f"picture: {out / 'loss.png'}   report: {out / 'report.json'}",
        highlight=False,
        soft_wrap=True,
    )
    if keep:
        screen.print(how_to_look(started.name), highlight=False, soft_wrap=True)
    if not (result.completed and result.every_sample_once):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(demo)
