"""Samples of a step by position, for any number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium_worker.data import PositionSampler


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 12),
    micro_batch=st.integers(1, 5),
    ranks=st.integers(1, 7),
    completed=st.integers(0, 40),
)
def test_steps_have_the_same_samples_at_any_size_and_after_any_resume(
    size: int, batch: int, micro_batch: int, ranks: int, completed: int
) -> None:
    def read(world_size: int, done: int, epoch: int) -> list[list[int]]:
        samplers = [
            PositionSampler(
                size, global_batch=batch, micro_batch=micro_batch, completed=done, rank=rank, world_size=world_size
            )
            for rank in range(world_size)
        ]
        steps: list[list[int]] = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
        first = samplers[0].first_step
        batches = [[*sampler] for sampler in samplers]
        for step in range(first, samplers[0].steps_per_epoch):
            samples, weights = [], 0.0
            for sampler, rank_batches in zip(samplers, batches, strict=True):
                start = (step - first) * sampler.accumulation
                for number, micro in enumerate(rank_batches[start : start + sampler.accumulation]):
                    samples += micro[: micro.rows]
                    weights += sampler.weight(step, number)
            assert weights == pytest.approx(world_size)
            steps.append(samples)
        return steps

    epoch, step = divmod(completed, -(-size // batch))
    whole = read(1, 0, epoch)
    assert sorted(sample for samples in whole for sample in samples) == list(range(size))
    assert read(ranks, completed, epoch) == whole[step:]


def test_padded_micro_batches_have_one_shape() -> None:
    sampler = PositionSampler(10, global_batch=7, micro_batch=3, rank=1, world_size=2, pads=True)
    assert [(len(batch), batch.rows) for batch in sampler] == [(3, 3), (3, 0), (3, 1), (3, 0)]


@pytest.mark.parametrize("options", [{"global_batch": 0}, {"micro_batch": 0}, {"rank": 2}, {"drop_last": True}])
def test_what_cannot_be_sampled_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="3 samples with a global batch of"):
        PositionSampler(3, **{"global_batch": 4, "micro_batch": 2, "rank": 0, "world_size": 2, **options})
