"""Decide on a save by the sum of one integer per rank: what to save, and whether any rank is busy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainium_trainer.checkpoint.durable.durable_tier import Save, decode_votes, encode_vote

WANTED = (Save.NOTHING, Save.STATE, Save.MILESTONE, Save.STATE | Save.MILESTONE)


@given(st.sampled_from(WANTED), st.lists(st.booleans(), min_size=1, max_size=64))
def test_the_first_rank_decides_on_a_save_unless_any_rank_is_busy(wanted: Save, busy: list[bool]) -> None:
    first, *others = busy
    total = encode_vote(wanted, busy=first) + sum(encode_vote(Save.NOTHING, busy=rank_busy) for rank_busy in others)
    assert decode_votes(total) is (Save.NOTHING if any(busy) else wanted)


@pytest.mark.parametrize("wanted", WANTED)
def test_the_sum_of_a_hundred_thousand_ranks_is_exact_on_the_wire(wanted: Save) -> None:
    """The all-reduce of a step adds 64-bit floats; a benchmark adds 32-bit ones."""
    for dtype in (torch.float64, torch.float32):
        votes = torch.full((100_000,), encode_vote(Save.NOTHING, busy=True), dtype=dtype)
        votes[0] = encode_vote(wanted, busy=True)
        assert int(votes.sum()) == 400_000 + wanted.value
        assert decode_votes(int(votes.sum())) is Save.NOTHING
