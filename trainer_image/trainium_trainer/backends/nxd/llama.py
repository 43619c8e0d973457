"""The model (`models.llama`) divided by NxD's layers, which replace its layers from outside, as in the native plan.

Query, key and value come from one coalesced projection with key/value heads repeated where ranks outnumber them, gate
and up from another (HLAT, arXiv 2404.10630, section 3.3).

Guarantees:
- `layout.pieces` describes the parameters.
- With sequence parallelism activations are [sequence / ranks, batch, hidden] between the divided regions, the layout
  that NxD's layers communicate without transposing.
- The loss is computed on divided logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_cross_entropy,
)
from neuronx_distributed.utils.activation_checkpoint import apply_activation_checkpointing
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_contract.models.shape import QueryKeyNorm
from trainium_contract.trainer.parallelism import Recompute
from trainium_trainer.models.llama import Block, Llama, RMSNorm
from trainium_trainer.models.loss import IGNORED_LABEL
from trainium_trainer.models.rope import rotate

if TYPE_CHECKING:
    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.backends.nxd.layout.pieces import TensorRank
    from trainium_trainer.models.rope import AttentionContext

_FLASH_LENGTH = 2048
_FLASH_HEAD = 128
"""NKI's kernel accepts sequences that are multiples of the first, and head widths up to the second."""


class CoreAttention(nn.Module):
    """Causal attention of projected heads, which selective recompute computes twice."""

    def __init__(self, *, flash: bool) -> None:
        super().__init__()
        self._flash = flash

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [batch, heads, sequence, width], with fewer heads in key and value, to the query's size.

        `mask` is [sequence, sequence] or [batch, 1, sequence, sequence], whether a position (next to last) attends to
        another (last); None: to all earlier ones. The library's fused kernel supports only the causal mask.
        """
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        length, width = query.shape[-2:]
        if mask is None and self._flash and length % _FLASH_LENGTH == 0 and width <= _FLASH_HEAD:
            return _compute_flash_attention(query, key, value)
        scores = query @ key.transpose(-1, -2) * width**-0.5
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32)
        mixed: Tensor = weights.to(value.dtype) @ value
        return mixed


def _compute_flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func  # noqa: PLC0415 - compiled for Neuron only

    turned = (heads.transpose(-1, -2) for heads in (query, key, value))
    mixed: Tensor = nki_flash_attn_func(*turned, causal=True, transpose_nki_inputs=True)
    return mixed


class NxdAttention(nn.Module):
    """Grouped-query attention over this rank's heads."""

    def __init__(
        self, rank: TensorRank, number: int, *, sequence_parallel: bool, flash: bool, dtype: torch.dtype
    ) -> None:
        """Create the attention of layer `number`."""
        super().__init__()
        shape = rank.shape
        query = shape.num_attention_heads * shape.head_dim
        self._head_dim, self._sequence_parallel, self._window = (
            shape.head_dim,
            sequence_parallel,
            shape.window_size(number),
        )
        self.qkv_proj = GQAQKVColumnParallelLinear(
            shape.hidden_size,
            [query, shape.num_key_value_heads * shape.head_dim],
            bias=False,
            gather_output=False,
            dtype=dtype,
            sequence_parallel_enabled=sequence_parallel,
            kv_size_multiplier=rank.key_value_copies,
            fuse_qkv=True,
        )
        if shape.attention_bias:
            # NxD's layer supports a bias, but 0.18 fails to create one (`shared_tp` is an unknown argument).
            outputs = self.qkv_proj.weight_qkv.shape[0]
            self.qkv_proj.bias_qkv = nn.Parameter(torch.empty(outputs, dtype=dtype))
        self.core = CoreAttention(flash=flash)
        self.o_proj = _create_row_linear(query, shape.hidden_size, sequence_parallel=sequence_parallel, dtype=dtype)
        self.q_norm, self.k_norm = create_head_norms(shape, dtype)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence, hidden] or [sequence part, batch, hidden] to the same shape."""
        projected = self.qkv_proj(x)
        query, key, value = (
            self._divide_into_heads(part, norm)
            for part, norm in zip(projected, (self.q_norm, self.k_norm, None), strict=True)
        )
        mask = build_mask(context, self._window)
        mixed = self.core(rotate(query, context), rotate(key, context), value, mask)
        joined = mixed.permute(2, 0, 1, 3) if self._sequence_parallel else mixed.transpose(1, 2)
        out: Tensor = self.o_proj(joined.flatten(2).contiguous())
        return out

    def _divide_into_heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """Reshape to [batch, heads, sequence, width]."""
        heads = _ContiguousGradient.apply(projected).unflatten(-1, (-1, self._head_dim))  # type: ignore[no-untyped-call]
        heads = heads if norm is None else norm(heads)
        turned: Tensor = heads.permute(1, 2, 0, 3) if self._sequence_parallel else heads.transpose(1, 2)
        return turned


def create_head_norms(shape: ModelShape, dtype: torch.dtype) -> tuple[RMSNorm | None, RMSNorm | None]:
    """Create the norms of queries and keys, if the model has them."""
    if shape.query_key_norm is QueryKeyNorm.NONE:
        return None, None
    query, key = (RMSNorm(shape, shape.head_dim).to(dtype) for _ in range(2))
    return query, key


def build_mask(context: AttentionContext, window: int | None) -> Tensor | None:
    """Return the mask of a layer with this window; None if it attends to all earlier positions."""
    return context.mask if window is None or context.windowed is None else context.windowed.mask


class NxdMLP(nn.Module):
    """The SwiGLU feed-forward layer over this rank's part of the inner width."""

    def __init__(self, shape: ModelShape, *, sequence_parallel: bool, dtype: torch.dtype) -> None:
        super().__init__()
        width = shape.intermediate_size
        self.gate_up_proj = _create_column_linear(
            shape.hidden_size, 2 * width, sequence_parallel=sequence_parallel, dtype=dtype, stride=2
        )
        self.down_proj = _create_row_linear(width, shape.hidden_size, sequence_parallel=sequence_parallel, dtype=dtype)

    def forward(self, x: Tensor, _: AttentionContext) -> Tensor:
        """Return a tensor of the size of `x`."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


def _create_column_linear(
    width: int, outputs: int, *, sequence_parallel: bool, dtype: torch.dtype, stride: int = 1
) -> nn.Module:
    """Create a projection whose outputs are divided."""
    # Without sequence parallelism the gradient of the input is summed in `dtype`: for another type, NxD 0.18 sums a
    # copy and continues with this rank's part (`_linear_autograd_bwd_grad_reduce`).
    layer: nn.Module = ColumnParallelLinear(
        width,
        outputs,
        bias=False,
        gather_output=False,
        dtype=dtype,
        stride=stride,
        reduce_dtype=torch.float32 if sequence_parallel else dtype,
        **_along_sequence(sequence_parallel),
    )
    return layer


def _create_row_linear(width: int, outputs: int, *, sequence_parallel: bool, dtype: torch.dtype) -> nn.Module:
    layer: nn.Module = RowParallelLinear(
        width, outputs, bias=False, input_is_parallel=True, dtype=dtype, **_along_sequence(sequence_parallel)
    )
    return layer


def _along_sequence(sequence_parallel: bool) -> dict[str, Any]:
    return {"sequence_parallel_enabled": True, "sequence_dimension": 0} if sequence_parallel else {}


class _ContiguousGradient(torch.autograd.Function):
    """Identity with a contiguous gradient, because NxD's linear layers call `view` on it."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def build_llama(rank: TensorRank, *, sequence_parallel: bool, flash: bool, dtype: torch.dtype) -> Llama:
    """Create this rank's part of the model on the meta device, with all parameters of type `dtype`."""
    shape = rank.shape
    with torch.device("meta"):
        model = Llama(shape).to(dtype)
        model.model.embed_tokens = ParallelEmbedding(
            shape.vocab_size, shape.hidden_size, dtype=dtype, sequence_parallel_enabled=sequence_parallel
        )
        for number, block in enumerate(model.model.layers):
            assert isinstance(block, nn.Module)
            block.self_attn = NxdAttention(rank, number, sequence_parallel=sequence_parallel, flash=flash, dtype=dtype)
            block.mlp = NxdMLP(shape, sequence_parallel=sequence_parallel, dtype=dtype)
        model.lm_head = _create_column_linear(
            shape.hidden_size, shape.vocab_size, sequence_parallel=sequence_parallel, dtype=dtype
        )  # type: ignore[assignment]
        model.tie()
    return model


