"""Norms over many values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainium_trainer.backends.store import square_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_million_values_are_summed_to_five_digits(dtype: torch.dtype) -> None:
    values = torch.full((50_000_001,), 2.0**-7, dtype=dtype)
    assert square_sum([values]) == pytest.approx(50_000_001 * 2.0**-14, rel=1e-5)


@given(st.lists(st.integers(0, 40_000), max_size=4), st.booleans())
def test_every_value_counts_once_wherever_it_lies(sizes: list[int], turned: bool) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))
    tensors = [torch.randn(2, size, generator=generator) for size in sizes]
    given = [tensor.t() for tensor in tensors] if turned else tensors
    expected = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert square_sum(given) == pytest.approx(expected, rel=1e-6)


def test_a_value_that_is_not_finite_is_seen() -> None:
    values = torch.zeros(100_000)
    values[77_777] = torch.nan
    assert torch.tensor(square_sum([torch.ones(3), values])).isnan()
