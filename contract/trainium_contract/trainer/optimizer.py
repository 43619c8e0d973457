"""`trainer.optimizer` and `trainer.schedule`: AdamW, clipping, and the learning rate of every step."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainium_contract.base import ContractModel, derived


class WeightDecayScope(StrEnum):
    """Which parameters decay."""

    ALL = "All"
    """All of them, as HLAT trained."""
    MATRICES = "Matrices"
    """Those of two dimensions: projections and embeddings, but neither norms nor biases."""


class OptimizerKind(StrEnum):
    """Rule that computes an update from a gradient."""

    ADAMW = "AdamW"
    """AdamW (arXiv 1711.05101)."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the values of each weight's size that the optimizer keeps, by their names in checkpoints."""
        return _MOMENTS[self]


_MOMENTS = {OptimizerKind.ADAMW: ("expAvg", "expAvgSq")}


class OptimizerConfig(ContractModel):
    """The optimizer and gradient clipping."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    """`AdamW`."""

    learning_rate: Annotated[float, Field(gt=0, le=1)] = 3e-4
    """Peak learning rate, per step."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment, per step."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment, per step."""
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Decoupled decay: in a step a weight loses this share of itself times the learning rate."""
    decay_scope: WeightDecayScope = WeightDecayScope.ALL
    """Which parameters decay: `All` as in HLAT, or `Matrices` to spare norms and biases."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Bound of the global L2 norm of the gradient of the mean loss of a valid token."""


class ScheduleKind(StrEnum):
    """Course of the learning rate after the warm-up."""

    COSINE = "Cosine"
    """Half a cosine down to the floor."""
    LINEAR = "Linear"
    """A straight line down to the floor."""
    CONSTANT = "Constant"
    """Stays at the peak."""
    WARMUP_STABLE_DECAY = "WarmupStableDecay"
    """Stays at the peak, then falls in a straight line to the floor during the last decaySteps."""


class ScheduleConfig(ContractModel):
    """Linear warm-up, then one of four courses."""

    kind: ScheduleKind = ScheduleKind.COSINE
    """`Cosine`, `Linear`, `Constant` or `WarmupStableDecay`."""
    warmup_steps: int = derived(10, ge=0)
    """Steps of linear warm-up from 0 to the peak; not above trainer.steps. Omitted: 10, or as many as the run and
    decaySteps leave."""
    warmup_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """The warm-up as a share of all steps, rounded up, in place of warmupSteps."""
    decay_steps: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Steps from the peak to the floor; with warmupSteps not above trainer.steps. `Cosine` and `Linear` start right
    after the warm-up and stay at the floor afterwards; omitted: until the last step. `WarmupStableDecay` ends with
    the last step; omitted: a tenth of trainer.steps, at least 1."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The floor, as a fraction of the peak."""

    def fitted(self, steps: int) -> ScheduleConfig:
        """Return the schedule of a run of this many steps: a warm-up that was not given is shortened to fit."""
        if "warmup_steps" in self.model_fields_set:
            return self
        return self.replaced(warmup_steps=min(self.warmup_steps, max(0, steps - (self.decay_steps or 0))))
