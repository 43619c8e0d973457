"""Run the second demo, as `make tune` does; ends with 1 unless all is as it should be."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trainium_devcluster.demos.curves import fault_table
from trainium_devcluster.demos.frame import REPOSITORY, DemoFrame, Keep, Name, Out, Outcome
from trainium_devcluster.tune import report
from trainium_devcluster.tune.demo import TuneDemo
from trainium_devcluster.tune.texts import prepare


def tune(
    *,
    keep: Keep = False,
    out: Out = Path("out/tune"),
    dpo: Annotated[bool, typer.Option("--dpo", help="Train on pairs of answers instead of examples.")] = False,
    name: Name = None,
) -> None:
    """Tune a base model by LoRA on a real control plane, through real faults, and compare answers before and after."""
    DemoFrame("tune", out, name, keep=keep).show(partial(_compare, dpo=dpo))


def _compare(frame: DemoFrame, *, dpo: bool) -> Outcome:
    started = time.monotonic()
    (frame.out / "material").mkdir()
    prepare(frame.out / "material", frame.view.log)
    with frame.cluster() as cluster:
        result = TuneDemo(cluster, frame.view, REPOSITORY, frame.out, dpo=dpo).run_and_compare(started)
    report.write(result, frame.out)
    curves, evaluation = result.curves, result.evaluation
    text = (
        f"largest relative difference of the loss curves: {curves.max_difference:.1e}"
        f"{', none before the resize' if curves.identical_before_resize else ''}\n"
        f"every sample seen once an epoch: {'yes' if result.every_sample_once else 'NO'}; goodput "
        f"{result.goodput:.1%}; {result.seconds:.0f} s in all\n"
        f"merged model: {result.model}   adapter: {result.adapter}\n"
        f"picture: {frame.out / 'tune.png'}   report: {frame.out / 'report.json'}"
    )
    answers = (report.answer_table(evaluation),) if evaluation.answers else ()
    tables = (fault_table(curves.faults), *answers, report.figure_table(evaluation))
    return Outcome(tables, text, tuple(result.problems))


if __name__ == "__main__":
    typer.run(tune)
