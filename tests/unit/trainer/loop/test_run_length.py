"""Use every sample once in runs with a batch tolerance, with the schedule and the end of a run without it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_contract.sizes import compute_step_batch_size, count_micro_batches
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.configuration.config import read_launch, resolve_settings, resolve_steps
from trainium_trainer.data.batches.samples import Share
from trainium_trainer.loop.run_length import RunLength
from trainium_trainer.loop.schedule import compute_learning_rate, compute_rate_factor

START = Position(step=0, samples=0, tokens=0)


def create_progress(ranks: int, *, steps: int = 10, **batch: Any) -> RunLength:
    fields = {"batch": {"microSize": 1, **batch}, "steps": steps, "schedule": {"warmupSteps": 0}}
    config = TrainingConfig.model_validate(fields)
    launch = read_launch({"RANK": "0", "WORLD_SIZE": str(ranks)})
    return RunLength.of(resolve_settings(resolve_steps(config, None), launch, vocabulary=512))


def make_step(position: Position, progress: RunLength) -> Position:
    batch = progress.compute_next_batch(position.samples)
    return Position(step=position.step + 1, samples=position.samples + batch, tokens=0, batch=batch)


@given(
    global_size=st.integers(1, 40),
    micro_size=st.integers(1, 4),
    tolerance=st.floats(0.001, 0.5),
    steps=st.integers(1, 20),
    history=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=8),
)
@settings(max_examples=trials(200))
def test_every_sample_is_used_once_and_batches_stay_within_the_tolerance(
    global_size: int, micro_size: int, tolerance: float, steps: int, history: list[tuple[int, int]]
) -> None:
    """`history`: data-parallel ranks, and the steps at that size; the last size continues to the end."""
    position, samples = START, []
    for number, (ranks, max_steps) in enumerate(history):
        batch = compute_step_batch_size(global_size, micro_size, ranks, tolerance)
        progress = RunLength(batch=batch, steps=steps, end=steps * global_size)
        shares = [
            Share(global_size=batch, micro_size=micro_size, dp_rank=rank, dp_size=ranks, end=progress.end)
            for rank in range(ranks)
        ]
        (count,) = {share.passes for share in shares}
        assert count == count_micro_batches(batch, micro_size, ranks), (
            "the last step has equally many, so it uses the same graph"
        )
        total, is_last = progress.count_total_steps(position), number == len(history) - 1
        leaves = position.step + max_steps
        while not progress.is_over(position) and (is_last or position.step < leaves):
            parts = [share.list_positions(position.samples) for share in shares]
            samples += [sample for part in parts for sample in part]
            assert all(len(part) <= count * micro_size for part in parts)
            new = make_step(position, progress)
            assert new.samples - position.samples == batch or progress.is_over(new), (
                "only the last step has another number"
            )
            assert abs(batch - global_size) <= (tolerance + 1e-6) * global_size
            assert progress.count_total_steps(new) == total, "the total is known from the first step at a size"
            position = new
        if progress.is_over(position):
            assert position.step == total
    assert samples == list(range(steps * global_size))


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16), st.integers(1, 50), st.integers(0, 60))
def test_without_a_tolerance_steps_count_global_batches(
    global_size: int, micro_size: int, ranks: int, steps: int, step: int
) -> None:
    batch = compute_step_batch_size(global_size, micro_size, ranks)
    progress = RunLength(batch=batch, steps=steps)
    position = Position(step=step, samples=step * global_size, tokens=0)
    assert progress.compute_next_batch(position.samples) == global_size
    assert progress.is_over(position) == (step >= steps)
    assert (progress.count_completed_steps(position), progress.count_total_steps(position)) == (step, steps)
    assert isinstance(progress.count_completed_steps(position), int), "the schedule computes with integer steps"
    imported = Position(step=step, samples=0, tokens=0)
    assert progress.is_over(imported) == (step >= steps), "an imported checkpoint does not record its samples"


def test_the_schedule_follows_the_samples() -> None:
    """Batches of 9 instead of 8 on 9 ranks, so that 8 steps use the samples of 9."""
    plain, near = create_progress(9, globalSize=8, steps=9), create_progress(9, globalSize=8, steps=9, tolerance=0.2)
    assert (plain.batch, near.batch) == (8, 9)
    config = TrainingConfig.model_validate(
        {"batch": {"globalSize": 8, "tolerance": 0.2}, "steps": 9, "schedule": {"warmupSteps": 3}}
    )
    position, rates = START, []
    while not near.is_over(position):
        position = make_step(position, near)
        rates.append(compute_learning_rate(config, near.count_completed_steps(position) - 1))
    assert len(rates) == 8
    plain_rates = [compute_learning_rate(config, step) for step in range(9)]
    assert rates[-1] == plain_rates[-1], "the end of the schedule is the end of the run"
    assert near.count_completed_steps(position) == near.steps
    assert rates[0] == pytest.approx(plain_rates[0] * 9 / 8)
    assert max(rates) <= config.optimizer.learning_rate


@pytest.mark.parametrize("kind", ["Cosine", "Linear", "Constant", "WarmupStableDecay"])
def test_the_factor_between_two_steps_lies_between_theirs(kind: str) -> None:
    config = TrainingConfig.model_validate({"steps": 40, "schedule": {"kind": kind, "warmupSteps": 10}})
    for step in range(39):
        factors = [
            compute_rate_factor(config.schedule, steps=40, step=step + part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)
        ]
        assert factors == sorted(factors) or factors == sorted(factors, reverse=True)
        assert factors[0] == compute_rate_factor(config.schedule, steps=40, step=step)
        assert 0.0 < max(factors) <= 1.0
