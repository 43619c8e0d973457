"""Llama and the families that descend from it, as one device would run them.

RMSNorm, rotary embedding, grouped-query attention, SwiGLU. What a family has beside Llama is a field of its shape:
biases, a window of attention, norms of queries and keys, norms after the branches, layers without rotation,
multipliers.

Guarantees:
- Parameters are those of `trainium_contract.models.parameters`, under Hugging Face's names.
- The modules know nothing of parallelism, so a plan can be applied from outside: the number of heads follows from the
  tensors, not from the shape.
- Initial weights depend on seed and parameter name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_contract.models.shape import QueryKeyNorm
from trainium_trainer.models.products import product
from trainium_trainer.models.rope import at_places, at_positions, rotary, rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.models.loss import LossOfHidden
    from trainium_trainer.models.rope import Context


class Weighted(nn.Module):
    """A module with a weight, of which a parallel plan may have it use a part."""

    weight: Tensor
    part: Callable[[Tensor], Tensor] | None = None
    """Set by a plan: from the weight to the tensor that this rank computes with."""

    def own_weight(self) -> Tensor:
        """Return the weight that this rank computes with."""
        return self.weight if self.part is None else self.part(self.weight)

    def reset_parameters(self) -> None:
        """Leave the values undefined: they come later, from a seed or a checkpoint.

        The library's own initialisation would also run on the meta device, where it imports the compiler stack (3 s).
        """


class Linear(Weighted, nn.Linear):
    """A projection."""

    bias_part: Callable[[Tensor], Tensor] | None = None
    """Part of the bias, as `part`."""

    def __init__(self, width: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(width, outputs, bias=bias)

    def forward(self, x: Tensor, _: Context | None = None) -> Tensor:
        """[..., width] to [..., outputs]; the context is for projections with an adapter."""
        return self.with_bias(product(x, self.own_weight()))

    def with_bias(self, out: Tensor, factor: float | None = None) -> Tensor:
        """Return an output with the bias added, if there is one, times a factor."""
        if self.bias is None:
            return out
        bias = self.bias if self.bias_part is None else self.bias_part(self.bias)
        return out + (bias if factor is None else bias * factor).to(out.dtype)


class Embedding(Weighted, nn.Embedding):
    """A table of one row per token."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] ids to [..., width]."""
        return F.embedding(tokens, self.own_weight())


