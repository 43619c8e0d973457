"""Run a script of TRL through faults on a development cluster, with the line that makes it elastic (`make program`).

The script is `manifests/examples/sft.py`. The demo compares its losses and samples with those of an undisturbed run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainium_contract.pages.facts import format_goodput
from trainium_contract.pages.formatting import format_duration
from trainium_devcluster.demos.curves import Curves, fault_table
from trainium_devcluster.demos.jobs import NAMESPACE, WAIT_SECONDS, Demo, Run
from trainium_devcluster.demos.ledger import read_ledger
from trainium_devcluster.demos.session import REPOSITORY, DemoSession, Keep, Name, Out, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXAMPLES = REPOSITORY / "manifests" / "examples"
_RECORDER = Path(__file__).parent / "demos" / "recorded_sft.py"
_FOLDER = "/checkpoints/run"
"""The output folder of the example."""
_STEPS_BETWEEN = 10
"""Steps between a recovery and the next fault."""


class ProgramDemo(Demo):
    """A demo that runs a user's program."""

    command = "make program"

    def install(self) -> None:
        """Install the operator; create the model, the data set, and the ConfigMap with the program."""
        super().install()
        subprocess.run(
            [sys.executable, str(_RECORDER), "create", str(self.out / "checkpoints")], check=True, capture_output=True
        )
        sources = [f"--from-file={path}" for path in (_EXAMPLES / "sft.py", _RECORDER)]
        self.cluster.kubectl("create", "configmap", "sft", *sources, "-n", NAMESPACE)
        self.view.log("kubectl create configmap sft --from-file=sft.py")

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Read the example job; each run has a separate folder, and records its samples."""
        job = self.read_job(_EXAMPLES / "program.yaml", name)
        del job["spec"]["checkpoint"]["storage"]["subPath"]
        program, folder = job["spec"]["program"], f"/checkpoints/{name}"
        program["command"] = ["python", f"/src/{_RECORDER.name}"]
        program["args"] = [folder if argument == _FOLDER else argument for argument in program["args"]]
        program["checkpoints"]["path"] = folder
        return job

    def trainer_settings(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the epochs of the program and its batch."""
        program = job["spec"]["program"]
        arguments = program["args"]
        return {"epochs": int(arguments[arguments.index("--num_train_epochs") + 1]), "batch": program["batch"]}

    def run_with_faults(self) -> Run:
        """Run the job with three faults and two resizes in its second epoch."""
        run = self.run(self.create_manifest("program"))
        self.until(run, lambda: run.log.newest >= 1, "the first step", seconds=WAIT_SECONDS * 2)
        self.view.log("the first step is done")
        self.until(run, lambda: run.steps > 0, "the number of steps")
        self.until_step(run, run.steps // run.trainer["epochs"] + _STEPS_BETWEEN)
        self.kill_process(run)
        self.until_step(run, run.log.newest + _STEPS_BETWEEN)
        self.cluster.faults.start_node(self.power_off_node(run))
        self.until_step(run, run.log.newest + _STEPS_BETWEEN)
        self.kill_process(run)
        for size in (1, 2):
            self.until_step(run, run.log.newest + _STEPS_BETWEEN)
            self.resize(run, size)
        self.until(run, lambda: run.finished, "the end")
        run.log.refresh()
        self.view.log("the job is complete")
        return run


def program(*, keep: Keep = False, out: Out = Path("out/program"), name: Name = None) -> None:
    """Run an elastic trainer of TRL on a real control plane, through real faults."""
    DemoSession("program", out, name, keep=keep).show(_compare)


def _compare(session: DemoSession) -> Outcome:
    started = time.monotonic()
    with session.cluster() as cluster:
        demo = ProgramDemo(cluster, session.view, REPOSITORY, session.out)
        demo.install()
        run = demo.run_with_faults()
        reference = demo.run_undisturbed(2, WAIT_SECONDS * 2)
    curves = Curves(run.steps, run.log.losses(), reference.log.losses(), tuple(demo.faults))
    completed = run.status.get("phase") == "Completed"
    once = read_ledger(run.folder).samples_by_step() == read_ledger(reference.folder).samples_by_step()
    seconds = round(time.monotonic() - started, 1)
    report = {"completed": completed, **curves.to_json(), "everySampleOnce": once, "goodput": run.goodput.ratio}
    report |= {"wallSeconds": run.goodput.wall_seconds, "seconds": seconds, "history": run.history()}
    (session.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    text = (
        f"loss after {curves.steps} steps: {curves.loss[curves.steps]:.6f} with faults, "
        f"{curves.reference[curves.steps]:.6f} undisturbed; largest relative difference {curves.max_difference:.1e}"
        f"{', none before the resize' if curves.is_identical_before_resize else ''}\n"
        f"each step with the samples of the undisturbed run: {'yes' if once else 'NO'}\n"
        f"goodput of the run with {len(curves.faults)} faults: {format_goodput(run.goodput)}\n"
        f"both runs and the installation took {format_duration(seconds)}   report: {session.out / 'report.json'}"
    )
    problems = {
        "The job did not complete.": not completed,
        "The curve with faults is not the undisturbed one.": not curves.is_identical,
        "A step had other samples than in the undisturbed run.": not once,
    }
    return Outcome((fault_table(curves.faults),), text, tuple(problem for problem, holds in problems.items() if holds))


if __name__ == "__main__":
    typer.run(program)
