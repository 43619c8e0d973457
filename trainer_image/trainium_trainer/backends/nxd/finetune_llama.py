"""The divided model of a run that freezes weights: NxD's division and layout, with separate regions.

NxD's layers do not support it: its fused query/key/value layer fails on a weight without a gradient, and its LoRA
shares one A between fused projections and does not sum partial gradients.

Guarantees:
- Names of parameters are those of `layout.pieces`, each adapter's under Hugging Face's name of its projection.
- Query, key and value, and gate and up, are one weight and one matrix product each, unless some of them are trained and
  others are not.
- Adapters are float32 parameters; computation uses the model's type.
- Their inputs are whole sequences.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from neuronx_distributed.parallel_layers import ParallelEmbedding, parallel_state
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_contract.models.parameters import EMBEDDING, HEAD
from trainium_trainer.backends.nxd.llama import CoreAttention, build_mask
from trainium_trainer.models.llama import MLP, Attention, Linear, Llama, RMSNorm
from trainium_trainer.models.lora import AdaptedLinear
from trainium_trainer.models.rope import rotate
from trainium_trainer.tuning.apply import apply_tuning
from trainium_trainer.tuning.trainable import is_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.trainer.tuning import LoraConfig
    from trainium_trainer.backends.nxd.layout.pieces import TensorRank
    from trainium_trainer.backends.nxd.regions import NxdRegion
    from trainium_trainer.models.rope import AttentionContext
    from trainium_trainer.tuning.trainable import TrainableParameters

_ATTENTION, _MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
"""All layers are divided alike."""


def build_finetune_llama(
    rank: TensorRank,
    region: NxdRegion,
    trainable: TrainableParameters,
    lora: LoraConfig,
    *,
    flash: bool,
    dtype: torch.dtype,
) -> Llama:
    """Create this rank's part of the model on the meta device; all parameters but adapters have type `dtype`."""
    shape = rank.shape
    parallel_state.initialize_kv_group(rank.key_value_copies)
    with torch.device("meta"):
        model = Llama(shape).to(dtype)
        apply_tuning(model, trainable, lora, frozen=dtype)
        for name, parameter in model.named_parameters():
            if not is_adapter(name):  # a projection with an adapter is a new module
                parameter.data = parameter.data.to(dtype)
        model.model.embed_tokens = ParallelEmbedding(
            shape.vocab_size, shape.hidden_size, dtype=dtype, sequence_parallel_enabled=region.sequence_parallel
        )
        model.model.embed_tokens.weight.requires_grad_(EMBEDDING in trainable.weights)
        for block in model.model.layers:
            assert isinstance(block.self_attn, Attention)
            assert isinstance(block.mlp, MLP)
            block.self_attn = FinetuneAttention(block.self_attn, rank, region, flash=flash)
            block.mlp = FinetuneMLP(block.mlp, rank, region)
        _shard_projection(model.lm_head, HEAD.removesuffix(".weight"), rank, region)
        model.lm_head.register_forward_pre_hook(lambda _, args: (region.enter(args[0]), *args[1:]))
        model.tie()
    return model


class FusedProjections(nn.Module):
    """Projections of one input, with one weight for all of them if all or none are trained."""

    def __init__(self, parts: Sequence[Linear], leaf: str) -> None:
        """Stack the divided `parts`; the modules stay in place, without their weights if one is shared."""
        super().__init__()
        self._parts = tuple(parts)  # not registered as submodules, so that names do not change
        self._sizes = [part.weight.shape[0] for part in parts]
        self._leaf = leaf
        trained = {part.weight.requires_grad for part in parts}
        joined = torch.cat([part.weight.detach() for part in parts]) if len(trained) == 1 else None
        self.register_parameter(leaf, None if joined is None else nn.Parameter(joined, requires_grad=trained.pop()))
        if joined is not None:
            for part in parts:
                part.register_parameter("weight", None)

    def forward(self, x: Tensor, context: AttentionContext) -> list[Tensor]:
        """Map [..., width] to the outputs of each projection, adapters included."""
        weight: Tensor | None = getattr(self, self._leaf)
        if weight is None:
            outputs = [F.linear(x, part.weight) for part in self._parts]
        else:
            outputs = list(torch.split(F.linear(x, weight), self._sizes, dim=-1))
        outputs = [
            output if part.bias is None else output + part.bias
            for part, output in zip(self._parts, outputs, strict=True)
        ]
        return [
            output + part.compute_adapter_output(x, context) if isinstance(part, AdaptedLinear) else output
            for part, output in zip(self._parts, outputs, strict=True)
        ]


