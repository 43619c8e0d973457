"""Run a program that was written for torchrun through faults on a development cluster (`make program`).

The program is `manifests/examples/train_ddp.py`, which does not know of TrainingJobs. The demo compares its loss curve
with that of an undisturbed run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainium_contract.pages.facts import format_goodput
from trainium_contract.pages.formatting import format_duration
from trainium_devcluster.demos.curves import Curves, fault_table
from trainium_devcluster.demos.jobs import NAMESPACE, WAIT_SECONDS, Demo, Run
from trainium_devcluster.demos.session import REPOSITORY, DemoSession, Keep, Name, Out, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXAMPLES = REPOSITORY / "manifests" / "examples"
_FOLDER = "/checkpoints/run"
"""The checkpoint folder of the example."""


class ProgramDemo(Demo):
    """A demo that runs a user's program."""

    command = "make program"

    def install(self) -> None:
        """Install the operator, and create the ConfigMap with the program."""
        super().install()
        source = f"--from-file={_EXAMPLES / 'train_ddp.py'}"
        self.cluster.kubectl("create", "configmap", "train-ddp", source, "-n", NAMESPACE)
        self.view.log("kubectl create configmap train-ddp --from-file=train_ddp.py")

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Read the example job; each run has a separate folder."""
        job = self.read_job(_EXAMPLES / "program.yaml", name)
        del job["spec"]["checkpoint"]["storage"]["subPath"]
        program, folder = job["spec"]["program"], f"/checkpoints/{name}"
        program["args"] = [folder if argument == _FOLDER else argument for argument in program["args"]]
        program["checkpoints"]["path"] = folder
        return job

    def trainer_settings(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the steps, which only the program knows."""
        arguments = job["spec"]["program"]["args"]
        return {"steps": int(arguments[arguments.index("--steps") + 1])}

    def find_process(self, pod: str) -> int:
        """Return the pid of the program in the worker."""
        return int(self.exec_in_worker(pod, "pgrep", "-f", "/src/train_ddp.py").split()[0])

    def run_with_faults(self) -> Run:
        """Run the job with all faults."""
        run = self.run(self.create_manifest("program"))
        self.until(run, lambda: run.log.newest >= 1, "the first step", seconds=WAIT_SECONDS * 2)
        self.view.log("the first step is done")
        self.kill_process_and_node(run, round(run.steps * 0.1), round(run.steps * 0.35))
        self.until_step(run, round(run.steps * 0.65))
        self.resize(run, 2)
        self.until(run, lambda: run.finished, "the end")
        run.log.refresh()
        self.view.log("the job is complete")
        return run


def program(*, keep: Keep = False, out: Out = Path("out/program"), name: Name = None) -> None:
    """Run a program that was written for torchrun on a real control plane, through real faults."""
    DemoSession("program", out, name, keep=keep).show(_compare)


def _compare(session: DemoSession) -> Outcome:
    started = time.monotonic()
    with session.cluster() as cluster:
        demo = ProgramDemo(cluster, session.view, REPOSITORY, session.out)
        demo.install()
        run = demo.run_with_faults()
        reference = demo.run_undisturbed(3, WAIT_SECONDS * 2)
    curves = Curves(run.steps, run.log.losses(), reference.log.losses(), tuple(demo.faults))
    completed = run.status.get("phase") == "Completed"
    seconds = round(time.monotonic() - started, 1)
    report = {"completed": completed, **curves.to_json(), "goodput": run.goodput.ratio}
    report |= {"wallSeconds": run.goodput.wall_seconds, "seconds": seconds}
    (session.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    text = (
        f"loss after {curves.steps} steps: {curves.loss[curves.steps]:.6f} with faults, "
        f"{curves.reference[curves.steps]:.6f} undisturbed; largest relative difference {curves.max_difference:.1e}"
        f"{', none before the resize' if curves.is_identical_before_resize else ''}\n"
        f"goodput of the run with {len(curves.faults)} faults: {format_goodput(run.goodput)}\n"
        f"both runs and the installation took {format_duration(seconds)}   report: {session.out / 'report.json'}"
    )
    problems = {
        "The job did not complete.": not completed,
        # In the first step after a start DDP uses other gradient buckets, which sum in another order.
        "The curve with faults is not the undisturbed one.": not curves.is_equal_within_rounding,
    }
    return Outcome((fault_table(curves.faults),), text, tuple(problem for problem, holds in problems.items() if holds))


if __name__ == "__main__":
    typer.run(program)
