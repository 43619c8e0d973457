"""Llama and the families that descend from it, written for one device.

RMSNorm, rotary embedding, grouped-query attention, SwiGLU. The differences between a family and Llama are fields of its
shape: biases, a window of attention, norms of queries and keys, norms after the branches or at both ends, layers
without rotation, multipliers.

Guarantees:
- Parameters are those of `trainium_contract.models.parameters`, under Hugging Face's names.
- The modules do not depend on parallelism, so a plan can be applied from outside: the number of heads follows from the
  tensors, not from the shape.
- Initial weights depend only on the seed and the parameter's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_contract.models.shape import Activation, NormPlacement, QueryKeyNorm
from trainium_trainer.models.linear import apply_linear
from trainium_trainer.models.rope import build_context, rotate, select_positions, select_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.models.loss import LossOfHidden
    from trainium_trainer.models.rope import AttentionContext


class WeightedModule(nn.Module):
    """A module with a weight; a parallel plan may restrict it to a part of the weight."""

    weight: Tensor
    part: Callable[[Tensor], Tensor] | None = None
    """Set by a plan: maps the weight to the tensor that this rank computes with."""

    def find_local_weight(self) -> Tensor:
        """Return the weight that this rank computes with."""
        return self.weight if self.part is None else self.part(self.weight)

    def reset_parameters(self) -> None:
        """Leave the values undefined: a seed or a checkpoint sets them later.

        Torch's initialization would also run on the meta device, where it imports the compiler stack (3 s).
        """


class Linear(WeightedModule, nn.Linear):
    """A projection."""

    bias_part: Callable[[Tensor], Tensor] | None = None
    """Maps the bias as `part` maps the weight."""

    def __init__(self, width: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(width, outputs, bias=bias)

    def forward(self, x: Tensor, _: AttentionContext | None = None) -> Tensor:
        """Map [..., width] to [..., outputs]; the context is for projections with an adapter."""
        return self.add_bias(apply_linear(x, self.find_local_weight()))

    def add_bias(self, out: Tensor) -> Tensor:
        """Add the bias, if there is one, to an output."""
        if self.bias is None:
            return out
        bias = self.bias if self.bias_part is None else self.bias_part(self.bias)
        return out + bias.to(out.dtype)


class Embedding(WeightedModule, nn.Embedding):
    """A table with one row per token."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [...] ids to [..., width]."""
        return F.embedding(tokens, self.find_local_weight())


