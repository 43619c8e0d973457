"""The figures of one step, as written to metrics.jsonl and to TensorBoard.

Importing this module is fast.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainium_trainer.monitor.stability import METRICS_FIELDS, Stability

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class Rewards:
    """Figures of preference tuning: means over the pairs of a global batch."""

    chosen: float
    """The reward of the preferred answers."""
    rejected: float
    """The reward of the rejected answers."""
    accuracy: float
    """The fraction of pairs whose preferred answer has the greater reward."""

    @property
    def margin(self) -> float:
        """Mean difference of the two rewards."""
        return self.chosen - self.rejected

    def iterate_figures(self) -> Iterator[tuple[str, float]]:
        """Yield the figures by name."""
        yield from (
            ("chosen", self.chosen),
            ("rejected", self.rejected),
            ("margin", self.margin),
            ("accuracy", self.accuracy),
        )

    @staticmethod
    def of_sums(sums: Sequence[float], pairs: float) -> Rewards | None:
        """Return the means of summed rewards and counts; None without a pair."""
        return Rewards(*(value / pairs for value in sums)) if pairs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The figures of a completed step; None for those that were not measured."""

    step: int
    loss: float
    """Mean of a valid token, or of a pair, of the global batch before the update."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Valid tokens since the beginning of the run."""
    samples: int
    """Samples since the beginning of the run."""
    batch: int
    """Samples of this step."""
    seconds: float | None = None
    """The length of the step; None if all processes ended before they could measure it."""
    tokens_per_second: float | None = None
    """The throughput of the whole job over the newest steps."""
    samples_per_second: float | None = None
    """The same in samples."""
    nodes: int | None = None
    """The number of nodes of the step."""
    utilisation: float | None = None
    """Model FLOPs utilisation (MFU), 0 to 1."""
    parameter_norm: float | None = None
    """Norm of all parameters, after the update."""
    validation_loss: float | None = None
    """Mean of a valid token, or of a pair, of the validation split after the update."""
    rewards: Rewards | None = None
    """Figures of the pairs of the global batch, before the update."""
    validation_rewards: Rewards | None = None
    """Figures of the pairs of the validation split, after the update."""
    of_pairs: bool = False
    """Whether the losses are those of pairs of answers instead of cross-entropies of tokens."""
    productive_seconds: float = 0.0
    """Time in the steps of the history up to this one."""
    time_in_steps: float | None = None
    """Time in the steps of the history over the time since the first step began, 0 to 1."""
    host_bytes: int | None = None
    """Resident memory of rank 0."""
    device_bytes: int | None = None
    """Most device memory of rank 0 so far."""
    resumed: bool = False
    """Whether this is the first step after a restart."""
    stability: Stability = field(default_factory=Stability)

    @property
    def reward_margin(self) -> float | None:
        """The margin of the rewards of the global batch."""
        return None if self.rewards is None else self.rewards.margin

    @property
    def reward_accuracy(self) -> float | None:
        """The accuracy of the rewards of the global batch."""
        return None if self.rewards is None else self.rewards.accuracy

    def to_json(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl."""
        line = {
            "step": self.step,
            "loss": _drop_nonfinite(self.loss),
            "gradNorm": _drop_nonfinite(self.grad_norm),
            "learningRate": self.learning_rate,
            "tokens": self.tokens,
            "samples": self.samples,
            "batch": self.batch,
            "seconds": None if self.seconds is None else round(self.seconds, 6),
            "time": round(time.time(), 6),
            "productiveSeconds": round(self.productive_seconds, 3),
        }
        line |= {name: _drop_nonfinite(getattr(self.stability, field)) for name, field in METRICS_FIELDS.items()}
        measured = ((name, _round_to_float32(value)) for name, _, value in self._list_measured())
        return line | {name: value for name, value in measured if value is not None}

    def list_scalars(self) -> dict[str, float]:
        """Return the values for TensorBoard."""
        values = {
            "train/loss": self.loss,
            "train/gradNorm": self.grad_norm,
            "train/learningRate": self.learning_rate,
            "train/tokens": self.tokens,
            "train/spikes": self.stability.spikes,
            "train/spikeSteps": self.stability.spike_steps,
        }
        values |= {tag: value for _, tag, value in self._list_measured() if tag and value is not None}
        return {tag: float(value) for tag, value in values.items()}

    def _list_measured(self) -> list[tuple[str, str, float | None]]:
        """Return name, TensorBoard's tag (empty: none) and value of each figure that a step may lack."""
        figures: list[tuple[str, str, float | None]] = [
            ("perplexity", "train/perplexity", self._compute_perplexity(self.loss)),
            ("validationLoss", "validation/loss", self.validation_loss),
            ("validationPerplexity", "validation/perplexity", self._compute_perplexity(self.validation_loss)),
            ("parameterNorm", "train/parameterNorm", self.parameter_norm),
            ("tokensPerSecond", "train/tokensPerSecond", self.tokens_per_second),
            ("samplesPerSecond", "train/samplesPerSecond", self.samples_per_second),
            ("nodes", "", self.nodes),
            ("mfu", "train/mfu", self.utilisation),
            ("timeInSteps", "train/timeInSteps", self.time_in_steps),
            ("hostBytes", "train/hostBytes", self.host_bytes),
            ("deviceBytes", "train/deviceBytes", self.device_bytes),
            ("resumed", "", self.resumed or None),
        ]
        for name, tag, rewards in (
            ("reward", "rewards", self.rewards),
            ("validationReward", "validation/rewards", self.validation_rewards),
        ):
            if rewards is not None:
                figures += [
                    (f"{name}{part.title()}", f"{tag}/{part}", value) for part, value in rewards.iterate_figures()
                ]
        return figures

    def _compute_perplexity(self, loss: float | None) -> float | None:
        """Return the perplexity of a loss that is the cross-entropy of tokens; None for one of pairs."""
        return None if self.of_pairs else compute_perplexity(loss)


def compute_perplexity(loss: float | None) -> float | None:
    """Return exp(loss); None without a loss or if the result is not finite."""
    return None if loss is None or not loss < _LARGEST_EXPONENT else math.exp(loss)


def _drop_nonfinite(value: float) -> float | None:
    """Return None for values that are not finite, because JSON has no NaN."""
    return value if math.isfinite(value) else None


def _round_to_float32(value: float | None) -> float | None:
    """Round to seven digits, the precision of float32, to keep lines short."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
