"""HLAT's rules of a stable run, as pure functions: spikes of the gradient norm, and the alarm about its growth.

A spike (arXiv 2404.10630, section 4): the norm is above r + 0.1, where r is the mean of the 20 steps before, whatever
they were; it lasts until the norm is at or below that bound again. It is told only when the loss does not fall in it:
in the first steps of a run the norm rises with the learning rate, and all is well. Alarm: the norm is above three times
its lowest, long before a loss that diverges is as far from its own; it lasts until no norm of the newest 20 steps is.

Invariants: the state is a value that follows from the steps alone, so a resumed run judges as if it had not been
interrupted; a step whose loss or norm is not finite is not judged and changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Bounds; the defaults are HLAT's."""

    window: int = 20
    """Steps of the mean; before there are as many, nothing is a spike and no alarm is raised."""
    margin: float = 0.1
    told_after: int = 10
    """Steps that a spike must last to be worth an event."""
    alarm_ratio: float = 3.0
    """Of the lowest gradient norm so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """What is known after a step."""

    losses: tuple[float, ...] = ()
    """Of the newest steps, at most a window, newest last."""
    norms: tuple[float, ...] = ()
    """Gradient norms of the newest steps, at most a window, newest last."""
    spikes: int = 0
    """Spikes that have begun since the first step of the run."""
    spike_steps: int = 0
    """Steps that the present spike has lasted; 0 when there is none."""
    lowest_norm: float = math.inf
    """Of the gradient, so far; a step without any gradient does not count."""
    alarm: bool = False
    """The norm has left its lowest too far behind, in this step or not a window ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one step changed."""

    after: Stability
    bound: float = math.inf
    """Gradient norm above which this step is in a spike."""
    spike_ended_after: int = 0
    """Steps that the spike lasted which this step ended; 0 when it ended none."""
    spike_told: bool = False
    """The spike has lasted long enough to be told, and the loss does not fall in it; true at most once per spike."""
    alarm_raised: bool = False
    """True once for each time that the norm leaves its lowest too far behind."""


def judge(before: Stability, rules: Rules, *, loss: float, gradient_norm: float) -> Judgement:
    """The next step's verdict; `loss` is the mean of a token, `gradient_norm` that before clipping."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        return Judgement(after=before)
    full = len(before.norms) >= rules.window
    bound = math.fsum(before.norms[-rules.window :]) / rules.window + rules.margin if full else math.inf
    above = gradient_norm > bound
    raised = full and not before.alarm and gradient_norm > rules.alarm_ratio * before.lowest_norm
    norms = (*before.norms, gradient_norm)[-rules.window :]
    learns = bool(before.losses) and loss < math.fsum(before.losses) / len(before.losses)
    lowest = min(before.lowest_norm, gradient_norm) if gradient_norm > 0.0 else before.lowest_norm
    after = replace(
        before,
        losses=(*before.losses, loss)[-rules.window :],
        norms=norms,
        spikes=before.spikes + (above and before.spike_steps == 0),
        spike_steps=before.spike_steps + 1 if above else 0,
        lowest_norm=lowest,
        alarm=raised or (before.alarm and max(norms) > rules.alarm_ratio * lowest),
    )
    return Judgement(
        after=after,
        bound=bound,
        spike_ended_after=0 if above else before.spike_steps,
        spike_told=after.spike_steps == rules.told_after and not learns,
        alarm_raised=raised,
    )
