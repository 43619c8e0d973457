"""Train a model through faults on a development cluster; compare its curve with an undisturbed run (`make demo`)."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from trainium_devcluster.demos.curves import Curves, draw, fault_table
from trainium_devcluster.demos.frame import REPOSITORY, DemoFrame, Keep, Name, Out, Outcome
from trainium_devcluster.demos.jobs import WAIT_SECONDS, Demo, Run
from trainium_devcluster.demos.metrics import every_sample_once


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything that the demo found out."""

    completed: bool
    curves: Curves
    every_sample_once: bool
    goodput: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the contents of report.json."""
        return {
            "completed": self.completed,
            **self.curves.to_json(),
            "everySampleSeenOnce": self.every_sample_once,
            "goodput": self.goodput,
            "seconds": round(self.seconds, 1),
        }


def _write(result: DemoResult, folder: Path) -> None:
    """Write report.json and loss.png."""
    (folder / "report.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
    _picture(result.curves, folder / "loss.png")


def _picture(curves: Curves, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, height_ratios=(3, 1), constrained_layout=True
    )
    draw(curves, top, bottom)
    top.set_title("Same loss curve, whatever fails")
    figure.savefig(path, dpi=120)
    plt.close(figure)


class PretrainDemo(Demo):
    """A model trained from random weights."""

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Read the example job."""
        return self.read_job(self.repository / "manifests" / "examples" / "demo.yaml", name)

    def run_with_faults(self) -> Run:
        """Run the job with all faults."""
        run = self.run(self.create_manifest("demo"))
        self.until(run, "the first step", lambda: run.log.newest >= 1, seconds=WAIT_SECONDS * 2)
        self.view.log("the first step is done")
        at = [round(run.steps * share) for share in (0.1, 0.2, 0.6, 0.8)]
        self.kill_process_and_node(run, at[0], at[1])
        self.until_step(run, at[2])
        self.resize(run, 3)
        self.until_step(run, at[3])
        self.resize(run, 4)
        self.until(run, "the end", lambda: run.finished)
        run.log.refresh()
        self.view.log("the job is complete")
        return run

    def run_and_compare(self) -> DemoResult:
        """Run everything and compare."""
        started = time.monotonic()
        self.install()
        run = self.run_with_faults()
        reference = self.run_undisturbed(4, WAIT_SECONDS * 2)
        return DemoResult(
            completed=run.status.get("phase") == "Completed" and run.log.newest == run.steps,
            curves=Curves(run.steps, run.log.losses(), reference.log.losses(), tuple(self.faults)),
            every_sample_once=every_sample_once(run.folder, run.steps, run.global_batch),
            goodput=(run.status.get("goodput") or {}).get("ratio", 0.0),
            seconds=time.monotonic() - started,
        )


def demo(*, keep: Keep = False, out: Out = Path("out/demo"), name: Name = None) -> None:
    """Train a Llama model on a real control plane, through real faults, and compare it with an undisturbed run."""
    DemoFrame("demo", out, name, keep=keep).show(_compare)


def _compare(frame: DemoFrame) -> Outcome:
    with frame.cluster() as cluster:
        result = PretrainDemo(cluster, frame.view, REPOSITORY, frame.out).run_and_compare()
    _write(result, frame.out)
    curves = result.curves
    text = (
        f"loss after {curves.steps} steps: {curves.loss[curves.steps]:.6f} with faults, "
        f"{curves.reference[curves.steps]:.6f} undisturbed; largest relative difference {curves.max_difference:.1e}"
        f"{', none before the first resize' if curves.identical_before_resize else ''}\n"
        f"every sample seen once: {'yes' if result.every_sample_once else 'NO'}; goodput {result.goodput:.1%} of a "
        f"{result.seconds:.0f} s run with {len(curves.faults)} faults\n"
        f"picture: {frame.out / 'loss.png'}   report: {frame.out / 'report.json'}"
    )
    problems = {
        "The job did not complete.": not result.completed,
        "A sample was not seen exactly once.": not result.every_sample_once,
    }
    return Outcome((fault_table(curves.faults),), text, tuple(each for each, holds in problems.items() if holds))


if __name__ == "__main__":
    typer.run(demo)
