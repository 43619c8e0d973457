"""Masks of dropout depend on the seed, module and sample alone, not on batch or layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainium_trainer.models.dropout import apply_dropout, compute_sample_keys, hash_module_name

KEY = hash_module_name("model.layers.0.self_attn.q_proj")


def mask(
    samples: list[int], *, module: int = KEY, share: float = 0.3, seed: int = 0, features: int = 64
) -> torch.Tensor:
    x = torch.ones(len(samples), 48, features)
    return apply_dropout(x, compute_sample_keys(torch.tensor(samples), seed), module=module, drop_probability=share)


def mix_bits(bits: int) -> int:
    """Compute the finalizer of the hash with Python integers."""
    bits &= 0xFFFFFFFF
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16


@given(sample=st.integers(0, 2**40), position=st.integers(0, 47), feature=st.integers(0, 63))
def test_the_mask_is_that_of_integer_arithmetic(sample: int, position: int, feature: int) -> None:
    key = (sample & 0xFFFFFFFF) * 0x9E3779B1 + (sample >> 32) * 0x85EBCA77 & 0xFFFFFFFF
    row = mix_bits(mix_bits(key ^ KEY & 0xFFFFFFFF) + position * 0x9E3779B9)
    column = mix_bits(feature * 0x9E3779B9 + KEY)
    kept = mix_bits(row ^ column) & 0xFFFFFF >= int(0.3 * 2**24)
    assert bool(mask([sample])[0, position, feature]) == kept


def test_the_mask_of_a_sample_does_not_depend_on_its_batch() -> None:
    together = mask([5, 6, 7])
    assert torch.equal(together[1:2], mask([6]))
    assert torch.equal(together, mask([5, 6, 7]))


@pytest.mark.parametrize("change", [{"module": KEY + 1}, {"seed": 1}])
def test_other_modules_and_seeds_have_other_masks(change: dict[str, int]) -> None:
    same = (mask([5]) == mask([5], **change)).float().mean()
    assert 0.5 < same < 0.66, "two independent masks of 0.3 are equal at 0.58 of the places"


def test_neighbouring_samples_positions_and_features_are_independent() -> None:
    kept = mask(list(range(40))) - 0.7
    for dimension in range(3):
        length = kept.shape[dimension] - 1
        product = (kept.narrow(dimension, 0, length) * kept.narrow(dimension, 1, length)).mean()
        assert abs(float(product)) < 0.003, "equal masks have 0.21"


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_the_dropped_share_is_the_configured_one(share: float) -> None:
    assert float(mask(list(range(64)), share=share).mean()) == pytest.approx(1 - share, abs=0.005)


def test_a_rank_with_a_part_of_the_features_has_that_part_of_the_mask() -> None:
    x, samples = torch.ones(2, 48, 64), compute_sample_keys(torch.tensor([1, 2]), 0)
    whole = apply_dropout(x, samples, module=KEY, drop_probability=0.3)
    part = apply_dropout(x[..., 16:], samples, module=KEY, drop_probability=0.3, first_feature=16)
    assert torch.equal(part, whole[..., 16:])


def test_the_order_of_sequence_and_batch_does_not_matter() -> None:
    x, samples = torch.ones(2, 48, 64), compute_sample_keys(torch.tensor([1, 2]), 0)
    transposed = apply_dropout(x.transpose(0, 1), samples, module=KEY, drop_probability=0.3, sequence_dimension=0)
    assert torch.equal(transposed.transpose(0, 1), apply_dropout(x, samples, module=KEY, drop_probability=0.3))
