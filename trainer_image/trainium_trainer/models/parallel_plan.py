"""Divide a model over the tensor-parallel ranks by the list of its parameters, without changing the model's code.

Attention and feed-forward are split by columns then rows; embedding and output projection are split by vocabulary, and
logits stay divided. With more ranks than key/value heads, every rank holds the whole weights of keys and values and
computes the head that its query heads need.

Guarantees:
- Parameters are DTensors, so that FSDP and checkpoints know their offsets.
- Computation uses plain local tensors, with one communication at the entry and one at the exit of a divided region.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_contract.models.parameters import HEAD, Unit, find_parameter, layer_parameters, non_layer_parameters
from trainium_trainer.models.llama import Embedding, Linear, RMSNorm, WeightedModule
from trainium_trainer.models.lora import AdaptedLinear
from trainium_trainer.models.regions import FunctionalRegion
from trainium_trainer.models.stages import list_present_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    from trainium_contract.models.parameters import Parameter
    from trainium_trainer.models.llama import Llama


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Divide a model or a stage, before its values are set, over the one-dimensional `mesh`."""
    region = FunctionalRegion(mesh.get_group(), sequence_parallel)
    heads = model.shape.num_key_value_heads
    for layer in list_present_layers(model):
        for parameter in layer_parameters(model.shape).values():
            _divide(layer.get_submodule(parameter.module), parameter, mesh, region, key_value_heads=heads)
        for divided in (layer.self_attn, layer.mlp):
            divided.register_forward_pre_hook(lambda _, args: (region.enter(args[0]), *args[1:]))
            divided.register_forward_hook(lambda _, __, out: region.leave(out))
    for parameter in non_layer_parameters(model.shape).values():
        module = model.get_submodule(parameter.module)
        if isinstance(module, WeightedModule):  # else another stage holds it
            _divide(module, parameter, mesh, region)
    if isinstance(model.model.embed_tokens, Embedding):
        _divide_lookup(model.model.embed_tokens, mesh.get_local_rank(), region)
    if isinstance(model.lm_head, Linear):
        if model.shape.tie_embeddings:
            _divide(model.lm_head, find_parameter(model.shape, HEAD), mesh, region)
        model.head_input_transform = region.enter
    model.tie()


def _divide(
    module: nn.Module, parameter: Parameter, mesh: DeviceMesh, region: FunctionalRegion, *, key_value_heads: int = 0
) -> None:
    """Divide one parameter by its entry in the list, and the adapter of its projection.

    The matrix of an adapter at the divided side is divided likewise. The other matrix is whole, and each rank has a
    summand of its gradient, which flows back through that rank's part of the first.
    """
    assert isinstance(module, WeightedModule)
    leaf = parameter.leaf
    adapter = module if isinstance(module, AdaptedLinear) and leaf == "weight" else None
    if parameter.dimension is None:
        # A bias after a sum over the ranks is added on one rank only.
        counts = leaf != "bias" or mesh.get_local_rank() == 0
        _repeat(module, mesh, leaf, partial=parameter.summed or region.sequence_parallel, counts=counts)
        return
    if isinstance(module, RMSNorm):
        ranks = mesh.size()
        module.mean = lambda squares: (
            region.all_reduce_with_gradient(squares.sum(-1, keepdim=True)) / (squares.shape[-1] * ranks)
        )
    if parameter.unit is Unit.KEY_VALUE_HEADS and key_value_heads % mesh.size():
        width = parameter.size[0] // key_value_heads
        head = mesh.get_local_rank() * key_value_heads // mesh.size()
        rows = slice(head * width, (head + 1) * width)
        _repeat(module, mesh, leaf, partial=True, rows=rows)
        if adapter is not None:
            _repeat(adapter.lora_A, mesh, partial=True)
            _repeat(adapter.lora_B, mesh, partial=True, rows=rows)
            if adapter.lora_magnitude_vector is not None:
                _repeat(adapter.lora_magnitude_vector, mesh, partial=True, rows=rows)
    else:
        placement = Shard(parameter.dimension)
        _place(module, mesh, placement, leaf)
        if adapter is not None and parameter.dimension == 0:
            _repeat(adapter.lora_A, mesh, partial=True)
            _place(adapter.lora_B, mesh, placement)
            if adapter.lora_magnitude_vector is not None:
                _place(adapter.lora_magnitude_vector, mesh, placement)
        elif adapter is not None:
            adapter.first_feature = mesh.get_local_rank() * (adapter.in_features // mesh.size())
            adapter.input_group = mesh.get_group()
            _place(adapter.lora_A, mesh, placement)
            _repeat(adapter.lora_B, mesh, partial=True)
            if adapter.lora_magnitude_vector is not None:
                _repeat(adapter.lora_magnitude_vector, mesh, partial=True)


def _place(module: WeightedModule, mesh: DeviceMesh, placement: Placement, leaf: str = "weight") -> None:
    """Turn a parameter into a DTensor of this placement; the module computes with this rank's part."""
    parameter: Tensor = getattr(module, leaf)
    size = list(parameter.shape)
    if isinstance(placement, Shard):
        size[placement.dim] //= mesh.size()
    local = torch.empty(size, dtype=parameter.dtype, device=parameter.device)
    divided = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    setattr(module, leaf, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    _compute_with(module, leaf, _take_part)


def _repeat(
    module: WeightedModule,
    mesh: DeviceMesh,
    leaf: str = "weight",
    *,
    partial: bool,
    rows: slice | None = None,
    counts: bool = True,
) -> None:
    """Keep a parameter whole on every rank; `partial`: each rank has a summand of its gradient.

    If the parameter does not count on this rank, the rank computes with zeros.
    """
    _place(module, mesh, Replicate(), leaf)
    _compute_with(module, leaf, functools.partial(_take_part, partial=partial, rows=rows, counts=counts))


def _compute_with(module: WeightedModule, leaf: str, part: Callable[[Tensor], Tensor]) -> None:
    setattr(module, "part" if leaf == "weight" else "bias_part", part)


def _take_part(whole: Tensor, *, partial: bool = False, rows: slice | None = None, counts: bool = True) -> Tensor:
    """Return the local part of a parameter that is a DTensor."""
    assert isinstance(whole, DTensor)
    local: Tensor = whole.to_local(grad_placements=[Partial()] if partial else None)
    local = local if rows is None else local[rows]
    return local if counts else local * 0.0


def _divide_lookup(embedding: Embedding, rank: int, region: FunctionalRegion) -> None:
    """Look up this rank's part of the vocabulary, zeros for the others' tokens."""

    def look_up(tokens: Tensor) -> Tensor:
        weight = embedding.find_local_weight()
        local_ids = tokens - rank * weight.shape[0]
        is_local = (local_ids >= 0) & (local_ids < weight.shape[0])
        embedded = F.embedding(torch.where(is_local, local_ids, 0), weight)
        return region.leave(embedded * is_local.unsqueeze(-1))

    embedding.forward = look_up  # type: ignore[method-assign]
