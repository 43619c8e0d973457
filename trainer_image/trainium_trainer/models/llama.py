"""Llama as one device would run it: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Invariants: parameter names are Hugging Face's (`LlamaForCausalLM`); the modules know nothing of parallelism, so a plan
can be applied from outside (shapes of heads follow from the tensors, not from the configuration); initial weights
depend on seed and parameter name only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from trainium_trainer.models.products import product
from trainium_trainer.models.rope import at_positions, rotary, rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainium_trainer.models.rope import Context
    from trainium_trainer.models.shapes import ModelShape

RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")


class _Weighted(nn.Module):
    """A module with one weight, of which a parallel plan may have it use a part."""

    weight: Tensor
    part: Callable[[Tensor], Tensor] | None = None
    """Set by a plan: from the parameter to the tensor that this rank computes with."""

    def own_weight(self) -> Tensor:
        """Return the parameters that this rank computes with."""
        return self.weight if self.part is None else self.part(self.weight)

    def reset_parameters(self) -> None:
        """Leave the values undefined: they come later, from a seed or a checkpoint.

        The library's own initialisation would also run on the meta device, where it imports the compiler stack (3 s).
        """


class Linear(_Weighted, nn.Linear):
    """A projection without bias."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs, bias=False)

    def forward(self, x: Tensor, _: Context | None = None) -> Tensor:
        """[..., width] to [..., outputs]; the context is for projections with more than a weight."""
        return product(x, self.own_weight())


class Embedding(_Weighted, nn.Embedding):
    """A table of one row per token."""

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] ids to [..., width]."""
        return F.embedding(tokens, self.own_weight())


class RMSNorm(_Weighted):
    """Root-mean-square normalisation (arXiv 1910.07467), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.own_weight()).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; the number of local heads follows from the projections' outputs."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query = shape.num_attention_heads * shape.head_dim
        key_value = shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, query)
        self.k_proj = Linear(shape.hidden_size, key_value)
        self.v_proj = Linear(shape.hidden_size, key_value)
        self.o_proj = Linear(query, shape.hidden_size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, length, _ = x.shape
        query, key, value = (
            projection(x, context).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, context), rotate(key, context)
        # Torch chooses the device's kernel: flash attention on CPU and CUDA, the vendor's on Neuron.
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=context.mask,
            is_causal=context.mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1), context)
        return out


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        inner = F.silu(self.gate_proj(x, context)) * self.up_proj(x, context)
        out: Tensor = self.down_proj(inner, context)
        return out


class Block(nn.Module):
    """One transformer layer with pre-normalisation and two residual branches."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x), context)
        return out


class Trunk(nn.Module):
    """Embedding, layers and the last normalisation."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """[batch, sequence] token ids to [batch, sequence, hidden]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, context)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """A Llama language model; call it with token ids to get logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
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
            self._table = rotary(self.shape, length, device)
        return self._table

    def forward(
        self,
        tokens: Tensor,
        *,
        length: int | None = None,
        positions: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """[batch, sequence] token ids to [batch, sequence, vocabulary] logits.

        `length` is that of the sequence where the input is a part of it. `positions` [batch, sequence] mask documents
        from each other, see `rope.at_positions`. `samples` [batch] int32 name the samples for dropout; None: nothing
        is dropped.
        """
        context = self.rotary_table(length or tokens.shape[1], tokens.device)
        if positions is not None:
            context = at_positions(context, positions)
        if samples is not None:
            context = context._replace(samples=samples)
        hidden = self.model(tokens, context)
        # Other libraries' projections, which may stand in its place, take nothing else.
        logits: Tensor = self.lm_head(hidden, context) if isinstance(self.lm_head, Linear) else self.lm_head(hidden)
        return logits
