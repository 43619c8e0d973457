"""Compute learning rates exactly, and check the common shape of all schedules."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.trainer.optimizer import ScheduleConfig, ScheduleKind
from trainium_trainer.loop.schedule import compute_learning_rate, compute_rate_factor


def factors(steps: int, **fields: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(fields)
    return [compute_rate_factor(schedule, steps=steps, step=step) for step in range(steps)]


def test_the_cosine_schedule_falls_to_its_floor() -> None:
    half = 0.1 + 0.9 * 0.5
    quarter, three_quarters = (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)) for share in (0.25, 0.75))
    expected = [0.5, 1.0, quarter, half, three_quarters, 0.1]
    assert factors(6, warmup_steps=2) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"warmup_steps": 1, "decay_steps": 2, "final_ratio": 0.25}, [1.0, 0.625, 0.25, 0.25, 0.25, 0.25]),
        ({"kind": "Linear", "warmup_steps": 2, "final_ratio": 0.2}, [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"kind": "Constant", "warmup_steps": 4, "final_ratio": 0.2}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    ],
    ids=["cosine that ends early", "linear", "constant without a floor"],
)
def test_schedules_have_these_factors(schedule: dict[str, object], expected: list[float]) -> None:
    assert factors(len(expected), **schedule) == pytest.approx(expected, rel=1e-15)


def test_the_warmup_stable_decay_schedule_decays_in_its_last_steps() -> None:
    schedule = {"kind": "WarmupStableDecay", "warmup_steps": 2, "final_ratio": 0.0}
    assert factors(8, **schedule, decay_steps=4) == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0], abs=1e-15)
    assert factors(20, **schedule)[-4:] == pytest.approx([1, 1, 0.5, 0], abs=1e-15), "a tenth of the steps"


def test_hlat_has_its_published_learning_rates() -> None:
    """Peak 3e-4 after 2,000 steps, 3e-5 from step 480,000 on, 500,000 steps."""
    schedule = {"warmupSteps": 2000, "decaySteps": 478_000, "finalRatio": 0.1}
    config = TrainingConfig.model_validate({"steps": 500_000, "schedule": schedule})
    rates = {step: compute_learning_rate(config, step - 1) for step in (1, 1000, 2000, 241_000, 480_000, 500_000)}
    assert rates == pytest.approx(
        {1: 1.5e-7, 1000: 1.5e-4, 2000: 3e-4, 241_000: 1.65e-4, 480_000: 3e-5, 500_000: 3e-5}, rel=1e-12
    )


@given(st.sampled_from(ScheduleKind), st.integers(1, 300), st.data())
def test_every_schedule_warms_up_peaks_and_falls_to_its_floor(
    kind: ScheduleKind, steps: int, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, steps))
    decay = data.draw(st.one_of(st.none(), st.integers(1, max(1, steps - warmup))))
    ratio = data.draw(st.floats(0, 1))
    rates = factors(steps, kind=kind, warmup_steps=warmup, decay_steps=decay, final_ratio=ratio)
    assert all(0 < rate <= 1 for rate in rates[:warmup])
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup:
        assert rates[warmup - 1] == 1.0
    if warmup < steps:
        assert rates[-1] == pytest.approx(1.0 if kind is ScheduleKind.CONSTANT else ratio)
