"""PURE. The names and the order of the parameters in NxD's own checkpoints of a Llama, and what their rows are.

NxD keeps one file per rank, cut by tensor and pipeline parallelism, and with ZeRO-1 the optimizer's state by data
parallelism too: every parameter's rows padded to a multiple of the ranks and dealt out in equal runs. Its names are
those of its layers, which hold query, key and value in one weight or in three, and gate and up likewise; a checkpoint
of this trainer has whole tensors under Hugging Face's names. `pieces` gives the rows.

Guarantees:
- A number in the optimizer's state is the place of a parameter in the order of the module.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_trainer.models.state_dict import moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_trainer.backends.nxd.layout.pieces import Piece, TensorRank
    from trainium_trainer.models.shapes import ModelShape

_FUSED, _GATE_UP = "qkv_proj.weight_qkv", "gate_up_proj.weight"
_OF_FUSED = {
    "qkv_proj.weight_q": 0,
    "qkv_proj.weight_k": 1,
    "qkv_proj.weight_v": 2,
    "q_proj.weight": 0,
    "k_proj.weight": 1,
    "v_proj.weight": 2,
}
_OF_GATE_UP = {"gate_proj.weight": 0, "up_proj.weight": 1}
MOMENTS = {moment("expAvg"): "exp_avg", moment("expAvgSq"): "exp_avg_sq"}
"""Parts of the state by their names here and in NxD's files."""


class Projections(StrEnum):
    """The names of query, key and value in the tag."""

    FUSED = "fused"
    """`qkv_proj.weight_qkv`: GQAQKVColumnParallelLinear with `fuse_qkv`, as this trainer's nxd backend has it."""
    SPLIT = "split"
    """`qkv_proj.weight_q`, `weight_k`, `weight_v`: the same layer without, as NxD's example has it."""


def pieces_of(rank: TensorRank, parameter: str) -> tuple[Piece, ...]:
    """Return what a parameter of any of these spellings consists of; KeyError for an unknown name."""
    owner, _, leaf = parameter.rpartition(".")
    prefix, _, module = owner.rpartition(".")
    last = f"{module}.{leaf}"
    if last in _OF_FUSED:
        return (replace(rank.pieces(f"{prefix}.{_FUSED}")[_OF_FUSED[last]], start=0),)
    if last in _OF_GATE_UP:
        return (replace(rank.pieces(f"{prefix}.{_GATE_UP}")[_OF_GATE_UP[last]], start=0),)
    return rank.pieces(parameter)


def parameters_of(shape: ModelShape, projections: Projections) -> Iterator[str]:
    """Yield the module's parameters in the order of registration, which numbers them in the optimizer's state."""
    qkv = [_FUSED] if projections is Projections.FUSED else [f"qkv_proj.weight_{which}" for which in "qkv"]
    yield "model.embed_tokens.weight"
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight"
        yield from (f"{layer}.self_attn.{name}" for name in (*qkv, "o_proj.weight"))
        yield f"{layer}.post_attention_layernorm.weight"
        yield from (f"{layer}.mlp.{name}" for name in (_GATE_UP, "down_proj.weight"))
    yield "model.norm.weight"
    if not shape.tie_embeddings:
        yield "lm_head.weight"
