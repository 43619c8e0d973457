"""Runs whose steps differ in their samples: every sample once, the schedule and the end as without the tolerance."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_contract.sizes import count_micro_batches, step_batch_size
from trainium_contract.trainer.config import TrainingConfig
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.configuration.config import read_launch, resolve_settings, with_steps
from trainium_trainer.data.batches.samples import Share
from trainium_trainer.loop.run_progress import RunProgress
from trainium_trainer.loop.schedule import learning_rate, rate_factor

START = Position(step=0, samples=0, tokens=0)


def course(ranks: int, *, steps: int = 10, micro_size: int = 1, **batch: Any) -> RunProgress:
    fields = {"batch": {"microSize": micro_size, **batch}, "steps": steps, "schedule": {"warmupSteps": 0}}
    config = TrainingConfig.model_validate(fields)
    launch = read_launch({"RANK": "0", "WORLD_SIZE": str(ranks)})
    return RunProgress.of(resolve_settings(with_steps(config, None), launch, vocabulary=512))


def after(position: Position, course: RunProgress) -> Position:
    taken = course.next_batch(position.samples)
    return Position(step=position.step + 1, samples=position.samples + taken, tokens=0, batch=taken)


@given(
    global_size=st.integers(1, 40),
    micro_size=st.integers(1, 4),
    tolerance=st.floats(0.001, 0.5),
    steps=st.integers(1, 20),
    history=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=8),
)
@settings(max_examples=trials(200))
def test_every_sample_is_taken_once_whatever_the_sizes_and_batches_stay_within_the_tolerance(
    global_size: int, micro_size: int, tolerance: float, steps: int, history: list[tuple[int, int]]
) -> None:
    """`history`: data-parallel ranks, and steps at that size; the last size continues to the end."""
    position, seen = START, []
    for number, (ranks, most) in enumerate(history):
        batch = step_batch_size(global_size, micro_size, ranks, tolerance)
        at = RunProgress(batch=batch, steps=steps, end=steps * global_size)
        shares = [
            Share(global_size=batch, micro_size=micro_size, dp_rank=rank, dp_size=ranks, end=at.end)
            for rank in range(ranks)
        ]
        (count,) = {share.passes for share in shares}
        assert count == count_micro_batches(batch, micro_size, ranks), (
            "the last step has as many, so that it needs no other graph"
        )
        total, last = at.total_steps(position), number == len(history) - 1
        leaves = position.step + most
        while not at.is_over(position) and (last or position.step < leaves):
            parts = [share.at(position.samples) for share in shares]
            seen += [sample for part in parts for sample in part]
            assert all(len(part) <= count * micro_size for part in parts)
            new = after(position, at)
            assert new.samples - position.samples == batch or at.is_over(new), "only the last step has another number"
            assert abs(batch - global_size) <= (tolerance + 1e-6) * global_size
            assert at.total_steps(new) == total, "known from the first step at a size"
            position = new
        if at.is_over(position):
            assert position.step == total
    assert seen == list(range(steps * global_size))


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16), st.integers(1, 50), st.integers(0, 60))
def test_without_a_tolerance_steps_count_global_batches(
    global_size: int, micro_size: int, ranks: int, steps: int, step: int
) -> None:
    batch = step_batch_size(global_size, micro_size, ranks)
    at = RunProgress(batch=batch, steps=steps)
    position = Position(step=step, samples=step * global_size, tokens=0)
    assert at.next_batch(position.samples) == global_size
    assert at.is_over(position) == (step >= steps)
    assert (at.completed_steps(position), at.total_steps(position)) == (step, steps)
    assert isinstance(at.completed_steps(position), int), "the schedule's arithmetic is that of whole steps"
    imported = Position(step=step, samples=0, tokens=0)
    assert at.is_over(imported) == (step >= steps), "a checkpoint that does not know its samples"


def test_the_schedule_follows_the_samples() -> None:
    """8 ranks of 9: batches of 9 in place of 8, so that 8 steps do what 9 would have done."""
    plain, near = course(9, globalSize=8, steps=9), course(9, globalSize=8, steps=9, tolerance=0.2)
    assert (plain.batch, near.batch) == (8, 9)
    config = TrainingConfig.model_validate(
        {"batch": {"globalSize": 8, "tolerance": 0.2}, "steps": 9, "schedule": {"warmupSteps": 3}}
    )
    position, rates = START, []
    while not near.is_over(position):
        position = after(position, near)
        rates.append(learning_rate(config, near.completed_steps(position) - 1))
    assert len(rates) == 8
    whole = [learning_rate(config, step) for step in range(9)]
    assert rates[-1] == whole[-1], "the end of the schedule is the end of the run"
    assert near.completed_steps(position) == near.steps
    assert rates[0] == pytest.approx(whole[0] * 9 / 8)
    assert max(rates) <= config.optimizer.learning_rate


@pytest.mark.parametrize("kind", ["Cosine", "Linear", "Constant", "WarmupStableDecay"])
def test_the_factor_between_two_steps_lies_between_theirs(kind: str) -> None:
    config = TrainingConfig.model_validate({"steps": 40, "schedule": {"kind": kind, "warmupSteps": 10}})
    for step in range(39):
        at = [rate_factor(config.schedule, steps=40, step=step + part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
        assert at == sorted(at) or at == sorted(at, reverse=True)
        assert at[0] == rate_factor(config.schedule, steps=40, step=step)
        assert 0.0 < max(at) <= 1.0
