"""The alarm about a loss that has risen: on curves of real runs at tiny batches, and on made ones.

How the real ones came about: record_curves.py.
"""

import gzip
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from trainium_trainer.monitor.stability import LEVEL_STEPS, Stability, StabilityRules, update_stability

CURVES: dict[str, list[list[float]]] = json.loads(
    gzip.decompress(Path(__file__).with_name("curves.json.gz").read_bytes())
)
ORDINARY = sorted(name for name in CURVES if name.startswith("ordinary"))
BROKEN = sorted(name for name in CURVES if name.startswith("broken"))
BROKEN_AFTER = 500
RULES = StabilityRules()


def alarms(losses: Iterable[float], norms: Iterable[float] | None = None, rules: StabilityRules = RULES) -> list[int]:
    """Return the steps, from 1, at which the alarm was raised."""
    losses, state, found = list(losses), Stability(), []
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), start=1):
        verdict = update_stability(state, rules, loss=loss, gradient_norm=norm)
        state = verdict.after
        found += [step] * verdict.alarm_raised
    return found


def reported_spikes(curve: list[list[float]]) -> list[int]:
    """Return the steps, from 1, at which a spike was reported."""
    state, alarms = Stability(), []
    for step, (loss, norm) in enumerate(curve, start=1):
        verdict = update_stability(state, RULES, loss=loss, gradient_norm=norm)
        state = verdict.after
        alarms += [step] * verdict.spike_reported
    return alarms


def noisy(level: Callable[[int], float], steps: int, *, seed: int = 1, scatter: float = 0.3) -> list[float]:
    choose = random.Random(seed)
    return [level(step) + choose.gauss(0, scatter) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_training_is_far_from_an_alarm_and_reports_no_spike(name: str) -> None:
    losses, norms = zip(*CURVES[name], strict=True)
    assert alarms(losses, norms, StabilityRules(alarm_ratio=1.2)) == []
    assert reported_spikes(CURVES[name]) == []
    assert max(norms) > 3 * min(norms), "one norm against the lowest would have been an alarm"


def test_there_are_ten_ordinary_curves_and_two_broken_ones() -> None:
    assert (len(ORDINARY), len(BROKEN)) == (10, 2)


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_that_diverges_raises_the_alarm_within_a_hundred_steps(name: str) -> None:
    losses, norms = zip(*CURVES[name], strict=True)
    first, *_ = alarms(losses, norms)
    assert BROKEN_AFTER < first <= BROKEN_AFTER + LEVEL_STEPS


@pytest.mark.parametrize("name", ["ordinary, batch 4, seed 1", "ordinary, batch 1, seed 2"])
def test_a_true_spike_in_a_real_curve_is_reported_after_ten_steps_and_is_no_alarm(name: str) -> None:
    curve = [list(pair) for pair in CURVES[name]]
    for pair in curve[700:715]:
        pair[0] += 1.0
        pair[1] *= 8.0
    assert reported_spikes(curve) == [710]
    assert alarms(*zip(*curve, strict=True)) == []


def test_a_jump_of_the_loss_raises_the_alarm_once_within_51_steps() -> None:
    (first,) = alarms(noisy(lambda step: 2.0 if step <= 400 else 6.0, 800))
    assert 450 <= first <= 451


def test_a_slow_rise_of_a_hundredth_of_the_scatter_a_step_raises_the_alarm_within_500_steps() -> None:
    for seed in range(5):
        (first,) = alarms(noisy(lambda step: 4.0 + max(0, step - 400) * 0.003, 1500, seed=seed))
        assert 600 < first <= 900


def test_one_or_forty_bad_steps_raise_no_alarm() -> None:
    steady = noisy(lambda _: 4.0, 800)
    assert alarms([50.0 if step == 500 else loss for step, loss in enumerate(steady)]) == []
    assert alarms([50.0 if 500 <= step < 540 else loss for step, loss in enumerate(steady)]) == []


def test_the_alarm_ignores_the_gradient_norm() -> None:
    """It grows tenfold in runs whose loss falls."""
    assert alarms(noisy(lambda _: 4.0, 600), [0.1] * 300 + [50.0] * 300) == []


def test_a_drift_of_less_than_a_twentieth_raises_no_alarm_where_the_loss_hardly_scatters() -> None:
    assert alarms(noisy(lambda step: 2.0 if step < 300 else 2.09, 800, scatter=0.001)) == []
    assert len(alarms(noisy(lambda step: 2.0 if step < 300 else 2.11, 800, scatter=0.001))) == 1


def test_the_alarm_is_raised_again_only_after_the_loss_came_half_of_the_way_back() -> None:
    def level(step: int) -> float:
        return 4.0 + (0.0 if step < 300 else 2.0 if step < 600 else back if step < 900 else 2.0)

    back = 0.8
    assert len(alarms(noisy(level, 1200))) == 1
    back = 0.1
    assert len(alarms(noisy(level, 1200))) == 2


def test_no_alarm_is_raised_before_there_is_a_level_to_have_risen_from() -> None:
    assert alarms(noisy(lambda step: 2.0 + step, LEVEL_STEPS)) == []


def false_alarm_bound(ratio: float) -> float:
    """Bound the chance of a false alarm at one step, for losses of any distribution about a constant level.

    Two medians are further apart than `ratio` mean differences; twice a tail of the binomial distribution.
    """
    if ratio <= 2.0:
        return 1.0
    outside = (1 - math.sqrt(1 - 2 / ratio)) / 2
    half = LEVEL_STEPS // 2
    tail = (
        math.comb(LEVEL_STEPS, many) * outside**many * (1 - outside) ** (LEVEL_STEPS - many)
        for many in range(half, LEVEL_STEPS + 1)
    )
    return 2 * math.fsum(tail)


def test_the_chance_of_a_false_alarm_is_bounded_for_any_distribution() -> None:
    assert false_alarm_bound(RULES.alarm_ratio) < 4e-10
    assert false_alarm_bound(2.0) == false_alarm_bound(1.5) == 1.0
    assert false_alarm_bound(4.0) < false_alarm_bound(3.0) < false_alarm_bound(2.5)


@pytest.mark.parametrize(
    "draw",
    [
        lambda choose: choose.gauss(4, 0.5),
        lambda choose: choose.lognormvariate(0, 1.5),
        lambda choose: choose.paretovariate(1.1),
        lambda choose: float(choose.random() < 0.5),
        lambda choose: choose.choice((1.0, 1.0, 1.0, 8.0)),
    ],
    ids=["gauss", "lognormal", "pareto", "two values", "rare high ones"],
)
def test_losses_of_any_distribution_about_a_level_raise_no_alarm(draw: Callable[[random.Random], float]) -> None:
    choose = random.Random(7)
    assert alarms(draw(choose) for _ in range(10_000)) == []


def test_steps_that_are_not_finite_change_nothing() -> None:
    steady = noisy(lambda step: 2.0 if step <= 400 else 6.0, 800)
    broken = [value for at, loss in enumerate(steady) for value in ([math.nan, loss] if at % 7 == 0 else [loss])]
    assert len(alarms(broken)) == 1
