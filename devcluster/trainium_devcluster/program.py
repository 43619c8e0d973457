"""Run a program that was written for torchrun through faults on a development cluster (`make program`).

The program is `manifests/examples/train_ddp.py`, which knows nothing of a TrainingJob; its curve is compared with that
of an undisturbed run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainium_devcluster.demos.curves import Curves, fault_table
from trainium_devcluster.demos.frame import REPOSITORY, cluster, console, empty_folder, usage_of
from trainium_devcluster.demos.jobs import NAMESPACE, WAIT_SECONDS, Demo, Run
from trainium_devcluster.demos.view import View
from trainium_devcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXAMPLES = REPOSITORY / "manifests" / "examples"
_FOLDER = "/checkpoints/run"
"""Where the example has its checkpoints."""


class ProgramDemo(Demo):
    """A program of a user."""

    command = "make program"

    def install(self) -> None:
        """Install the operator, and create the ConfigMap that holds the program."""
        super().install()
        source = f"--from-file={_EXAMPLES / 'train_ddp.py'}"
        self.cluster.kubectl("create", "configmap", "train-ddp", source, "-n", NAMESPACE)
        self.view.log("kubectl create configmap train-ddp --from-file=train_ddp.py")

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Read the example job; each run has a folder."""
        job = self.read_job(_EXAMPLES / "program.yaml", name)
        del job["spec"]["checkpoint"]["storage"]["subPath"]
        program, folder = job["spec"]["program"], f"/checkpoints/{name}"
        program["args"] = [folder if each == _FOLDER else each for each in program["args"]]
        program["checkpoints"]["path"] = folder
        return job

    def trainer_of(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the steps, which only the program knows."""
        arguments = job["spec"]["program"]["args"]
        return {"steps": int(arguments[arguments.index("--steps") + 1])}

    def find_process(self, pod: str) -> int:
        """Return the pid of the program in the worker."""
        return int(self.inside(pod, "pgrep", "-f", "/src/train_ddp.py").split()[0])

    def run_with_faults(self) -> tuple[Run, dict[str, Any]]:
        """Run the job with all faults; return it with its last status."""
        with self.run(self.create_manifest("program")) as run:
            self.until(run, "the first step", lambda: run.log.newest >= 1, seconds=WAIT_SECONDS * 2)
            self.view.log("the first step is done")
            self.kill_process_and_node(run, round(run.steps * 0.1), round(run.steps * 0.35))
            self.until_step(run, round(run.steps * 0.65))
            self.resize(run, 2)
            self.until(run, "the end", lambda: run.finished)
            run.log.refresh()
            self.view.log("the job is complete")
            return run, run.watch.status

    def run_undisturbed(self) -> Run:
        """Run the same program without faults."""
        job = self.create_manifest("reference")
        job["spec"]["workers"] |= {"spares": 0, "minReplicas": 3}
        with self.run(job) as run:
            self.until(run, "the end", lambda: run.finished, seconds=WAIT_SECONDS * 2)
            run.log.refresh()
            self.view.log("the undisturbed run is complete")
            return run


def program(
    *,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the cluster and print how to use it.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of the report and the run's files.")] = Path("out/program"),
    name: Annotated[str | None, typer.Option("--name", help="Name of the cluster; by default a free one.")] = None,
) -> None:
    """Run a program that was written for torchrun on a real control plane, through real faults."""
    screen, out, began = console(), empty_folder(out), time.monotonic()
    try:
        with View(screen) as view, cluster(view, name or ("program" if keep else None), keep=keep) as started:
            demo = ProgramDemo(started, view, REPOSITORY, out)
            demo.install()
            run, status = demo.run_with_faults()
            reference = demo.run_undisturbed()
    except ClusterError as error:
        screen.print(f"program: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    curves = Curves(run.steps, run.log.losses(), reference.log.losses(), tuple(demo.faults))
    completed, goodput = status.get("phase") == "Completed", (status.get("goodput") or {}).get("ratio", 0.0)
    seconds = round(time.monotonic() - began, 1)
    report = {"completed": completed, **curves.to_json(), "goodput": goodput, "seconds": seconds}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    screen.print(fault_table(curves.faults))
    screen.print(
        f"loss after {curves.steps} steps: {curves.loss[curves.steps]:.6f} with faults, "
        f"{curves.reference[curves.steps]:.6f} undisturbed; largest relative difference {curves.max_difference:.1e}"
        f"{', none before the resize' if curves.identical_before_resize else ''}\n"
        f"goodput {goodput:.1%}; {seconds:.0f} s in all   report: {out / 'report.json'}",
        highlight=False,
        soft_wrap=True,
    )
    if keep:
        screen.print(usage_of(started.name), highlight=False, soft_wrap=True)
    if not (completed and curves.same):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(program)
