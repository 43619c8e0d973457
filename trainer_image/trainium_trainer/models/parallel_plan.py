"""Divide a Llama over the tensor-parallel ranks, from outside of the model.

Invariants: parameters are DTensors, so that their place in the whole is known to FSDP and to checkpoints; computation
is on plain local tensors, with one communication where a divided region is entered and one where it is left. Attention
and feed-forward are split by columns then rows; embedding and output projection are split by vocabulary, and logits
stay divided. With more ranks than key/value heads, the weights of keys and values are whole on every rank, of which
each computes the head that its query heads need.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_trainer.models.llama import Embedding, Linear, RMSNorm
from trainium_trainer.models.lora import AdaptedLinear
from trainium_trainer.models.regions import Region
from trainium_trainer.models.stages import present_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_trainer.models.llama import Attention, Block, Llama

_COLUMNS, _ROWS = Shard(0), Shard(1)


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divide a model or a stage, without values yet, over the one-dimensional `mesh`."""
    region = Region(mesh.get_group(), sequence)
    for layer in present_layers(model):
        _divide_layer(layer, mesh, region)
    if isinstance(model.model.embed_tokens, Embedding):
        _place(model.model.embed_tokens, mesh, _COLUMNS)
        _divide_lookup(model.model.embed_tokens, mesh.get_local_rank(), region)
    if isinstance(model.model.norm, RMSNorm):
        _repeat(model.model.norm, mesh, partial=sequence)
    if isinstance(model.lm_head, Linear):
        _divide_columns(model.lm_head, mesh)
        model.lm_head.register_forward_pre_hook(lambda _, args: (region.enter(args[0]), *args[1:]))
    model.tie()


def _divide_layer(layer: Block, mesh: DeviceMesh, region: Region) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for projection in (attention.q_proj, mlp.gate_proj, mlp.up_proj):
        _divide_columns(projection, mesh)
    for projection in (attention.o_proj, mlp.down_proj):
        _divide_rows(projection, mesh)
    _divide_key_value(attention, mesh)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        _repeat(norm, mesh, partial=region.sequence)
    for divided in (attention, mlp):
        divided.register_forward_pre_hook(lambda _, args: (region.enter(args[0]), *args[1:]))
        divided.register_forward_hook(lambda _, __, out: region.leave(out))


def _divide_key_value(attention: Attention, mesh: DeviceMesh) -> None:
    for projection in (attention.k_proj, attention.v_proj):
        heads = projection.out_features // attention.head_dim
        if heads % mesh.size() == 0:
            _divide_columns(projection, mesh)
            continue
        head = mesh.get_local_rank() * heads // mesh.size()
        rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
        _repeat(projection, mesh, partial=True, rows=rows)
        if isinstance(projection, AdaptedLinear):
            _repeat(projection.lora_A, mesh, partial=True)
            _repeat(projection.lora_B, mesh, partial=True, rows=rows)


def _divide_columns(projection: Linear, mesh: DeviceMesh) -> None:
    """Divide the outputs.

    Of an adapter B is divided likewise; A is whole, and each rank has a summand of its gradient: what flows back
    through that rank's part of B.
    """
    _place(projection, mesh, _COLUMNS)
    if isinstance(projection, AdaptedLinear):
        _repeat(projection.lora_A, mesh, partial=True)
        _place(projection.lora_B, mesh, _COLUMNS)


def _divide_rows(projection: Linear, mesh: DeviceMesh) -> None:
    """Divide the inputs.

    Of an adapter A is divided likewise; B is whole, and since the ranks' outputs are summed, each has a summand of its
    gradient: that of its part of A's output.
    """
    _place(projection, mesh, _ROWS)
    if isinstance(projection, AdaptedLinear):
        projection.first_feature = mesh.get_local_rank() * (projection.in_features // mesh.size())
        _place(projection.lora_A, mesh, _ROWS)
        _repeat(projection.lora_B, mesh, partial=True)


def _place(module: Linear | Embedding | RMSNorm, mesh: DeviceMesh, placement: Placement) -> None:
    """Make the weight a DTensor of this placement; the module computes with this rank's part."""
    whole = module.weight
    size = list(whole.shape)
    if isinstance(placement, Shard):
        size[placement.dim] //= mesh.size()
    local = torch.empty(size, dtype=whole.dtype, device=whole.device)
    divided = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    module.weight = nn.Parameter(divided, requires_grad=whole.requires_grad)
    module.part = _part


def _repeat(module: Linear | RMSNorm, mesh: DeviceMesh, *, partial: bool, rows: slice | None = None) -> None:
    """Keep the weight whole on every rank; `partial`: each rank has a summand of its gradient."""
    _place(module, mesh, Replicate())
    module.part = functools.partial(_part, partial=partial, rows=rows)


def _part(weight: Tensor, *, partial: bool = False, rows: slice | None = None) -> Tensor:
    """Return the local part of a weight that is a DTensor."""
    assert isinstance(weight, DTensor)
    local: Tensor = weight.to_local(grad_placements=[Partial()] if partial else None)
    return local if rows is None else local[rows]


def _divide_lookup(embedding: Embedding, rank: int, region: Region) -> None:
    """Look up this rank's part of the vocabulary, zeros for the others' tokens."""

    def look_up(tokens: Tensor) -> Tensor:
        weight = embedding.own_weight()
        here = tokens - rank * weight.shape[0]
        own = (here >= 0) & (here < weight.shape[0])
        found = F.embedding(torch.where(own, here, 0), weight)
        return region.leave(found * own.unsqueeze(-1))

    embedding.forward = look_up  # type: ignore[method-assign]
