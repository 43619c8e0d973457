"""Train a model through faults on a development cluster, and compare it with an undisturbed run (`make demo`)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import typer

from trainium_contract.pages.facts import format_goodput
from trainium_contract.pages.formatting import format_duration
from trainium_devcluster.demos.curves import Curves, fault_table, plot_curves
from trainium_devcluster.demos.jobs import WAIT_SECONDS, Demo, Run
from trainium_devcluster.demos.session import REPOSITORY, DemoSession, Keep, Name, Out, Outcome
from trainium_devcluster.jobs.metrics import every_sample_once


def _picture(curves: Curves, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - slow to import, needed only here

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, height_ratios=(3, 1), constrained_layout=True
    )
    plot_curves(curves, top, bottom)
    top.set_title("Same loss curve, whatever fails")
    figure.savefig(path, dpi=120)
    plt.close(figure)


class PretrainDemo(Demo):
    """A demo that trains a model from random weights."""

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Read the example job."""
        return self.read_job(self.repository / "manifests" / "examples" / "demo.yaml", name)

    def run_with_faults(self) -> Run:
        """Run the job with all faults."""
        run = self.run(self.create_manifest("demo"))
        self.until(run, lambda: run.log.newest >= 1, "the first step", seconds=WAIT_SECONDS * 2)
        self.view.log("the first step is done")
        fault_steps = [round(run.steps * share) for share in (0.1, 0.2, 0.6, 0.8)]
        self.kill_process_and_node(run, fault_steps[0], fault_steps[1])
        self.until_step(run, fault_steps[2])
        self.resize(run, 3)
        self.until_step(run, fault_steps[3])
        self.resize(run, 4)
        self.until(run, lambda: run.finished, "the end")
        run.log.refresh()
        self.view.log("the job is complete")
        return run


def demo(*, keep: Keep = False, out: Out = Path("out/demo"), name: Name = None) -> None:
    """Train a Llama model on a real control plane, through real faults, and compare it with an undisturbed run."""
    DemoSession("demo", out, name, keep=keep).show(_compare)


def _compare(session: DemoSession) -> Outcome:
    with session.cluster() as cluster:
        started = time.monotonic()
        demo = PretrainDemo(cluster, session.view, REPOSITORY, session.out)
        demo.install()
        run = demo.run_with_faults()
        reference = demo.run_undisturbed(4, WAIT_SECONDS * 2)
        seconds = round(time.monotonic() - started, 1)
    curves = Curves(run.steps, run.log.losses(), reference.log.losses(), tuple(demo.faults))
    completed = run.status.get("phase") == "Completed" and run.log.newest == run.steps
    once = every_sample_once(run.folder, run.steps, run.global_batch)
    report = {"completed": completed, **curves.to_json(), "everySampleSeenOnce": once}
    report |= {"goodput": run.goodput.ratio, "wallSeconds": run.goodput.wall_seconds, "seconds": seconds}
    (session.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    _picture(curves, session.out / "loss.png")
    text = (
        f"loss after {curves.steps} steps: {curves.loss[curves.steps]:.6f} with faults, "
        f"{curves.reference[curves.steps]:.6f} undisturbed; largest relative difference {curves.max_difference:.1e}"
        f"{', none before the first resize' if curves.is_identical_before_resize else ''}\n"
        f"every sample seen once: {'yes' if once else 'NO'}\n"
        f"goodput of the run with {len(curves.faults)} faults: {format_goodput(run.goodput)}\n"
        f"both runs and the installation took {format_duration(seconds)}\n"
        f"picture: {session.out / 'loss.png'}   report: {session.out / 'report.json'}"
    )
    problems = {
        "The job did not complete.": not completed,
        "A sample was not seen exactly once.": not once,
    }
    return Outcome((fault_table(curves.faults),), text, tuple(problem for problem, holds in problems.items() if holds))


if __name__ == "__main__":
    typer.run(demo)
