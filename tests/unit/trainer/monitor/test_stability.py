"""HLAT's spike rule, step by step, and its reports; the alarm is in test_alarm.py."""

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_trainer.monitor.stability import Stability, StabilityRules, StabilityUpdate, update_stability

HLAT = StabilityRules()


def judged(
    norms: Iterable[float], rules: StabilityRules = HLAT, *, losses: Iterable[float] | None = None
) -> list[StabilityUpdate]:
    state, found = Stability(), []
    norms = list(norms)
    for norm, loss in zip(norms, losses or [1.0] * len(norms), strict=True):
        found.append(update_stability(state, rules, loss=loss, gradient_norm=norm))
        state = found[-1].after
    return found


def test_the_bound_is_the_mean_of_the_twenty_steps_before_plus_one_tenth() -> None:
    *_, last = judged([*range(1, 22), 30.0])
    assert last.bound == sum(range(2, 22)) / 20 + 0.1


def test_a_norm_on_the_bound_is_no_spike_and_one_above_it_is() -> None:
    bound = judged([0.5] * 21)[-1].bound
    assert judged([0.5] * 20 + [bound])[-1].after.spikes == 0
    assert judged([0.5] * 20 + [math.nextafter(bound, 2)])[-1].after.spikes == 1


def test_nothing_is_a_spike_before_there_are_twenty_steps() -> None:
    judgements = judged([0.5] * 19 + [100.0, 0.5])
    assert [one.after.spikes for one in judgements] == [0] * 21
    assert judgements[-1].bound == (0.5 * 19 + 100) / 20 + 0.1


def test_a_spike_of_one_step_is_counted_and_is_over_at_the_next() -> None:
    spike, back = judged([0.5] * 20 + [2.0, 0.5])[-2:]
    assert (spike.after.spikes, spike.after.spike_steps, spike.spike_ended_after) == (1, 1, 0)
    assert (back.after.spikes, back.after.spike_steps, back.spike_ended_after) == (1, 0, 1)


def test_steps_of_a_long_spike_are_counted_until_the_norm_is_back() -> None:
    judgements = judged([0.5] * 20 + [2.0, 3.0, 4.0, 0.6, 0.6])
    assert [one.after.spike_steps for one in judgements[20:]] == [1, 2, 3, 0, 0]
    assert [one.spike_ended_after for one in judgements[20:]] == [0, 0, 0, 3, 0]
    assert judgements[-1].after.spikes == 1


def test_two_spikes_apart_are_counted_as_two() -> None:
    assert judged([0.5] * 20 + [2.0, 0.5, 2.0, 0.5])[-1].after.spikes == 2


def test_a_lasting_higher_level_ends_its_spike_when_the_mean_has_come_up() -> None:
    # After k steps at 1.5 the mean of twenty is 0.5 + k / 20: above 1.4 first at k = 18, on 1.4 at most at 18.
    lengths = [one.spike_ended_after for one in judged([0.5] * 20 + [1.5] * 25)]
    assert [length for length in lengths if length] in ([18], [19])


def test_a_spike_is_reported_once_when_it_has_lasted_long_enough() -> None:
    rules = StabilityRules(reported_after=3)
    reported = [one.spike_reported for one in judged([0.5] * 20 + [9.0] * 5 + [0.5] * 30 + [9.0] * 2 + [0.5], rules)]
    assert [step for step, one in enumerate(reported) if one] == [22]


def test_a_spike_that_noise_began_is_reported_once_when_ten_of_its_steps_exceed_the_noise() -> None:
    """At a small batch one step in three is above the bound by itself."""
    judgements = judged([*[0.5] * 25, 0.9, *[0.5] * 4, 0.8, 0.8, *[9.0] * 15])
    assert [step for step, one in enumerate(judgements) if one.spike_reported] == [41]


def test_a_spike_is_reported_only_when_its_norms_are_above_each_of_those_before_it() -> None:
    """The newest ten of thirty norms that differ by chance are the highest once in thirty million times."""
    before = [0.5] * 10 + [3.0] + [0.5] * 9
    assert not any(one.spike_reported for one in judged([*before, *[2.0] * 12]))
    assert any(one.spike_reported for one in judged([*before, *[3.1] * 12]))
    assert math.comb(30, 10) == 30_045_015


def test_noise_around_a_level_is_reported_as_no_spike_however_many_are_counted() -> None:
    choose = random.Random(1)
    noise = [choose.lognormvariate(1.0, 0.5) for _ in range(20_000)]
    judgements = judged(noise, losses=[choose.gauss(4.0, 0.5) for _ in noise])
    assert not any(one.spike_reported for one in judgements)
    assert judgements[-1].after.spikes > 1000


def test_a_spike_that_is_reported_late_is_compared_with_the_steps_before_it() -> None:
    rules = StabilityRules(reported_after=60)
    judgements = judged([0.5] * 30 + [4.0 * 1.05**step for step in range(70)], rules)
    assert [step for step, one in enumerate(judgements) if one.spike_reported] == [89]


def test_a_spike_too_long_to_be_remembered_is_reported_at_that_length() -> None:
    rules = StabilityRules(reported_after=1_500)
    judgements = judged([0.5] * 30 + [2.0 + 0.1 * step for step in range(1_600)], rules)
    assert [step for step, one in enumerate(judgements) if one.spike_reported] == [1_529]
    assert len(judgements[-1].after.norms) == rules.kept_steps == 100


def test_a_norm_that_rises_with_the_learning_rate_while_the_loss_falls_is_not_reported() -> None:
    warming = [0.3 + 0.03 * step for step in range(60)]
    falling = [8.0 - 0.05 * step for step in range(60)]
    assert not any(one.spike_reported for one in judged(warming, losses=falling))
    assert judged(warming, losses=falling)[-1].after.spikes == 1, "it is counted all the same"
    rising = falling[:22] + [falling[21] + 0.2 * step for step in range(38)]
    assert any(one.spike_reported for one in judged(warming, losses=rising))


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_a_skipped_step_is_not_judged(loss: float, norm: float) -> None:
    state = Stability(norms=(1.0,) * 20, lowest=2.0, spikes=4)
    verdict = update_stability(state, HLAT, loss=loss, gradient_norm=norm)
    assert verdict == StabilityUpdate(after=state)


@given(st.lists(st.floats(0, 10), max_size=70), st.integers(0, 70))
def test_judgements_do_not_depend_on_restarts(norms: list[float], cut: int) -> None:
    rules = StabilityRules(window=5, reported_after=2)
    whole = [one.after for one in judged(norms, rules, losses=norms)]
    state = whole[cut - 1] if 0 < cut <= len(norms) else Stability()
    start = cut if 0 < cut <= len(norms) else 0
    for norm, expected in zip(norms[start:], whole[start:], strict=True):
        state = update_stability(state, rules, loss=norm, gradient_norm=norm).after
        assert state == expected
