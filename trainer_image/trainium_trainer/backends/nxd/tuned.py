"""The divided model of a run that freezes weights: NxD's division and layout, with separate regions.

NxD's layers are not made for it: its fused query/key/value layer fails on a weight without a gradient, and its LoRA
shares one A between fused projections and leaves partial gradients as they are.

Guarantees:
- Names of parameters are those of `layout.pieces`, each adapter's under Hugging Face's name of its projection.
- Query, key and value, and gate and up, are one weight and one matrix product each, unless some of them are trained and
  others are not.
- Adapters are float32 parameters, computed with in the model's type.
- They see whole sequences.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from neuronx_distributed.parallel_layers import ParallelEmbedding, parallel_state
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_contract.models.parameters import EMBEDDING, HEAD
from trainium_trainer.backends.nxd.llama import CoreAttention, mask_of
from trainium_trainer.models.llama import MLP, Attention, Linear, Llama, RMSNorm
from trainium_trainer.models.lora import AdaptedLinear
from trainium_trainer.models.rope import rotate
from trainium_trainer.tuning.apply import apply_tuning
from trainium_trainer.tuning.choice import is_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainium_contract.trainer.tuning import LoraConfig
    from trainium_trainer.backends.nxd.layout.pieces import TensorRank
    from trainium_trainer.backends.nxd.regions import NxdRegion
    from trainium_trainer.models.rope import Context
    from trainium_trainer.tuning.choice import Choice

_ATTENTION, _MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
"""All layers are divided alike."""


def tuned_llama(
    rank: TensorRank, region: NxdRegion, choice: Choice, lora: LoraConfig, *, flash: bool, dtype: torch.dtype
) -> Llama:
    """Return this rank's share of the model, on the meta device; all but the adapters of type `dtype`."""
    shape = rank.shape
    parallel_state.initialize_kv_group(rank.key_value_copies)
    with torch.device("meta"):
        model = Llama(shape).to(dtype)
        apply_tuning(model, choice, lora, frozen=dtype)
        for name, parameter in model.named_parameters():
            if not is_adapter(name):  # a projection that got an adapter was recreated
                parameter.data = parameter.data.to(dtype)
        model.model.embed_tokens = ParallelEmbedding(
            shape.vocab_size, shape.hidden_size, dtype=dtype, sequence_parallel_enabled=region.sequence
        )
        model.model.embed_tokens.weight.requires_grad_(EMBEDDING in choice.weights)
        for block in model.model.layers:
            assert isinstance(block.self_attn, Attention)
            assert isinstance(block.mlp, MLP)
            block.self_attn = TunedAttention(block.self_attn, rank, region, flash=flash)
            block.mlp = TunedMLP(block.mlp, rank, region)
        _divide(model.lm_head, HEAD.removesuffix(".weight"), rank, region)
        model.lm_head.register_forward_pre_hook(lambda _, args: (region.enter(args[0]), *args[1:]))
        model.tie()
    return model


class Stack(nn.Module):
    """Projections of one input, with one weight for all of them where all are trained or none is."""

    def __init__(self, parts: Sequence[Linear], leaf: str) -> None:
        """`parts` are divided; they stay where they are, without their weights where there is one for all."""
        super().__init__()
        self._parts = tuple(parts)  # no submodules: names are those of where they are
        self._sizes = [part.weight.shape[0] for part in parts]
        self._leaf = leaf
        trained = {part.weight.requires_grad for part in parts}
        joined = torch.cat([part.weight.detach() for part in parts]) if len(trained) == 1 else None
        self.register_parameter(leaf, None if joined is None else nn.Parameter(joined, requires_grad=trained.pop()))
        if joined is not None:
            for part in parts:
                part.register_parameter("weight", None)

    def forward(self, x: Tensor, context: Context) -> list[Tensor]:
        """[..., width] to the outputs of each, adapters included."""
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
            output + part.added(x, context) if isinstance(part, AdaptedLinear) else output
            for part, output in zip(self._parts, outputs, strict=True)
        ]


class TunedAttention(nn.Module):
    """Grouped-query attention over this rank's heads."""

    def __init__(self, whole: Attention, rank: TensorRank, region: NxdRegion, *, flash: bool) -> None:
        super().__init__()
        self._head_dim, self._region = whole.head_dim, region
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _divide(projection, f"{_ATTENTION}.{name}", rank, region)
            for name, projection in (
                ("q_proj", whole.q_proj),
                ("k_proj", whole.k_proj),
                ("v_proj", whole.v_proj),
                ("o_proj", whole.o_proj),
            )
        )
        self.qkv_proj = Stack((self.q_proj, self.k_proj, self.v_proj), "weight_qkv")
        self.core = CoreAttention(flash=flash)
        self.q_norm, self.k_norm, self._window = whole.q_norm, whole.k_norm, whole.window

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden], or [sequence part, batch, hidden], to the same."""
        projected = self.qkv_proj(self._region.enter(x), context)
        query, key, value = (
            self._heads(each, norm) for each, norm in zip(projected, (self.q_norm, self.k_norm, None), strict=True)
        )
        mask = mask_of(context, self._window)
        mixed = self.core(rotate(query, context), rotate(key, context), value, mask)
        joined = mixed.permute(2, 0, 1, 3) if self._region.sequence else mixed.transpose(1, 2)
        return self._region.leave(self.o_proj(joined.flatten(2), context))

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """To [batch, heads, sequence, width]."""
        heads = projected.reshape(*projected.shape[:2], -1, self._head_dim)
        heads = heads if norm is None else norm(heads)
        return heads.permute(1, 2, 0, 3) if self._region.sequence else heads.transpose(1, 2)


class TunedMLP(nn.Module):
    """SwiGLU feed-forward over this rank's share of the inner width."""

    def __init__(self, whole: MLP, rank: TensorRank, region: NxdRegion) -> None:
        super().__init__()
        self._region = region
        self.gate_proj = _divide(whole.gate_proj, f"{_MLP}.gate_proj", rank, region)
        self.up_proj = _divide(whole.up_proj, f"{_MLP}.up_proj", rank, region)
        self.down_proj = _divide(whole.down_proj, f"{_MLP}.down_proj", rank, region)
        self.gate_up_proj = Stack((self.gate_proj, self.up_proj), "weight")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return a tensor of the size of `x`."""
        gate, up = self.gate_up_proj(self._region.enter(x), context)
        return self._region.leave(self.down_proj(F.silu(gate) * up, context))


def _divide(projection: Linear, name: str, rank: TensorRank, region: NxdRegion) -> Linear:
    """Keep this rank's run of the outputs or the inputs; of an adapter the half on that side is divided with it."""
    cut = rank.cut(f"{name}.weight")
    dtype = projection.weight.dtype
    if isinstance(projection, AdaptedLinear):
        half = projection.lora_A if cut.dimension else projection.lora_B
        half.weight = _run(half.weight, cut.dimension, cut.length)
        projection.lora_A.part = projection.lora_B.part = functools.partial(_as_type, dtype=dtype)
        projection.first_feature = cut.offset if cut.dimension else 0
        projection.sequence_dimension = 0 if region.sequence else 1
    projection.weight = _run(projection.weight, cut.dimension, cut.length)
    if projection.bias is not None:  # of outputs, which are divided
        projection.bias = _run(projection.bias, 0, cut.length)
    return projection


def _run(weight: Tensor, dimension: int, length: int) -> nn.Parameter:
    """Return a parameter without values of the size of a run; on the meta device as the whole is."""
    return nn.Parameter(weight.detach().narrow(dimension, 0, length).clone(), requires_grad=weight.requires_grad)


def _as_type(weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)