class RMSNorm(Weighted):
    """Root-mean-square normalisation (arXiv 1910.07467), computed in float32."""

    mean: Callable[[Tensor], Tensor] | None = None
    """Set by a plan that divides the width: from this rank's squares to the mean of all of them."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        squares = wide.pow(2)
        mean = squares.mean(-1, keepdim=True) if self.mean is None else self.mean(squares)
        wide = wide * torch.rsqrt(mean + self.eps)
        return (wide * self.own_weight()).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; the number of local heads follows from the projections' outputs."""

    divided: Callable[[Tensor, Tensor, Tensor, Context], Tensor] | None = None
    """Set by a plan that divides the sequence: from this rank's queries, keys and values to their attention."""

    def __init__(self, shape: ModelShape, number: int = 0) -> None:
        """Create the projections of layer `number`."""
        super().__init__()
        self.head_dim = shape.head_dim
        self.scale = shape.attention_multiplier
        self.window = shape.window_of(number)
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
            self.q_norm = RMSNorm(shape.head_dim if self.norms_each_head else query, shape.norm_eps)
            self.k_norm = RMSNorm(shape.head_dim if self.norms_each_head else key_value, shape.norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, length, _ = x.shape
        query = self.heads(self.q_proj(x, context), self.q_norm)
        key = self.heads(self.k_proj(x, context), self.k_norm)
        value = self.heads(self.v_proj(x, context))
        table = context if self.window is None or context.windowed is None else context.windowed
        if self.is_rotated:
            query, key = rotate(query, table), rotate(key, table)
        if self.divided is not None:
            mixed = self.divided(query, key, value, table)
        else:
            # Torch chooses the device's kernel: flash attention on CPU and CUDA, the vendor's on Neuron.
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

    def heads(self, projected: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """[batch, sequence, heads x width] to [batch, heads, sequence, width], normalised before or after."""
        if norm is not None and not self.norms_each_head:
            projected = norm(projected)
        heads = projected.view(*projected.shape[:2], -1, self.head_dim)
        if norm is not None and self.norms_each_head:
            heads = norm(heads)
        return heads.transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        inner = F.silu(self.gate_proj(x, context)) * self.up_proj(x, context)
        out: Tensor = self.down_proj(inner, context)
        return out


class Block(nn.Module):
    """One transformer layer with pre-normalisation and two residual branches."""

    def __init__(self, shape: ModelShape, number: int = 0) -> None:
        super().__init__()
        self.multiplier = shape.residual_multiplier
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, number)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.scaled(self.self_attn(self.input_layernorm(x), context))
        return x + self.scaled(self.mlp(self.post_attention_layernorm(x), context))

    def scaled(self, branch: Tensor) -> Tensor:
        """Return what a branch adds to the residual stream."""
        return branch if self.multiplier == 1.0 else branch * self.multiplier


class PostNormBlock(Block):
    """One transformer layer that normalises what its branches return (OLMo 2, arXiv 2501.00656, section 3.1)."""

    def __init__(self, shape: ModelShape, number: int = 0) -> None:
        super().__init__(shape, number)
        del self.input_layernorm
        self.post_feedforward_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.scaled(self.post_attention_layernorm(self.self_attn(x, context)))
        return x + self.scaled(self.post_feedforward_layernorm(self.mlp(x, context)))


def build_block(shape: ModelShape, number: int) -> Block:
    """Return a layer without values."""
    return PostNormBlock(shape, number) if shape.norm_after else Block(shape, number)


class Trunk(nn.Module):
    """Embedding, layers and the last normalisation."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.multiplier = shape.embedding_multiplier
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(build_block(shape, number) for number in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """[batch, sequence] token ids to [batch, sequence, hidden]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, context)
        out: Tensor = self.norm(x)
        return out

    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] token ids to [batch, sequence, hidden]."""
        x: Tensor = self.embed_tokens(tokens)
        return x if self.multiplier == 1.0 else x * self.multiplier


class Llama(nn.Module):
    """A language model; call it with token ids to get logits."""

    places: Tensor | None = None
    """Set by a plan that divides the sequence: the places of this rank's tokens, [sequence] int64."""
    entrance: Callable[[Tensor], Tensor] | None = None
    """Set by a plan that divides the output projection: from hidden states to those that it takes."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.logits_divisor = shape.logits_divisor
        self.model = Trunk(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size)
        self.tie()
        self._table: Context | None = None

    def tie(self) -> None:
        """Let the output projection share the embedding where the shape has tied embeddings."""
        if self.shape.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def rotary_table(self, length: int, device: torch.device) -> Context:
        """Return the rotary embedding of `length` positions, computed when it is first asked for."""
        if self._table is None or self._table[0].shape[0] != length:
            self._table = rotary(self.shape, length, device, masks=self.places is None)
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
        """[batch, sequence] token ids to [batch, sequence, vocabulary] logits.

        `length` is that of the sequence where the input is a part of it. `positions` [batch, sequence] mask documents
        from each other, see `rope.at_positions`. `samples` [batch] int32 name the samples for dropout; None: nothing
        is dropped. With a `loss` its result is returned.
        """
        context = self.rotary_table(length or tokens.shape[1], tokens.device)
        if self.places is not None:
            context = at_places(context, self.places.to(tokens.device), positions, self.shape.sliding_window)
        elif positions is not None:
            context = at_positions(context, positions)
        if samples is not None:
            context = context._replace(samples=samples)
        hidden = self.model(tokens, context)
        if loss is None:
            return self.project(hidden, context)
        trained = [parameter for parameter in self.lm_head.parameters() if parameter.requires_grad]
        return loss(self.enter_head(hidden), lambda part, stretch: self._logits(part, context.at(stretch)), trained)

    def project(self, hidden: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden] to logits."""
        return self._logits(self.enter_head(hidden), context)

    def enter_head(self, hidden: Tensor) -> Tensor:
        """Return the hidden states that the output projection takes."""
        return hidden if self.entrance is None else self.entrance(hidden)

    def _logits(self, hidden: Tensor, context: Context) -> Tensor:
        # Other libraries' projections, which may stand in its place, take nothing else.
        logits: Tensor = self.lm_head(hidden, context) if isinstance(self.lm_head, Linear) else self.lm_head(hidden)
        return logits if self.logits_divisor == 1.0 else logits / self.logits_divisor
