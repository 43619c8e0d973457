"""Run a script of TRL through faults on a development cluster, with the line that makes it elastic (`make program`).

The script is `manifests/examples/sft.py`. The demo compares its losses and samples with those of an undisturbed run.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainium_devcluster.demos.frame import Demo, DemoJob, run_demo
from trainium_devcluster.demos.session import NAMESPACE, REPOSITORY, DemoSession, Keep, Name, Out
from trainium_devcluster.jobs.ledger import read_ledger

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXAMPLES = REPOSITORY / "manifests" / "examples"
_RECORDER = Path(__file__).parent / "demos" / "recorded_program.py"
_FOLDER = "/checkpoints/run"
"""The output folder of the example."""
_STEPS_BETWEEN = 10
"""Steps between a recovery and the next fault."""


class ProgramDemo(Demo):
    """A demo that runs a user's program."""

    samples_sentence = "each step with the samples of the undisturbed run"

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
        program["command"] = ["python", f"/src/{_RECORDER.name}", "sft.py"]
        program["args"] = [folder if argument == _FOLDER else argument for argument in program["args"]]
        program["checkpoints"]["path"] = folder
        return job

    def create_trainer_settings(self, job: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the epochs of the program and its batch."""
        program = job["spec"]["program"]
        arguments = program["args"]
        return {"epochs": int(arguments[arguments.index("--num_train_epochs") + 1]), "batch": program["batch"]}

    def inject_faults(self, run: DemoJob) -> None:
        """Kill a process twice, power a node off, and resize the job twice, in the second epoch."""
        run.wait_for_step(run.steps // run.trainer["epochs"] + _STEPS_BETWEEN)
        resizes = (partial(self.resize, size=size) for size in (1, 2))
        self.inject_in_turn(run, _STEPS_BETWEEN, self.kill_process, self.lose_node, self.kill_process, *resizes)

    def check_samples(self, run: DemoJob, reference: DemoJob) -> bool:
        """Return whether each step had the same samples in both runs."""
        return read_ledger(run.folder).group_samples_by_step() == read_ledger(reference.folder).group_samples_by_step()


def program(*, keep: Keep = False, out: Out = Path("out/program"), name: Name = None) -> None:
    """Run an elastic trainer of TRL on a real control plane, through real faults."""
    DemoSession("program", out, name, keep=keep).show(lambda session: run_demo(session, ProgramDemo))


if __name__ == "__main__":
    typer.run(program)
