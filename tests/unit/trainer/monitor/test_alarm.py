"""Raise the alarm when the loss has risen, on real curves of tiny batches (record_curves.py) and on generated ones."""

import gzip
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.unit.trainer.monitor.test_stability import judge
from trainium_trainer.monitor.stability import LEVEL_STEPS, StabilityRules

CURVES: dict[str, list[list[float]]] = json.loads(
    gzip.decompress(Path(__file__).with_name("curves.json.gz").read_bytes())
)
ORDINARY = sorted(name for name in CURVES if name.startswith("ordinary"))
BROKEN = sorted(name for name in CURVES if name.startswith("broken"))
BROKEN_AFTER = 500
RULES = StabilityRules()


def find_alarms(
    losses: Iterable[float], norms: Iterable[float] | None = None, rules: StabilityRules = RULES
) -> list[int]:
    """Return the steps, from 1, at which the alarm was raised."""
    losses = list(losses)
    updates = judge(norms or [1.0] * len(losses), rules, losses=losses)
    return [step for step, update in enumerate(updates, start=1) if update.alarm_raised]


def find_spikes(curve: list[list[float]]) -> list[int]:
    """Return the steps, from 1, at which a spike was reported."""
    losses, norms = zip(*curve, strict=True)
    return [step for step, update in enumerate(judge(norms, losses=losses), start=1) if update.spike_reported]


def noisy_losses(level: Callable[[int], float], steps: int, *, seed: int = 1, scatter: float = 0.3) -> list[float]:
    rng = random.Random(seed)
    return [level(step) + rng.gauss(0, scatter) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_run_raises_no_alarm_and_reports_no_spike(name: str) -> None:
    losses, norms = zip(*CURVES[name], strict=True)
    assert find_alarms(losses, norms, StabilityRules(alarm_ratio=1.2)) == []
    assert find_spikes(CURVES[name]) == []
    assert judge(norms, losses=losses)[-1].after.spikes <= 0.01 * len(losses)
    assert max(norms) > 3 * min(norms), "the gradient norms vary"


def test_there_are_ten_ordinary_curves_and_two_broken_ones() -> None:
    assert (len(ORDINARY), len(BROKEN)) == (10, 2)


@pytest.mark.parametrize("name", BROKEN)
def test_a_run_that_diverges_raises_the_alarm_within_a_hundred_steps(name: str) -> None:
    losses, norms = zip(*CURVES[name], strict=True)
    first, *_ = find_alarms(losses, norms)
    assert BROKEN_AFTER < first <= BROKEN_AFTER + LEVEL_STEPS


@pytest.mark.parametrize("name", ["ordinary, batch 4, seed 1", "ordinary, batch 1, seed 2"])
def test_a_true_spike_in_a_real_curve_is_reported_after_ten_steps_and_is_no_alarm(name: str) -> None:
    curve = [list(pair) for pair in CURVES[name]]
    for pair in curve[700:715]:
        pair[0] += 1.0
        pair[1] *= 8.0
    assert find_spikes(curve) == [710]
    assert find_alarms(*zip(*curve, strict=True)) == []


def test_a_jump_of_the_loss_raises_the_alarm_once_within_51_steps() -> None:
    (first,) = find_alarms(noisy_losses(lambda step: 2.0 if step <= 400 else 6.0, 800))
    assert 450 <= first <= 451


def test_a_slow_rise_of_a_hundredth_of_the_scatter_a_step_raises_the_alarm_within_500_steps() -> None:
    for seed in range(5):
        (first,) = find_alarms(noisy_losses(lambda step: 4.0 + max(0, step - 400) * 0.003, 1500, seed=seed))
        assert 600 < first <= 900


def test_one_or_forty_bad_steps_raise_no_alarm() -> None:
    steady = noisy_losses(lambda _: 4.0, 800)
    assert find_alarms([50.0 if step == 500 else loss for step, loss in enumerate(steady)]) == []
    assert find_alarms([50.0 if 500 <= step < 540 else loss for step, loss in enumerate(steady)]) == []


def test_the_alarm_ignores_the_gradient_norm() -> None:
    """The norm grows tenfold in runs whose loss falls."""
    assert find_alarms(noisy_losses(lambda _: 4.0, 600), [0.1] * 300 + [50.0] * 300) == []


def test_a_drift_of_less_than_a_twentieth_raises_no_alarm_where_the_loss_hardly_scatters() -> None:
    assert find_alarms(noisy_losses(lambda step: 2.0 if step < 300 else 2.09, 800, scatter=0.001)) == []
    assert len(find_alarms(noisy_losses(lambda step: 2.0 if step < 300 else 2.11, 800, scatter=0.001))) == 1


def test_the_alarm_is_raised_again_only_after_the_loss_has_fallen_half_of_the_rise() -> None:
    def level(step: int) -> float:
        return 4.0 + (0.0 if step < 300 else 2.0 if step < 600 else middle if step < 900 else 2.0)

    middle = 0.8
    assert len(find_alarms(noisy_losses(level, 1200))) == 1
    middle = 0.1
    assert len(find_alarms(noisy_losses(level, 1200))) == 2


def test_no_alarm_is_raised_before_the_first_level() -> None:
    assert find_alarms(noisy_losses(lambda step: 2.0 + step, LEVEL_STEPS)) == []


def false_alarm_bound(ratio: float) -> float:
    """Bound the chance of a false alarm at one step, for losses of any distribution about a constant level.

    Two medians are further apart than `ratio` mean differences; twice a tail of the binomial distribution.
    """
    if ratio <= 2.0:
        return 1.0
    outside = (1 - math.sqrt(1 - 2 / ratio)) / 2
    half = LEVEL_STEPS // 2
    tail = (
        math.comb(LEVEL_STEPS, count) * outside**count * (1 - outside) ** (LEVEL_STEPS - count)
        for count in range(half, LEVEL_STEPS + 1)
    )
    return 2 * math.fsum(tail)


def test_the_chance_of_a_false_alarm_is_bounded_for_any_distribution() -> None:
    assert false_alarm_bound(RULES.alarm_ratio) < 4e-10
    assert false_alarm_bound(2.0) == false_alarm_bound(1.5) == 1.0
    assert false_alarm_bound(4.0) < false_alarm_bound(3.0) < false_alarm_bound(2.5)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.gauss(4, 0.5),
        lambda rng: rng.lognormvariate(0, 1.5),
        lambda rng: rng.paretovariate(1.1),
        lambda rng: float(rng.random() < 0.5),
        lambda rng: rng.choice((1.0, 1.0, 1.0, 8.0)),
    ],
    ids=["gauss", "lognormal", "pareto", "two values", "rare high ones"],
)
def test_losses_of_any_distribution_about_a_level_raise_no_alarm(draw: Callable[[random.Random], float]) -> None:
    rng = random.Random(7)
    assert find_alarms(draw(rng) for _ in range(10_000)) == []


def test_steps_that_are_not_finite_change_nothing() -> None:
    steady = noisy_losses(lambda step: 2.0 if step <= 400 else 6.0, 800)
    broken = [value for step, loss in enumerate(steady) for value in ([math.nan, loss] if step % 7 == 0 else [loss])]
    assert len(find_alarms(broken)) == 1