class FinetuneAttention(nn.Module):
    """Grouped-query attention over this rank's heads."""

    def __init__(self, attention: Attention, rank: TensorRank, region: NxdRegion, *, flash: bool) -> None:
        super().__init__()
        self._head_dim, self._region = attention.head_dim, region
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _shard_projection(projection, f"{_ATTENTION}.{name}", rank, region)
            for name, projection in (
                ("q_proj", attention.q_proj),
                ("k_proj", attention.k_proj),
                ("v_proj", attention.v_proj),
                ("o_proj", attention.o_proj),
            )
        )
        self.qkv_proj = FusedProjections((self.q_proj, self.k_proj, self.v_proj), "weight_qkv")
        self.core = CoreAttention(flash=flash)
        self.q_norm, self.k_norm, self._window = attention.q_norm, attention.k_norm, attention.window

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence, hidden], or [sequence part, batch, hidden], to the same shape."""
        projected = self.qkv_proj(self._region.enter(x), context)
        query, key, value = (
            self._divide_into_heads(part, norm)
            for part, norm in zip(projected, (self.q_norm, self.k_norm, None), strict=True)
        )
        mask = build_mask(context, self._window)
        mixed = self.core(rotate(query, context), rotate(key, context), value, mask)
        joined = mixed.permute(2, 0, 1, 3) if self._region.sequence_parallel else mixed.transpose(1, 2)
        return self._region.leave(self.o_proj(joined.flatten(2), context))

    def _divide_into_heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """To [batch, heads, sequence, width]."""
        heads = projected.reshape(*projected.shape[:2], -1, self._head_dim)
        heads = heads if norm is None else norm(heads)
        return heads.permute(1, 2, 0, 3) if self._region.sequence_parallel else heads.transpose(1, 2)


class FinetuneMLP(nn.Module):
    """SwiGLU feed-forward over this rank's share of the inner width."""

    def __init__(self, mlp: MLP, rank: TensorRank, region: NxdRegion) -> None:
        super().__init__()
        self._region = region
        self.gate_proj = _shard_projection(mlp.gate_proj, f"{_MLP}.gate_proj", rank, region)
        self.up_proj = _shard_projection(mlp.up_proj, f"{_MLP}.up_proj", rank, region)
        self.down_proj = _shard_projection(mlp.down_proj, f"{_MLP}.down_proj", rank, region)
        self.gate_up_proj = FusedProjections((self.gate_proj, self.up_proj), "weight")

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return a tensor of the size of `x`."""
        gate, up = self.gate_up_proj(self._region.enter(x), context)
        return self._region.leave(self.down_proj(F.silu(gate) * up, context))


def _shard_projection(projection: Linear, name: str, rank: TensorRank, region: NxdRegion) -> Linear:
    """Keep this rank's chunk of the outputs or the inputs; the half of an adapter on that side is divided too."""
    cut = rank.divide(f"{name}.weight")
    dtype = projection.weight.dtype
    if isinstance(projection, AdaptedLinear):
        half = projection.lora_A if cut.dimension else projection.lora_B
        half.weight = _create_empty_chunk(half.weight, cut.dimension, cut.length)
        projection.lora_A.part = projection.lora_B.part = functools.partial(_convert_weight, dtype=dtype)
        projection.first_feature = cut.offset if cut.dimension else 0
        projection.sequence_dimension = 0 if region.sequence_parallel else 1
    projection.weight = _create_empty_chunk(projection.weight, cut.dimension, cut.length)
    if projection.bias is not None:  # of outputs, which are divided
        projection.bias = _create_empty_chunk(projection.bias, 0, cut.length)
    return projection


def _create_empty_chunk(weight: Tensor, dimension: int, length: int) -> nn.Parameter:
    """Return a parameter without values of the size of a chunk, on the meta device like the whole."""
    return nn.Parameter(weight.detach().narrow(dimension, 0, length).clone(), requires_grad=weight.requires_grad)


def _convert_weight(weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)
