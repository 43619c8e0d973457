"""Draw any box of the initial weights at the cost of its size, with distinct seeds for all tiles."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.testing.suite.trials import trials
from trainium_contract.models.families import PRESETS
from trainium_contract.models.parameters import parameter_sizes
from trainium_contract.trainer.model import ModelConfig
from trainium_trainer.configuration.model_shape import resolve_shape
from trainium_trainer.models import initialization
from trainium_trainer.models.initialization import draw_initial_slice, draw_initial_tensor

SHAPE = resolve_shape(ModelConfig(num_layers=3, hidden_size=288, intermediate_size=520), 200)
DOWN = "model.layers.2.mlp.down_proj.weight"
EXPECTED_SEEDS = [3316028686, 2151683157, 211354043]


@settings(max_examples=trials(40))
@given(st.data())
def test_a_box_has_the_values_of_the_whole_tensor_at_its_offsets(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name, size in parameter_sizes(SHAPE).items() if len(size) == 2]))
    size = parameter_sizes(SHAPE)[name]
    offsets = [data.draw(st.integers(0, length)) for length in size]
    sizes = [data.draw(st.integers(0, length - first)) for length, first in zip(size, offsets, strict=True)]
    full = draw_initial_tensor(name, size, seed=5, shape=SHAPE)
    part = full[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]]
    assert torch.equal(draw_initial_slice(name, offsets, sizes, seed=5, shape=SHAPE), part)


def test_rows_that_pad_a_vocabulary_change_no_other_number() -> None:
    padded = replace(SHAPE, vocab_size=256, vocab_padding=56)
    for name, size in parameter_sizes(SHAPE).items():
        wider = draw_initial_tensor(name, parameter_sizes(padded)[name], seed=1, shape=padded)
        assert torch.equal(wider[: size[0]], draw_initial_tensor(name, size, seed=1, shape=SHAPE)), name


def test_initial_weights_have_the_scale_of_hlat_and_follow_the_seed() -> None:
    size = parameter_sizes(SHAPE)
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    values = draw_initial_tensor(up, size[up], seed=0, shape=SHAPE)
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    assert values.mean().abs() < 2e-4
    assert draw_initial_tensor(down, size[down], seed=0, shape=SHAPE).std().item() == pytest.approx(
        0.02 / (2 * SHAPE.num_layers) ** 0.5, rel=0.02
    )
    assert not torch.equal(values, draw_initial_tensor(up, size[up], seed=1, shape=SHAPE))
    assert torch.equal(draw_initial_tensor("model.norm.weight", (3,), seed=0, shape=SHAPE), torch.ones(3))


def test_no_two_tiles_of_the_largest_model_have_one_seed() -> None:
    shape = PRESETS["Llama2-70B"]
    rows, columns = initialization.TILE
    seeds = set()
    count = 0
    for name, size in parameter_sizes(shape).items():
        if len(size) == 2 and name.startswith(("model.layers.7.", "model.layers.79.", "model.embed", "lm_head")):
            tiles = -(-size[0] // rows) * -(-size[1] // columns)
            seeds |= {
                initialization._tile_seed(3, initialization._find_parameter_index(name, shape), tile)
                for tile in range(tiles)
            }
            count += tiles
    assert len(seeds) == count > 100_000


def test_the_initial_weights_of_version_2_do_not_change() -> None:
    # A run that failed before its first checkpoint restarts with them, perhaps in a newer image.
    full = draw_initial_tensor(DOWN, parameter_sizes(SHAPE)[DOWN], seed=7, shape=SHAPE)
    seeds = [initialization._tile_seed(7, initialization._find_parameter_index(DOWN, SHAPE), tile) for tile in range(3)]
    assert seeds == EXPECTED_SEEDS
    assert full.shape == (288, 520)
    assert full[:64, :256].equal(
        torch.empty(64, 256).normal_(
            0.0, 0.02 / (2 * 3) ** 0.5, generator=torch.Generator().manual_seed(EXPECTED_SEEDS[0])
        )
    )


def test_a_rank_draws_only_the_tiles_of_its_box(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_tiles = []
    tile_seed = initialization._tile_seed

    def record_tile(*numbers: int) -> int:
        drawn_tiles.append(numbers)
        return tile_seed(*numbers)

    monkeypatch.setattr(initialization, "_tile_seed", record_tile)
    shape = PRESETS["Llama2-70B"]
    name, share = "model.layers.3.mlp.down_proj.weight", 28672 // 32
    draw_initial_slice(name, (0, 31 * share), (256, share), seed=0, shape=shape)
    numbers = len(drawn_tiles) * initialization.TILE[0] * initialization.TILE[1]
    assert numbers <= 256 * (share + initialization.TILE[1])
