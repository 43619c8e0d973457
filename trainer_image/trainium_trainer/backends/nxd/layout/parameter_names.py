"""The names, order and rows of the parameters in NxD's checkpoints. Pure.

NxD keeps one file per rank, cut by tensor and pipeline parallelism, and with ZeRO-1 the optimizer's state by data
parallelism too: every parameter's rows are padded to a multiple of the ranks and divided into equal chunks. Its names
are those of its layers, which hold query, key and value in one weight or in three, and gate and up likewise; a
checkpoint of this trainer has whole tensors under Hugging Face's names. `pieces` describes the rows.

Guarantees:
- An index in the optimizer's state is the position of a parameter in the order of the module.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.models.parameters import parameter_sizes
from trainium_trainer.models.state_dict import find_moment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.backends.nxd.layout.pieces import Piece, TensorRank

_GATE_UP = "gate_up_proj.weight"
_SINGLE = {
    f"{module}.{leaf}{suffix}": (f"qkv_proj.{leaf}_qkv", number)
    for number, which in enumerate("qkv")
    for leaf in ("weight", "bias")
    for module, suffix in (("qkv_proj", f"_{which}"), (f"{which}_proj", ""))
} | {"gate_proj.weight": (_GATE_UP, 0), "up_proj.weight": (_GATE_UP, 1)}
"""Parameters of one projection: the stacked parameter that contains it here, and its index there."""
MOMENTS = {find_moment("expAvg"): "exp_avg", find_moment("expAvgSq"): "exp_avg_sq"}
"""The moments by their names here and in NxD's files."""


class Projections(StrEnum):
    """The names of query, key and value in the tag."""

    FUSED = "fused"
    """`qkv_proj.weight_qkv`: GQAQKVColumnParallelLinear with `fuse_qkv`, as in this trainer's nxd backend."""
    SPLIT = "split"
    """`qkv_proj.weight_q`, `weight_k`, `weight_v`: the same layer without `fuse_qkv`, as in NxD's example."""


def list_pieces(rank: TensorRank, parameter: str) -> tuple[Piece, ...]:
    """Return the projections in a parameter of any of these names. Raises KeyError for an unknown name."""
    prefix, last = _split(parameter)
    if last not in _SINGLE:
        return rank.find_pieces(parameter)
    stack, number = _SINGLE[last]
    return (replace(rank.find_pieces(f"{prefix}.{stack}")[number], start=0),)


def list_parameters(shape: ModelShape, projections: Projections) -> Iterator[str]:
    """Yield the module's parameters in the order of registration, which numbers them in the optimizer's state."""
    endings = ("qkv",) if projections is Projections.FUSED else tuple("qkv")
    joined = {f"q_proj.{leaf}": [f"qkv_proj.{leaf}_{end}" for end in endings] for leaf in ("weight", "bias")}
    joined["gate_proj.weight"] = [_GATE_UP]
    for name in parameter_sizes(shape):
        owner, last = _split(name)
        if last in joined:
            yield from (f"{owner}.{joined_leaf}" for joined_leaf in joined[last])
        elif last not in _SINGLE:
            yield name


def _split(parameter: str) -> tuple[str, str]:
    """Return the name of the parent module, and the rest, such as `q_proj.weight`."""
    parts = parameter.split(".")
    return ".".join(parts[:-2]), ".".join(parts[-2:])
