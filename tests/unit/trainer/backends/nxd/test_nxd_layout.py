"""Map stacked, repeated and padded weights of NxD to the names of Hugging Face: each value once."""

from dataclasses import replace

import pytest
import torch

from trainium_contract.models.parameters import parameter_sizes
from trainium_contract.models.shape import QueryKeyNorm
from trainium_contract.trainer.model import ModelConfig
from trainium_trainer.backends.nxd.layout.parameter_names import Projections, list_parameters, list_pieces
from trainium_trainer.backends.nxd.layout.pieces import KeyValueOrder, Piece, TensorRank
from trainium_trainer.configuration.model_shape import resolve_shape

# All numbers differ, so that a test cannot confuse them.
SHAPE = replace(
    resolve_shape(ModelConfig(), 320),
    hidden_size=24,
    intermediate_size=48,
    num_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=6,
    tie_embeddings=False,
)
MODULES = (
    "self_attn.qkv_proj.weight_qkv",
    "self_attn.o_proj.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
PARAMETERS = (
    "model.embed_tokens.weight",
    *(f"model.layers.{number}.{module}" for number in range(SHAPE.num_layers) for module in MODULES),
    "model.norm.weight",
    "lm_head.weight",
)
DIVISIONS = [(1, "trn1"), (2, "trn1"), (4, "trn1"), (8, "trn1"), (4, "trn2"), (8, "trn2")]


def ranks(size: int, order: str) -> list[TensorRank]:
    return [TensorRank(SHAPE, rank, size, KeyValueOrder(order)) for rank in range(size)]


def count_pieces(pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """Count how often each value of each whole tensor is held."""
    counts = {name: torch.zeros(size, dtype=torch.int64) for name, size in parameter_sizes(SHAPE).items()}
    for piece in pieces:
        assert counts[piece.name].shape == piece.whole
        box = tuple(slice(begin, begin + size) for begin, size in zip(piece.offsets, piece.sizes, strict=True))
        assert counts[piece.name][box].shape == piece.sizes, "the box lies within the whole"
        counts[piece.name][box] += 1
    return counts


@pytest.mark.parametrize(("size", "order"), DIVISIONS)
@pytest.mark.parametrize("shares", [2, 3, 5])
def test_division_into_equal_runs_of_rows_loses_nothing(size: int, order: str, shares: int) -> None:
    pieces = []
    for rank in ranks(size, order):
        for name in PARAMETERS:
            pieces_of_rank = rank.find_pieces(name)
            rows = -(-pieces_of_rank[-1].end // shares)
            for share in range(shares):
                parts = [piece.within(share * rows, (share + 1) * rows) for piece in pieces_of_rank]
                assert all(part.start >= 0 and part.end <= rows for part in parts if part)
                pieces += [part for part in parts if part]
    replicas = {piece.name: piece.replicas for piece in pieces}
    assert all(bool((counts == replicas[name]).all()) for name, counts in count_pieces(pieces).items())


@pytest.mark.parametrize(("size", "order"), DIVISIONS)
def test_each_rank_has_the_query_heads_that_attend_to_its_key_and_value_heads(size: int, order: str) -> None:
    group = SHAPE.num_attention_heads // SHAPE.num_key_value_heads
    for rank in ranks(size, order):
        query, key, value = rank.find_pieces("model.layers.1.self_attn.qkv_proj.weight_qkv")
        heads = range(query.offsets[0] // SHAPE.head_dim, (query.offsets[0] + query.sizes[0]) // SHAPE.head_dim)
        key_heads = range(key.offsets[0] // SHAPE.head_dim, (key.offsets[0] + key.sizes[0]) // SHAPE.head_dim)
        assert [head // group for head in heads] == [
            key_head for key_head in key_heads for _ in range(len(heads) // len(key_heads))
        ]
        assert key.offsets == value.offsets
        (output,) = rank.find_pieces("model.layers.1.self_attn.o_proj.weight")
        assert output.offsets[1] == query.offsets[0], "the output projection has the columns of the same heads"


ADAPTED_MODULES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


@pytest.mark.parametrize(("size", "order"), DIVISIONS)
@pytest.mark.parametrize("module", [*(f"model.layers.1.{name}" for name in ADAPTED_MODULES), "lm_head"])
def test_an_adapter_is_divided_like_its_projection(size: int, order: str, module: str) -> None:
    outputs, width = parameter_sizes(SHAPE)[f"{module}.weight"]
    sizes = {f"{module}.lora_A.weight": (4, width), f"{module}.lora_B.weight": (outputs, 4)}
    counts = {name: torch.zeros(whole, dtype=torch.int64) for name, whole in sizes.items()}
    for rank in ranks(size, order):
        (base,) = rank.find_pieces(f"{module}.weight")
        first, second = (rank.find_pieces(name, adapter_rank=4)[0] for name in sizes)
        for piece in (first, second):
            assert piece.whole == sizes[piece.name]
            assert piece.slice_of(counts[piece.name]).shape == piece.sizes
            piece.slice_of(counts[piece.name]).add_(1)
        assert (first.offsets[1], first.sizes[1]) == (base.offsets[1], base.sizes[1]), "A has the weight's inputs"
        assert (second.offsets[0], second.sizes[0]) == (base.offsets[0], base.sizes[0]), "B has the weight's outputs"
    for piece in (first, second):
        assert bool((counts[piece.name] == piece.replicas).all())


@pytest.mark.parametrize("projections", Projections)
@pytest.mark.parametrize(("size", "order"), DIVISIONS)
def test_the_ranks_hold_every_value_as_often_as_they_report(size: int, order: str, projections: Projections) -> None:
    shape = replace(SHAPE, family="qwen3", attention_bias=True, query_key_norm=QueryKeyNorm.EACH_HEAD)
    counts = {name: torch.zeros(whole, dtype=torch.int64) for name, whole in parameter_sizes(shape).items()}
    replicas: dict[str, int] = {}
    for number in range(size):
        rank = TensorRank(shape, number, size, KeyValueOrder(order))
        for name in list_parameters(shape, projections):
            rows = 0
            for piece in list_pieces(rank, name):
                assert piece.start == rows, "pieces are stacked"
                rows = piece.end
                piece.slice_of(counts[piece.name]).add_(1)
                replicas[piece.name] = piece.replicas
    assert replicas.keys() == counts.keys()
    for name, values in counts.items():
        assert bool((values == replicas[name]).all()), name
    for leaf in ("weight", "bias"):
        assert replicas[f"model.layers.0.self_attn.k_proj.{leaf}"] == max(1, size // SHAPE.num_key_value_heads)
        assert replicas[f"model.layers.0.self_attn.q_proj.{leaf}"] == 1
    assert replicas["model.norm.weight"] == size


@pytest.mark.parametrize(("size", "order"), DIVISIONS)
def test_a_projection_has_the_same_pieces_within_a_stack(size: int, order: str) -> None:
    for rank in ranks(size, order):
        for stack in ("self_attn.qkv_proj.weight_qkv", "mlp.gate_up_proj.weight"):
            for piece in rank.find_pieces(f"model.layers.0.{stack}"):
                assert rank.find_pieces(piece.name) == (replace(piece, start=0),)


def test_neighbours_have_different_heads_on_trn1_and_the_same_head_on_trn2() -> None:
    assert [rank.key_value_chunk for rank in ranks(8, "trn1")] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [rank.key_value_chunk for rank in ranks(8, "trn2")] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [rank.query_chunk for rank in ranks(8, "trn1")] == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_parameter_that_the_model_does_not_have_is_an_error() -> None:
    with pytest.raises(KeyError, match="q_norm"):
        ranks(1, "trn1")[0].find_pieces("model.layers.0.self_attn.q_norm.weight")
