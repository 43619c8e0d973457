"""Tune a base model through faults in one job, which merges the adapter and measures it beside the base."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium_devcluster.demos.frame import WAIT_SECONDS, Demo, DemoJob
from trainium_devcluster.errors import ClusterError
from trainium_devcluster.jobs.metrics import has_every_sample_once_an_epoch
from trainium_devcluster.tune import report
from trainium_devcluster.tune.report import Evaluation, Figure

if TYPE_CHECKING:
    from trainium_devcluster.demos.curves import Curves
    from trainium_devcluster.demos.session import Outcome

_JOB = Path(__file__).with_name("job.yaml")
_EVALUATION = "evaluation.json"


class TuneDemo(Demo):
    """A demo that trains an adapter on examples."""

    samples_sentence = "every sample seen once an epoch"
    reference_trainer = {"artifacts": {"kinds": []}, "evaluate": {"enabled": False}}  # noqa: RUF012 - never changed

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Return the job with the inputs of the demo."""
        job = self.read_job(_JOB, name)
        (volume,) = job["spec"]["workers"]["template"]["spec"]["volumes"]
        volume["hostPath"]["path"] = str(self.out / "material")
        return job

    def inject_faults(self, run: DemoJob) -> None:
        """Kill a process, power a node off, and resize the job."""
        self.inject_at_shares(
            run, {0.15: self.kill_process, 0.35: self.lose_node_and_wait_for_spare, 0.7: partial(self.resize, size=2)}
        )
        run.wait_for_step(run.steps, WAIT_SECONDS)
        self.view.log("all steps are done; adapter and merged model are written, then measured beside the base")

    def check_samples(self, run: DemoJob, reference: DemoJob) -> bool:  # noqa: ARG002 - as the base class
        """Return whether each epoch used every sample exactly once."""
        return has_every_sample_once_an_epoch(
            run.folder, run.read_newest_step(), run.global_batch, int(run.trainer["epochs"])
        )

    def evaluate(self, run: DemoJob) -> Evaluation:
        """Read the answers and figures of base and tuned model."""
        files = sorted(run.folder.rglob(_EVALUATION))
        if not files:
            raise ClusterError(f"The job {run.name} left no {_EVALUATION} below {run.folder}.")
        return Evaluation.from_json(json.loads(files[-1].read_text()))

    def conclude(self, run: DemoJob, curves: Curves, outcome: Outcome) -> None:
        """Add figures and answers before and after, the artifacts, and the picture."""
        evaluation = self.evaluate(run)
        outcome.tables += [report.build_answer_table(evaluation)] if evaluation.answers else []
        outcome.tables.append(report.format_figures(evaluation))
        better = evaluation.is_clearly_better
        outcome.expect("The tuned model is not clearly better on held-out examples.", better)
        folders = {kind.lower(): str(find_artifact(run, kind)) for kind in ("Model", "Adapter")}
        outcome.report |= {**evaluation.to_json(), "clearlyBetter": better, **folders}
        report.draw_picture(curves, evaluation, self.out / "tune.png")
        outcome.lines.append(f"merged model: {folders['model']}   adapter: {folders['adapter']}")
        outcome.lines.append(f"picture: {self.out / 'tune.png'}")


class PairsDemo(TuneDemo):
    """A demo that trains an adapter on pairs of answers, and measures the rewards of held-out pairs."""

    def create_manifest(self, name: str) -> dict[str, Any]:
        """Return the job with direct preference optimization."""
        return use_pairs(super().create_manifest(name))

    def evaluate(self, run: DemoJob) -> Evaluation:
        """Return the rewards of held-out pairs; before the first step they are zero, and their order is random."""
        record = run.log.steps[run.log.newest]
        accuracy, margin = (float(record[f"validationReward{name}"]) for name in ("Accuracy", "Margin"))
        figures = Figure("rewardAccuracy", 0.5, accuracy), Figure("rewardMargin", 0.0, margin)
        return Evaluation(int(run.trainer["data"]["validation"]["samples"]), figures, ())


def use_pairs(job: dict[str, Any]) -> dict[str, Any]:
    """Return the job with direct preference optimization instead of examples."""
    job = copy.deepcopy(job)
    trainer = job["spec"]["trainer"]
    trainer["tuning"]["objective"] = {"kind": "DPO", "beta": 0.1}
    trainer["data"] |= {"source": "/material/pairs.jsonl", "format": "Preference", "examples": {"tooLong": "CutLeft"}}
    trainer["data"]["validation"]["source"] = "/material/held-out-pairs.jsonl"
    trainer["optimizer"]["learningRate"] = 1.0e-3
    trainer["evaluate"] = {"enabled": False}
    return job


def find_artifact(run: DemoJob, kind: str) -> Path:
    """Return the folder on this machine of an artifact in the status; raises ClusterError if there is none."""
    for artifact in run.current.get("artifacts") or ():
        if artifact["kind"] == kind:
            parts = Path(artifact["path"]).parts
            for folder in (run.folder.joinpath(*parts[start:]) for start in range(1, len(parts))):
                if folder.is_dir():
                    return folder
    raise ClusterError(f"The status of job {run.name} names no artifact {kind} that is below {run.folder}.")
