"""HLAT's rules of a stable run, as pure functions: spikes of the gradient norm, and the alarm about the loss.

A spike (arXiv 2404.10630, section 4): the norm is above r + 0.1, where r is the mean of the 20 steps before, whatever
they were; it lasts until the norm is at or below that bound again. Alarm: the loss is above three times the lowest so
far. Invariants: the state is a value that follows from the steps alone, so a resumed run judges as if it had not been
interrupted; a step whose loss or norm is not finite is not judged and changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Bounds; the defaults are HLAT's."""

    window: int = 20
    """Steps of the mean; before there are as many, nothing is a spike."""
    margin: float = 0.1
    told_after: int = 10
    """Steps that a spike must last to be worth an event."""
    alarm_ratio: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """What is known after a step."""

    norms: tuple[float, ...] = ()
    """Gradient norms of the newest steps, at most a window, newest last."""
    spikes: int = 0
    """Spikes that have begun since the first step of the run."""
    spike_steps: int = 0
    """Steps that the present spike has lasted; 0 when there is none."""
    lowest_loss: float = math.inf
    alarm: bool = False
    """The loss was above the bound since it was lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one step changed."""

    after: Stability
    bound: float = math.inf
    """Gradient norm above which this step is in a spike."""
    spike_ended_after: int = 0
    """Steps that the spike lasted which this step ended; 0 when it ended none."""
    spike_told: bool = False
    """The spike has now lasted long enough to be told; true once per spike."""
    alarm_raised: bool = False
    """True once for each time that the loss leaves its lowest too far behind."""


def judge(before: Stability, rules: Rules, *, loss: float, gradient_norm: float) -> Judgement:
    """The next step's verdict; `loss` is the mean of a token, `gradient_norm` that before clipping."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        return Judgement(after=before)
    full = len(before.norms) >= rules.window
    bound = math.fsum(before.norms[-rules.window :]) / rules.window + rules.margin if full else math.inf
    above = gradient_norm > bound
    raised = not before.alarm and loss > rules.alarm_ratio * before.lowest_loss
    after = replace(
        before,
        norms=(*before.norms, gradient_norm)[-rules.window :],
        spikes=before.spikes + (above and before.spike_steps == 0),
        spike_steps=before.spike_steps + 1 if above else 0,
        lowest_loss=min(before.lowest_loss, loss),
        alarm=raised or (before.alarm and loss >= before.lowest_loss),
    )
    return Judgement(
        after=after,
        bound=bound,
        spike_ended_after=0 if above else before.spike_steps,
        spike_told=after.spike_steps == rules.told_after,
        alarm_raised=raised,
    )
