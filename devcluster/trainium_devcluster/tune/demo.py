"""Run the second demo: install, tune through faults, tune without faults, compare."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_devcluster.demos.curves import Curves
from trainium_devcluster.demos.jobs import WAIT_SECONDS, Demo
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.jobs.metrics import every_sample_once_an_epoch
from trainium_devcluster.tune.report import Evaluation, Figure, TuneResult

if TYPE_CHECKING:
    from trainium_devcluster.cluster import Cluster
    from trainium_devcluster.demos.jobs import Run
    from trainium_devcluster.demos.view import View

_JOB = Path(__file__).with_name("job.yaml")
_EVALUATION = "evaluation.json"


class TuneDemo(Demo):
    """A demo that trains, merges and evaluates an adapter in one job."""

    command = "make tune"

    def __init__(self, cluster: Cluster, view: View, repository: Path, out: Path, *, dpo: bool = False) -> None:
        """With `dpo`, train on pairs of answers, and measure the rewards of held-out pairs."""
        super().__init__(cluster, view, repository, out)
        self.dpo = dpo

    @property
    def material(self) -> Path:
        """The folder that the job mounts."""
        return self.out / "material"

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Return the job with the inputs of the demo."""
        job = self.read_job(_JOB, name)
        (volume,) = job["spec"]["workers"]["template"]["spec"]["volumes"]
        volume["hostPath"]["path"] = str(self.material)
        return with_pairs(job) if self.dpo else job

    def run_with_faults(self) -> Run:
        """Run the job with all faults."""
        run = self.run(self.create_manifest("tune"))
        self.until(run, lambda: run.log.newest >= 1, "the first step", seconds=WAIT_SECONDS * 2)
        self.until(run, lambda: run.steps > 0, "the number of steps")
        self.view.log(f"the first step is done, of {run.steps}")
        fault_steps = [round(run.steps * share) for share in (0.15, 0.35, 0.7)]
        self.kill_process_and_node(run, fault_steps[0], fault_steps[1])
        self.until_step(run, fault_steps[2])
        self.resize(run, 2)
        self.until(run, lambda: run.log.newest >= run.steps, "the last step")
        self.view.log("all steps are done; adapter and merged model are written, then measured beside the base")
        self.until(run, lambda: run.finished, "the end", seconds=WAIT_SECONDS * 2)
        self.view.log("the job is complete")
        return run

    def run_and_compare(self, started: float) -> TuneResult:
        """Run all parts and compare; `started` is the start of the demo in monotonic seconds."""
        self.install()
        run = self.run_with_faults()
        training = {"artifacts": {"kinds": []}, "evaluate": {"enabled": False}}
        reference = self.run_undisturbed(3, WAIT_SECONDS * 3, **training)
        steps = run.log.newest
        return TuneResult(
            completed=run.status.get("phase") == "Completed",
            curves=Curves(steps, run.log.losses(), reference.log.losses(), tuple(self.faults)),
            saw_every_sample_once=every_sample_once_an_epoch(
                run.folder, steps, run.global_batch, int(run.trainer["epochs"])
            ),
            evaluation=self._rewards(run) if self.dpo else Evaluation.from_json(self._evaluation(run)),
            model=_artifact(run, "Model"),
            adapter=_artifact(run, "Adapter"),
            goodput=run.goodput,
            seconds=time.monotonic() - started,
        )

    def _rewards(self, run: Run) -> Evaluation:
        """Return the rewards of held-out pairs; before the first step they are zero, and their order is random."""
        record = run.log.steps[run.log.newest]
        accuracy, margin = (float(record[f"validationReward{name}"]) for name in ("Accuracy", "Margin"))
        figures = Figure("rewardAccuracy", 0.5, accuracy), Figure("rewardMargin", 0.0, margin)
        return Evaluation(int(run.trainer["data"]["validation"]["samples"]), figures, ())

    def _evaluation(self, run: Run) -> dict[str, Any]:
        files = sorted(run.folder.rglob(_EVALUATION))
        if not files:
            raise ClusterError(f"The job {run.name} left no {_EVALUATION} below {run.folder}.")
        evaluation: dict[str, Any] = json.loads(files[-1].read_text())
        return evaluation


def with_pairs(job: dict[str, Any]) -> dict[str, Any]:
    """Return the job with direct preference optimization instead of examples."""
    job = copy.deepcopy(job)
    trainer = job["spec"]["trainer"]
    trainer["tuning"]["objective"] = {"kind": "DPO", "beta": 0.1}
    trainer["data"] |= {"source": "/material/pairs.jsonl", "format": "Preference", "examples": {"tooLong": "CutLeft"}}
    trainer["data"]["validation"]["source"] = "/material/held-out-pairs.jsonl"
    trainer["optimizer"]["learningRate"] = 1.0e-3
    trainer["evaluate"] = {"enabled": False}
    return job


def _artifact(run: Run, kind: str) -> Path:
    """Return the folder on this machine of an artifact in the status."""
    for artifact in run.status.get("artifacts") or ():
        if artifact["kind"] == kind:
            exec_in_worker = Path(artifact["path"])
            mounted = [
                run.folder.joinpath(*exec_in_worker.parts[start:]) for start in range(1, len(exec_in_worker.parts))
            ]
            for folder in mounted:
                if folder.is_dir():
                    return folder
    raise ClusterError(f"The status of job {run.name} names no artifact {kind} that is below {run.folder}.")
