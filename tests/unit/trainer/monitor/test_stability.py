"""Apply the spike rule of HLAT step by step; test_alarm.py tests the alarm."""

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_trainer.monitor.stability import Stability, StabilityRules, StabilityUpdate, update_stability

HLAT = StabilityRules()


def judge(
    norms: Iterable[float], rules: StabilityRules = HLAT, *, losses: Iterable[float] | None = None
) -> list[StabilityUpdate]:
    state, updates = Stability(), []
    norms = list(norms)
    for norm, loss in zip(norms, losses or [1.0] * len(norms), strict=True):
        updates.append(update_stability(state, rules, loss=loss, gradient_norm=norm))
        state = updates[-1].after
    return updates


def test_the_bound_is_the_mean_of_the_twenty_steps_before_plus_one_tenth() -> None:
    *_, last = judge([*range(1, 22), 30.0])
    assert last.bound == sum(range(2, 22)) / 20 + 0.1


def test_a_norm_on_the_bound_is_no_spike_and_one_above_it_is() -> None:
    bound = judge([0.5] * 21)[-1].bound
    assert judge([0.5] * 20 + [bound])[-1].after.spikes == 0
    assert judge([0.5] * 20 + [math.nextafter(bound, 2)])[-1].after.spikes == 1


def test_nothing_is_a_spike_before_there_are_twenty_steps() -> None:
    judgements = judge([0.5] * 19 + [100.0, 0.5])
    assert [update.after.spikes for update in judgements] == [0] * 21
    assert judgements[-1].bound == (0.5 * 19 + 100) / 20 + 0.1


def test_steps_of_a_long_spike_are_counted_until_the_norm_is_back() -> None:
    judgements = judge([0.5] * 20 + [2.0, 3.0, 4.0, 0.6, 0.6])
    assert [update.after.spike_steps for update in judgements[20:]] == [1, 2, 3, 0, 0]
    assert [update.spike_ended_after for update in judgements[20:]] == [0, 0, 0, 3, 0]
    assert judgements[-1].after.spikes == 1


def test_two_spikes_apart_are_counted_as_two_and_a_burst_as_one() -> None:
    assert judge([0.5] * 20 + [2.0, *[0.5] * 20, 2.0, 0.5])[-1].after.spikes == 2
    assert judge([0.5] * 20 + [2.0, 0.5, 2.0, 0.5])[-1].after.spikes == 1


def test_a_lasting_higher_level_ends_its_spike_when_the_mean_has_risen() -> None:
    # After k steps at 1.5, the mean of twenty steps is 0.5 + k / 20, which reaches 1.4 at k = 18.
    lengths = [update.spike_ended_after for update in judge([0.5] * 20 + [1.5] * 25)]
    assert [length for length in lengths if length] in ([18], [19])


def test_a_spike_is_reported_once_when_it_has_lasted_long_enough() -> None:
    rules = StabilityRules(reported_after=3)
    reported = [
        update.spike_reported for update in judge([0.5] * 20 + [9.0] * 5 + [0.5] * 30 + [9.0] * 2 + [0.5], rules)
    ]
    assert [step for step, update in enumerate(reported) if update] == [22]


def test_a_spike_that_noise_began_is_reported_once_when_ten_of_its_steps_exceed_the_noise() -> None:
    """At a small batch, one step in three is above the bound by chance."""
    judgements = judge([*[0.5] * 25, 0.9, *[0.5] * 4, 0.8, 0.8, *[9.0] * 15])
    assert [step for step, update in enumerate(judgements) if update.spike_reported] == [41]


def test_a_spike_is_reported_only_when_its_norms_are_above_each_of_those_before_it() -> None:
    """By chance, the newest ten of thirty norms are the highest once in thirty million times."""
    before = [0.5] * 10 + [3.0] + [0.5] * 9
    assert not any(update.spike_reported for update in judge([*before, *[2.0] * 12]))
    assert any(update.spike_reported for update in judge([*before, *[3.1] * 12]))
    assert math.comb(30, 10) == 30_045_015


def test_noise_around_a_level_is_reported_as_no_spike_and_rarely_counted() -> None:
    rng = random.Random(1)
    noise = [rng.lognormvariate(1.0, 0.5) for _ in range(20_000)]
    judgements = judge(noise, losses=[rng.gauss(4.0, 0.5) for _ in noise])
    assert not any(update.spike_reported for update in judgements)
    assert sum(update.spike_ended_after > 0 for update in judgements) > 1000, "the bound of HLAT alone"
    assert judgements[-1].after.spikes < 100
    healthy = judge([rng.gauss(2.0, 0.3) for _ in range(1341)])
    assert healthy[-1].after.spikes <= 3


def test_a_spike_that_is_reported_late_is_compared_with_the_steps_before_it() -> None:
    rules = StabilityRules(reported_after=60)
    judgements = judge([0.5] * 30 + [4.0 * 1.05**step for step in range(70)], rules)
    assert [step for step, update in enumerate(judgements) if update.spike_reported] == [89]


def test_a_spike_too_long_to_be_remembered_is_reported_at_that_length() -> None:
    rules = StabilityRules(reported_after=1_500)
    judgements = judge([0.5] * 30 + [2.0 + 0.1 * step for step in range(1_600)], rules)
    assert [step for step, update in enumerate(judgements) if update.spike_reported] == [1_529]
    assert len(judgements[-1].after.norms) == rules.kept_steps == 100


def test_a_norm_that_rises_with_the_learning_rate_while_the_loss_falls_is_not_reported() -> None:
    warming = [0.3 + 0.03 * step for step in range(60)]
    falling = [8.0 - 0.05 * step for step in range(60)]
    assert not any(update.spike_reported for update in judge(warming, losses=falling))
    assert judge(warming, losses=falling)[-1].after.spikes == 0
    rising = falling[:22] + [falling[21] + 0.2 * step for step in range(38)]
    assert any(update.spike_reported for update in judge(warming, losses=rising))


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_a_skipped_step_is_not_judged(loss: float, norm: float) -> None:
    state = Stability(norms=(1.0,) * 20, lowest=2.0, spikes=4)
    verdict = update_stability(state, HLAT, loss=loss, gradient_norm=norm)
    assert verdict == StabilityUpdate(after=state)


@given(st.lists(st.floats(0, 10), max_size=70), st.integers(0, 70))
def test_judgements_do_not_depend_on_restarts(norms: list[float], cut: int) -> None:
    rules = StabilityRules(window=5, reported_after=2)
    expected_states = [update.after for update in judge(norms, rules, losses=norms)]
    state = expected_states[cut - 1] if 0 < cut <= len(norms) else Stability()
    start = cut if 0 < cut <= len(norms) else 0
    for norm, expected in zip(norms[start:], expected_states[start:], strict=True):
        state = update_stability(state, rules, loss=norm, gradient_norm=norm).after
        assert state == expected
