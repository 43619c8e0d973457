"""Jobs as the operator reads them, with defaults for what a test does not set."""

from dataclasses import replace
from typing import Any

from trainium_contract.job import TrainingJobSpec, TrainingJobStatus
from trainium_operator.plan.model.observed import JobView


def job_spec(**changes: Any) -> TrainingJobSpec:
    """Return a CPU job of 4 workers and no spare whose batch divides evenly at sizes 1 to 4, 6, 8, 12 and 24."""
    workers = {"replicas": 4, "accelerator": {"device": "cpu"}, **changes.pop("workers", {})}
    changed = changes.pop("trainer", {})
    length = {} if "epochs" in changed else {"steps": 100}
    trainer = {"batch": {"globalSize": 24}, **length, **changed}
    return TrainingJobSpec.model_validate({"workers": workers, "trainer": trainer, **changes})


def job_view(spec: TrainingJobSpec | None = None, status: TrainingJobStatus | None = None, **changes: Any) -> JobView:
    """Return the job `default/demo`."""
    view = JobView(
        namespace="default",
        name="demo",
        uid="job-uid",
        generation=1,
        deleting=False,
        spec=spec or job_spec(),
        status=status or TrainingJobStatus(),
        created=0.0,
    )
    return replace(view, **changes)
