"""`python -m trainium_devcluster.tune`: what `make tune` runs. Ends with 1 unless all is as it should be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trainium_devcluster.demos.curves import fault_table
from trainium_devcluster.demos.frame import REPOSITORY, cluster, console, empty_folder, usage_of
from trainium_devcluster.demos.view import View
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.tune import report
from trainium_devcluster.tune.demo import TuneDemo
from trainium_devcluster.tune.texts import prepare


def tune(
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the cluster and print how to use it.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of the report, the picture and the run's files.")] = Path(
        "out/tune"
    ),
    dpo: Annotated[bool, typer.Option("--dpo", help="Train on pairs of answers instead of examples.")] = False,
    name: Annotated[str | None, typer.Option("--name", help="Name of the cluster; by default a free one.")] = None,
) -> None:
    """Tune a base model by LoRA on a real control plane, through real faults, and compare answers before and after."""
    screen, out, started = console(), empty_folder(out), time.monotonic()
    try:
        with View(screen) as view:
            (out / "material").mkdir()
            prepare(out / "material", view.log)
            with cluster(view, name or ("tune" if keep else None), keep=keep) as running:
                result = TuneDemo(running, view, REPOSITORY, out, dpo=dpo).run_and_compare(started)
        report.write(result, out)
    except ClusterError as error:
        screen.print(f"tune: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    curves = result.curves
    screen.print(fault_table(curves.faults))
    if result.evaluation.answers:
        screen.print(report.answer_table(result.evaluation))
    screen.print(report.figure_table(result.evaluation))
    screen.print(
        f"largest relative difference of the loss curves: {curves.max_difference:.1e}"
        f"{', none before the resize' if curves.identical_before_resize else ''}\n"
        f"every sample seen once an epoch: {'yes' if result.every_sample_once else 'NO'}; goodput "
        f"{result.goodput:.1%}; {result.seconds:.0f} s in all\n"
        f"merged model: {result.model}   adapter: {result.adapter}\n"
        f"picture: {out / 'tune.png'}   report: {out / 'report.json'}",
        highlight=False,
        soft_wrap=True,
    )
    if keep:
        screen.print(usage_of(running.name), highlight=False, soft_wrap=True)
    for problem in result.problems:
        screen.print(problem, style="red", markup=False)
    if result.problems:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(tune)