class RMSNorm(WeightedModule):
    """Root-mean-square normalization (arXiv 1910.07467), computed in float32."""

    mean: Callable[[Tensor], Tensor] | None = None
    """Set by a plan that divides the width: maps this rank's squares to the mean over all ranks."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = shape.norm_eps
        self.is_centered = shape.has_centered_norms

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        wide = x.float()
        squares = wide.pow(2)
        mean = squares.mean(-1, keepdim=True) if self.mean is None else self.mean(squares)
        wide = wide * torch.rsqrt(mean + self.eps)
        weight = self.find_local_weight()
        return (wide * (weight.float() + 1.0 if self.is_centered else weight)).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; the number of local heads follows from the projections' outputs."""

    context_parallel: Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor] | None = None
    """Set by a plan that divides the sequence: maps this rank's queries, keys and values to their attention."""

    def __init__(self, shape: ModelShape, number: int = 0) -> None:
        """Create the projections of layer `number`."""
        super().__init__()
        self.head_dim = shape.head_dim
        self.scale = shape.attention_multiplier
        self.window = shape.window_size(number)
        self.is_rotated = shape.is_rotated(number)
        self.norms_each_head = shape.query_key_norm is QueryKeyNorm.EACH_HEAD
        query = shape.num_attention_heads * shape.head_dim
        key_value = shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, query, bias=shape.attention_bias)
        self.k_proj = Linear(shape.hidden_size, key_value, bias=shape.attention_bias)
        self.v_proj = Linear(shape.hidden_size, key_value, bias=shape.attention_bias)
        self.o_proj = Linear(query, shape.hidden_size, bias=shape.output_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if shape.query_key_norm is not QueryKeyNorm.NONE:
            self.q_norm = RMSNorm(shape, shape.head_dim if self.norms_each_head else query)
            self.k_norm = RMSNorm(shape, shape.head_dim if self.norms_each_head else key_value)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence, hidden] to the same shape."""
        batch, length, _ = x.shape
        query = self.divide_into_heads(self.q_proj(x, context), self.q_norm)
        key = self.divide_into_heads(self.k_proj(x, context), self.k_norm)
        value = self.divide_into_heads(self.v_proj(x, context))
        table = context if self.window is None or context.windowed is None else context.windowed
        if self.is_rotated:
            query, key = rotate(query, table), rotate(key, table)
        if table.query_scale is not None:
            query = query * table.query_scale.to(query.dtype)
        if self.context_parallel is not None:
            mixed = self.context_parallel(query, key, value, table)
        else:
            # Torch selects the kernel of the device: flash attention on CPU and CUDA, the vendor's on Neuron.
            mixed = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=table.mask,
                is_causal=table.mask is None,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1), context)
        return out

    def divide_into_heads(self, projected: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Reshape [batch, sequence, heads x width] to [batch, heads, sequence, width], normalized before or after."""
        if norm is not None and not self.norms_each_head:
            projected = norm(projected)
        heads = projected.view(*projected.shape[:2], -1, self.head_dim)
        if norm is not None and self.norms_each_head:
            heads = norm(heads)
        return heads.transpose(1, 2)


class MLP(nn.Module):
    """The gated feed-forward layer: SwiGLU, or GEGLU by the shape's activation."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.activation = shape.activation
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence, hidden] to the same shape."""
        gate = self.gate_proj(x, context)
        gate = F.silu(gate) if self.activation is Activation.SILU else F.gelu(gate, approximate="tanh")
        out: Tensor = self.down_proj(gate * self.up_proj(x, context), context)
        return out


class Block(nn.Module):
    """One transformer layer with pre-normalization and two residual branches."""

    def __init__(self, shape: ModelShape, number: int = 0) -> None:
        super().__init__()
        self.multiplier = shape.residual_multiplier
        self.input_layernorm = RMSNorm(shape, shape.hidden_size)
        self.self_attn = Attention(shape, number)
        self.post_attention_layernorm = RMSNorm(shape, shape.hidden_size)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence, hidden] to the same shape."""
        x = x + self.scale(self.self_attn(self.input_layernorm(x), context))
        return x + self.scale(self.mlp(self.post_attention_layernorm(x), context))

    def scale(self, branch: Tensor) -> Tensor:
        """Scale the output of a branch for the residual stream."""
        return branch if self.multiplier == 1.0 else branch * self.multiplier


class PostNormBlock(Block):
    """One transformer layer that normalizes the outputs of its branches (OLMo 2, arXiv 2501.00656, section 3.1)."""

    def __init__(self, shape: ModelShape, number: int = 0) -> None:
        super().__init__(shape, number)
        del self.input_layernorm
        self.post_feedforward_layernorm = RMSNorm(shape, shape.hidden_size)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence, hidden] to the same shape."""
        x = x + self.scale(self.post_attention_layernorm(self.self_attn(x, context)))
        return x + self.scale(self.post_feedforward_layernorm(self.mlp(x, context)))


