"""Run the second demo, as `make tune` does; exits with 1 on a deviation."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trainium_contract.pages.facts import format_goodput
from trainium_contract.pages.formatting import format_duration
from trainium_devcluster.demos.curves import fault_table
from trainium_devcluster.demos.session import REPOSITORY, DemoSession, Keep, Name, Out, Outcome
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
    DemoSession("tune", out, name, keep=keep).show(partial(_compare, dpo=dpo))


def _compare(session: DemoSession, *, dpo: bool) -> Outcome:
    started = time.monotonic()
    (session.out / "material").mkdir()
    prepare(session.out / "material", session.view.log)
    with session.cluster() as cluster:
        result = TuneDemo(cluster, session.view, REPOSITORY, session.out, dpo=dpo).run_and_compare(started)
    report.write_report(result, session.out)
    curves, evaluation = result.curves, result.evaluation
    text = (
        f"largest relative difference of the loss curves: {curves.max_difference:.1e}"
        f"{', none before the resize' if curves.is_identical_before_resize else ''}\n"
        f"every sample seen once an epoch: {'yes' if result.saw_every_sample_once else 'NO'}\n"
        f"goodput of the run with {len(curves.faults)} faults: {format_goodput(result.goodput)}\n"
        f"both runs, the installation and the evaluation took {format_duration(result.seconds)}\n"
        f"merged model: {result.model}   adapter: {result.adapter}\n"
        f"picture: {session.out / 'tune.png'}   report: {session.out / 'report.json'}"
    )
    answers = (report.answer_table(evaluation),) if evaluation.answers else ()
    tables = (fault_table(curves.faults), *answers, report.figure_table(evaluation))
    return Outcome(tables, text, tuple(result.problems))


if __name__ == "__main__":
    typer.run(tune)
