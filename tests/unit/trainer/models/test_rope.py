"""The rotary embedding's frequencies, against the published rule written down a second time."""

from __future__ import annotations

import math

import pytest
import torch

from trainium_contract.trainer.model import ModelConfig, ModelPreset
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models.rope import inverse_frequencies, rotary

CPU = torch.device("cpu")


def frequencies(**fields: object) -> list[float]:
    shape = resolve_shape(ModelConfig.model_validate(fields), 100)
    values: list[float] = inverse_frequencies(shape, CPU).double().tolist()
    return values


@pytest.mark.parametrize(
    ("preset", "factor"),
    [(ModelPreset.LLAMA31_8B, 8.0), (ModelPreset.LLAMA31_70B, 8.0), (ModelPreset.LLAMA32_1B, 32.0)],
)
def test_llama_3_1_slows_long_waves_and_keeps_short_ones(preset: ModelPreset, factor: float) -> None:
    width = 64 if preset is ModelPreset.LLAMA32_1B else 128
    expected = []
    for pair in range(width // 2):
        plain = 500_000 ** (-2 * pair / width)
        wave = 2 * math.pi / plain
        if wave < 8192 / 4:
            expected.append(plain)
        elif wave > 8192 / 1:
            expected.append(plain / factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            expected.append((1 - smooth) * plain / factor + smooth * plain)
    found = frequencies(preset=preset)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[0] == 1.0
    ratios = {pair: found[pair] * 500_000 ** (2 * pair / width) for pair in (1, width // 2 - 1)}
    assert ratios == pytest.approx({1: 1.0, width // 2 - 1: 1 / factor}, rel=1e-5)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = frequencies()
    slow = frequencies(ropeScaling={"kind": "Linear", "factor": 4.0})
    assert slow == pytest.approx([value / 4 for value in plain], rel=1e-6)


def test_the_table_has_one_row_per_position_and_starts_unrotated() -> None:
    cos, sin, *_ = rotary(resolve_shape(ModelConfig(), 100), 7, CPU)
    assert cos.shape == sin.shape == (7, 24)
    assert cos[0].eq(1).all()
    assert sin[0].eq(0).all()