class SandwichNormBlock(Block):
    """One transformer layer that normalizes inputs and outputs of its branches (Gemma 3, arXiv 2503.19786)."""

    def __init__(self, shape: ModelShape, number: int = 0) -> None:
        super().__init__(shape, number)
        self.pre_feedforward_layernorm = RMSNorm(shape, shape.hidden_size)
        self.post_feedforward_layernorm = RMSNorm(shape, shape.hidden_size)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence, hidden] to the same shape."""
        x = x + self.scale(self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), context)))
        return x + self.scale(self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), context)))


_BLOCKS = {
    NormPlacement.INPUTS: Block,
    NormPlacement.OUTPUTS: PostNormBlock,
    NormPlacement.BOTH: SandwichNormBlock,
}


def build_block(shape: ModelShape, number: int) -> Block:
    """Create a layer whose weights are undefined."""
    return _BLOCKS[shape.norm_placement](shape, number)


class Backbone(nn.Module):
    """The embedding, the layers and the last normalization."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.multiplier = shape.embedding_multiplier * (shape.hidden_size**0.5 if shape.has_scaled_embedding else 1.0)
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(build_block(shape, number) for number in range(shape.num_layers))
        self.norm = RMSNorm(shape, shape.hidden_size)

    def forward(self, tokens: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence] token ids to [batch, sequence, hidden]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, context)
        out: Tensor = self.norm(x)
        return out

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed [batch, sequence] token ids as [batch, sequence, hidden]."""
        x: Tensor = self.embed_tokens(tokens)
        if self.multiplier == 1.0:
            return x
        # Gemma's factor was rounded to the type of the weights when the model was trained.
        return x * torch.full((), self.multiplier, dtype=x.dtype, device=x.device)


class Llama(nn.Module):
    """A language model; call it with token ids to get logits."""

    token_positions: Tensor | None = None
    """Set by a plan that divides the sequence: the positions of this rank's tokens, [sequence] int64."""
    head_input_transform: Callable[[Tensor], Tensor] | None = None
    """Set by a plan that divides the output projection: maps hidden states to the input of the projection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.logits_divisor = shape.logits_divisor
        self.model = Backbone(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size)
        self.tie()
        self._table: AttentionContext | None = None

    def tie(self) -> None:
        """Share the embedding with the output projection if the shape has tied embeddings."""
        if self.shape.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def compute_rotary_table(self, length: int, device: torch.device) -> AttentionContext:
        """Return the rotary embedding of `length` positions, computed at the first call."""
        if self._table is None or self._table[0].shape[0] != length:
            self._table = build_context(self.shape, length, device, masks=self.token_positions is None)
        return self._table

    def forward(
        self,
        tokens: Tensor,
        *,
        length: int | None = None,
        positions: Tensor | None = None,
        samples: Tensor | None = None,
        loss: LossOfHidden | None = None,
    ) -> Tensor:
        """Map [batch, sequence] token ids to [batch, sequence, vocabulary] logits.

        `length` is the length of the whole sequence where the input is a part of it. `positions` [batch, sequence] mask
        documents from each other, see `rope.select_positions`. `samples` [batch] int32 identify the samples for
        dropout; None disables it. With a `loss` the result of the loss is returned.
        """
        context = self.compute_rotary_table(length or tokens.shape[1], tokens.device)
        if self.token_positions is not None:
            context = select_tokens(
                context, self.token_positions.to(tokens.device), positions, self.shape.sliding_window
            )
        elif positions is not None:
            context = select_positions(context, positions)
        if samples is not None:
            context = context._replace(samples=samples)
        hidden = self.model(tokens, context)
        if loss is None:
            return self.project(hidden, context)
        trained = [parameter for parameter in self.lm_head.parameters() if parameter.requires_grad]
        return loss(
            self.compute_head_input(hidden),
            lambda part, chunk: self._compute_logits(part, context.select_chunk(chunk)),
            trained,
        )

    def project(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        """Map [batch, sequence, hidden] to logits."""
        return self._compute_logits(self.compute_head_input(hidden), context)

    def compute_head_input(self, hidden: Tensor) -> Tensor:
        """Return the input of the output projection."""
        return hidden if self.head_input_transform is None else self.head_input_transform(hidden)

    def _compute_logits(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        # A projection of another library that replaces `Linear` takes no context.
        logits: Tensor = self.lm_head(hidden, context) if isinstance(self.lm_head, Linear) else self.lm_head(hidden)
        return logits if self.logits_divisor == 1.0 else logits / self.logits_divisor
