"""The length of a run and of its next step: in steps, or in samples where steps differ.

Guarantees:
- The values are a pure function of configuration, size and position.
- Without a tolerance (`batch.tolerance`) all steps have equal batches, and steps are counted.
- With a tolerance, samples are counted: the run ends at the same sample as without one, and the last step takes the
  remaining samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_trainer.data.batches.samples import count_step_samples

if TYPE_CHECKING:
    from trainium_trainer.checkpoint.interfaces import Position
    from trainium_trainer.configuration.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """The length of a run at one size, from its first sample to its last."""

    batch: int
    """Samples per step at this size."""
    steps: int
    """Length of the run, in steps of the global batch."""
    end: int | None = None
    """Samples of the whole run; None where steps are counted."""

    @staticmethod
    def of(settings: Settings, epoch_samples: int | None = None) -> RunLength:
        """Return the length of a run whose number of steps is known; an epoch has `epoch_samples` samples."""
        config, end = settings.config, None
        if config.batch.tolerance:
            counted = config.epochs and epoch_samples
            end = math.ceil(config.epochs * counted) if counted else config.steps * config.batch.global_size
        return RunLength(batch=settings.batch, steps=config.steps, end=end)

    def compute_next_batch(self, samples: int) -> int:
        """Return the number of samples of the step that begins at a global position."""
        return count_step_samples(samples, self.batch, self.end)

    def is_over(self, position: Position) -> bool:
        """Return whether the run has no step left."""
        return position.step >= self.steps if self.end is None else position.samples >= self.end

    def count_completed_steps(self, position: Position) -> float:
        """Return the completed steps, out of `steps`, as a fraction where samples are counted; for the schedule."""
        return position.step if self.end is None else position.samples * self.steps / self.end

    def count_total_steps(self, position: Position) -> int:
        """Return the steps of the whole run if it continues at this size."""
        if self.end is None:
            return self.steps
        remaining = max(0, self.end - position.samples)
        return position.step + -(-remaining // self.batch)
