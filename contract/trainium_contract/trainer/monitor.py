"""`trainer.monitor`: records while training, and what is reported as an event. All fields may change while a job runs.

The defaults of the spike rule are HLAT's (arXiv 2404.10630).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from trainium_contract.base import ContractModel


class Tracker(StrEnum):
    """A program that shows a team's runs."""

    MLFLOW = "MLflow"
    WANDB = "WandB"


MAX_PROFILED_STEPS = 20
"""Maximum number of steps in one trace."""
_Step = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Rank = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ProfileConfig(ContractModel):
    """Traces of some steps, for Perfetto."""

    steps: Annotated[tuple[_Step, ...], Field(min_length=2, max_length=2)]
    """First and last recorded step, at most 20. If steps are repeated, the newest trace is kept."""
    ranks: Annotated[tuple[_Rank, ...], Field(min_length=1, max_length=64)] = (0,)
    """Ranks that record; ranks that do not exist at a job's size are ignored."""
    neuron: bool = False
    """On Neuron devices, let the runtime of these ranks capture each graph once and its newest events from the start of
    the process, for Neuron Explorer, instead of steps by torch.profiler: the two conflict."""

    @model_validator(mode="after")
    def _check_steps_and_ranks(self) -> Self:
        first, last = self.steps
        if not first <= last < first + MAX_PROFILED_STEPS:
            raise ValueError(
                f"monitor.profile.steps is [{first}, {last}]: give the first and the last step, at most "
                f"{MAX_PROFILED_STEPS} steps together"
            )
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError("monitor.profile.ranks names a rank twice: name each once")
        return self


class MonitorConfig(ContractModel):
    """Records and alerts of a run."""

    tensorboard: bool = True
    """Write TensorBoard scalars beside metrics.jsonl."""
    record_samples: bool = False
    """Record which samples every step was trained on: each data-parallel rank writes its samples to
    samples-<rank>.jsonl."""
    parameter_norm_steps: Annotated[int, Field(ge=0, le=2**31 - 1)] = 10
    """Steps between measurements of the norm of all parameters; 0: never."""
    spike_window: Annotated[int, Field(ge=2, le=10_000)] = 20
    """Number of preceding steps whose mean gradient norm a step is compared with."""
    spike_margin: Annotated[float, Field(gt=0, le=1_000_000)] = 0.1
    """A gradient norm above that mean plus this is a spike."""
    spike_event_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Steps that a spike must last before it is reported as event LossSpike, if its norms are above all before it and
    the loss does not fall."""
    alarm_ratio: Annotated[float, Field(gt=1, le=1_000_000)] = 3.0
    """The event LossAlarm is reported if the median loss of 100 steps is above the lowest one by this many mean
    differences of successive losses; once, until the loss has recovered half of it."""
    peak_tflops: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Peak of the device of one process, TFLOP/s in bfloat16, for the model FLOPs utilisation (MFU); omitted: that of
    known devices, none for a CPU."""
    profile: ProfileConfig | None = None
    """Steps of which a trace is recorded; omitted: none. `kubectl trn profile` records steps of a running job."""
    trackers: Annotated[tuple[Tracker, ...], Field(max_length=3)] | None = None
    """Trackers that also receive the run. Their addresses and keys are variables in the environment of the workers,
    such as MLFLOW_TRACKING_URI and WANDB_API_KEY."""
    tracker_project: Annotated[str, Field(max_length=128)] = ""
    """Project or experiment of the run in the trackers; omitted: the namespace of the job."""

    @model_validator(mode="after")
    def _check_trackers(self) -> Self:
        if self.trackers and len(set(self.trackers)) < len(self.trackers):
            raise ValueError("monitor.trackers names a tracker twice: name each once")
        return self
