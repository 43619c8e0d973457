"""Judge whether a run is stable: spikes of the gradient norm, and the alarm about a risen loss.

A spike (HLAT, arXiv 2404.10630, section 4): the norm is above r + 0.1, where r is the mean of the 20 steps before,
whatever they were; it lasts until the norm is at or below that bound again. At small batches ordinary noise passes this
bound in every fifth step, so a spike is counted only when a norm of it rises above r by more than three times the
greatest rise of the 20 steps, or when it is reported. One is reported only when, after 10 steps of it or later, each of
the newest 10 norms is above each of the 20 before them, and the median of their losses is not below that of the 10
losses before. Of 30 norms that
differ by chance alone the newest 10 are the highest once in C(30, 10) = 30,045,015 times: the bound of false reports,
per step.

The alarm: the level of the loss, which is the median of the newest 100 steps, is above the lowest level so far by three
times the noise, which is the mean difference of two successive losses as it was at that level; and by a twentieth of
that level. What a single step shows decides nothing, and neither does the gradient norm: in ordinary training it grows
tenfold while the loss falls. With losses of any distribution that scatter independently about a level that does not
rise, two medians are so far apart with a probability below 4e-10 per step: for any share p, the distance of quantiles
p and 1 - p is at most the mean difference over 2 p (1 - p), so one of the two medians is outside the quantiles 0.2113
and 0.7887, and 50 of 100 values below the first of them are that rare. A loss that jumps is alarmed about
after 50 to 51 steps.

Guarantees:
- The state is a value that follows from the steps alone, so a resumed run judges as if it had not been interrupted.
- A step whose loss or norm is not finite is not judged and changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

LEVEL_STEPS = 100
"""The number of steps whose median is a level; with fewer steps there is no level and no alarm."""
_NOISE_STEPS = 500
"""The approximate number of steps in the mean difference of losses; all steps until there are as many."""
_LONGEST_COMPARED = 1000
"""A spike of more steps is not noise, whatever its norms are."""
_COUNTED_RATIO = 3.0
"""The rise of a counted spike relative to the greatest one of the steps before it."""
_LEAST_RISE = 0.05
"""The minimum rise relative to the lowest level, so that drifts of the data are no alarm when noise is tiny."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityRules:
    """The bounds of the detectors; those of spikes are HLAT's by default."""

    window: int = 20
    """The number of steps of the mean; with fewer steps nothing is a spike."""
    margin: float = 0.1
    reported_after: int = 10
    """The minimum length in steps of a reported spike."""
    alarm_ratio: float = 3.0
    """Rise of the loss in units of its noise."""

    @property
    def compared(self) -> int:
        """The number of newest steps that are compared with a window before them to report a spike."""
        return min(self.reported_after, self.window)

    @property
    def reach(self) -> int:
        """The number of steps between that window and now: the whole spike, up to a limit."""
        return self.reported_after if self.reported_after <= _LONGEST_COMPARED else self.compared

    @property
    def kept_steps(self) -> int:
        """The number of steps whose losses and norms the state keeps."""
        return max(LEVEL_STEPS, self.window + self.reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """The state of the detectors after a step."""

    losses: tuple[float, ...] = ()
    """The losses of the newest steps, at most `StabilityRules.kept`, newest last."""
    norms: tuple[float, ...] = ()
    """Gradient norms of the same steps."""
    spikes: int = 0
    """Spikes above the noise since the first step of the run."""
    spike_steps: int = 0
    """The length of the current spike; 0 without one."""
    spike_counted: bool = False
    """Whether the current spike has been above the noise."""
    spike_reported: bool = False
    """Whether the current spike has been reported."""
    differences: int = 0
    """The number of pairs of successive losses so far, at most the number in the mean."""
    noise: float = 0.0
    """Mean difference of two successive losses."""
    lowest: float = math.inf
    """Lowest level of the loss so far."""
    lowest_noise: float = 0.0
    """The noise at the lowest level."""
    alarm: bool = False
    """Whether the loss has risen too far and has not come back half of the way."""


METRICS_FIELDS = {
    "spikes": "spikes",
    "spikeSteps": "spike_steps",
    "spikeCounted": "spike_counted",
    "spikeReported": "spike_reported",
    "lossDifferences": "differences",
    "lossNoise": "noise",
    "lowestLoss": "lowest",
    "lowestLossNoise": "lowest_noise",
    "alarm": "alarm",
}
"""Names in metrics.jsonl of what a line holds of the state; losses and norms are those of the lines before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityUpdate:
    """Changes of one step."""

    after: Stability
    bound: float = math.inf
    """Gradient norm above which this step is in a spike."""
    spike_ended_after: int = 0
    """The length of the spike that this step ended; 0 if it ended none."""
    spike_reported: bool = False
    """Whether the spike is long enough to be reported and not noise; true at most once per spike."""
    level: float = math.nan
    """Median of the newest losses; NaN before there are enough."""
    alarm_raised: bool = False
    """Whether the loss has just risen too far; true once per rise."""


def update_stability(before: Stability, rules: StabilityRules, *, loss: float, gradient_norm: float) -> StabilityUpdate:
    """Judge the next step; `loss` is the mean of a token, `gradient_norm` that before clipping."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        return StabilityUpdate(after=before)
    full = len(before.norms) >= rules.window
    newest = before.norms[-rules.window :]
    mean = math.fsum(newest) / rules.window if full else math.inf
    bound = mean + rules.margin
    above = gradient_norm > bound
    after = replace(
        _update_noise(before, loss),
        losses=(*before.losses, loss)[-rules.kept_steps :],
        norms=(*before.norms, gradient_norm)[-rules.kept_steps :],
        spike_steps=before.spike_steps + 1 if above else 0,
    )
    after, level = _update_level(after, rules.alarm_ratio)
    was_reported = before.spike_reported and above
    is_reported = not was_reported and after.spike_steps >= rules.reported_after and _is_outlier(after, rules)
    was_counted = before.spike_counted and above
    rise, before_rise = gradient_norm - mean, max(newest, default=0.0) - mean
    is_counted = was_counted or is_reported or (above and rise > _COUNTED_RATIO * before_rise)
    after = replace(
        after,
        spikes=before.spikes + (is_counted and not was_counted),
        spike_counted=is_counted,
        spike_reported=was_reported or is_reported,
    )
    return StabilityUpdate(
        after=after,
        bound=bound,
        spike_ended_after=0 if above else before.spike_steps,
        spike_reported=is_reported,
        level=level,
        alarm_raised=after.alarm and not before.alarm,
    )


def _update_noise(before: Stability, loss: float) -> Stability:
    if not before.losses:
        return before
    count = min(before.differences + 1, _NOISE_STEPS)
    difference = abs(loss - before.losses[-1])
    return replace(before, differences=count, noise=before.noise + (difference - before.noise) / count)


def _update_level(state: Stability, ratio: float) -> tuple[Stability, float]:
    """Return the state with the lowest level and the alarm updated, and the level."""
    if len(state.losses) < LEVEL_STEPS:
        return state, math.nan
    level = median(state.losses[-LEVEL_STEPS:])
    if level < state.lowest:
        state = replace(state, lowest=level, lowest_noise=state.noise)
    rise = max(ratio * state.lowest_noise, _LEAST_RISE * abs(state.lowest))
    return replace(state, alarm=level - state.lowest > (rise / 2 if state.alarm else rise)), level


def _is_outlier(state: Stability, rules: StabilityRules) -> bool:
    """Return whether each of the newest norms is above all norms before the spike, and the loss has not fallen."""
    newest, ago = rules.compared, rules.reach
    if len(state.norms) < rules.window + ago:
        return False
    norms, losses = state.norms[-rules.window - ago : -ago], state.losses[-newest - ago : -ago]
    higher = rules.reported_after > _LONGEST_COMPARED or min(state.norms[-newest:]) > max(norms)
    return higher and median(state.losses[-newest:]) >= median(losses)