def apply_recompute(model: Llama, mode: Recompute) -> None:
    """Recompute in the backward pass what `mode` selects; names of parameters change, so collect them before."""
    if mode is Recompute.NONE:
        return
    layers = model.model.layers
    trained = [
        number
        for number, block in enumerate(layers)
        if any(parameter.requires_grad for parameter in block.parameters())
    ]
    again = CoreAttention if mode is Recompute.SELECTIVE else Block
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, again))
    if mode is Recompute.FULL and trained:
        # NxD's recompute computes gradients only if an input requires one, which is not so after a frozen embedding.
        layers[trained[0]].register_forward_pre_hook(_require_gradient)


def _require_gradient(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments of a block, with a gradient required for the first one."""
    if not torch.is_grad_enabled() or args[0].requires_grad:
        return None
    return (args[0].detach().requires_grad_(), *args[1:])


def compute_loss_sum(
    model: Llama,
    tokens: Tensor,
    labels: Tensor,
    *,
    sequence_parallel: bool,
    columns: int | None = None,
    positions: Tensor | None = None,
    samples: Tensor | None = None,
) -> Tensor:
    """Return the sum of the token losses of a micro-batch, [batch, sequence], in float32; equal on all tensor ranks.

    Only the first `columns` of this rank's part of the vocabulary are tokens, if given; `positions` and `samples` as in
    `Llama`.
    """
    out = model(tokens, positions=positions, samples=samples)
    logits = _ContiguousGradient.apply(out).float()  # type: ignore[no-untyped-call]
    if columns is not None:
        is_token = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device) < columns
        logits = torch.where(is_token, logits, torch.finfo(logits.dtype).min)
    if sequence_parallel:
        labels = labels.transpose(0, 1).contiguous()
    valid = labels != IGNORED_LABEL
    losses: Tensor = parallel_cross_entropy(logits, torch.where(valid, labels, 0)) * valid
    return losses.sum()
