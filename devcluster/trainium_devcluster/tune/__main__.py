"""Run the second demo, as `make tune` does; exits with 1 on a deviation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trainium_devcluster.demos.frame import run_demo
from trainium_devcluster.demos.session import DemoSession, Keep, Name, Out, Outcome
from trainium_devcluster.tune.demo import PairsDemo, TuneDemo
from trainium_devcluster.tune.texts import prepare


def tune(
    *,
    keep: Keep = False,
    out: Out = Path("out/tune"),
    dpo: Annotated[bool, typer.Option("--dpo", help="Train on pairs of answers instead of examples.")] = False,
    name: Name = None,
) -> None:
    """Tune a base model by LoRA on a real control plane, through real faults, and compare answers before and after."""

    def compare(session: DemoSession) -> Outcome:
        material = session.out / "material"
        material.mkdir()
        return run_demo(session, PairsDemo if dpo else TuneDemo, partial(prepare, material, session.view.log))

    DemoSession("tune", out, name, keep=keep).show(compare)


if __name__ == "__main__":
    typer.run(tune)
