"""Llama as one device would run it: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Invariants: parameter names are Hugging Face's (`LlamaForCausalLM`); the modules know nothing of parallelism, so a plan
can be applied from outside (shapes of heads follow from the tensors, not from the configuration); initial weights
depend on seed and parameter name only.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

if TYPE_CHECKING:
    from trainium_trainer.models.shapes import ModelShape

IGNORED_LABEL = -100
_INIT_STD = 0.02
_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each [sequence, head width], float32."""


class Linear(nn.Linear):
    """A projection without bias whose values come later, from a seed or a checkpoint.

    The library's own initialisation would also run on the meta device, where it imports the compiler stack (3 s).
    """

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leave the values undefined."""


class Embedding(nn.Embedding):
    """An embedding whose values come later, for the same reason."""

    def reset_parameters(self) -> None:
        """Leave the values undefined."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rotary(length: int, width: int, theta: float, device: torch.device) -> Rotary:
    """The rotary table in Hugging Face's layout: the two halves of a head rotate against each other."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), 1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """Apply the rotary embedding to [batch, heads, sequence, head width]."""
    cos, sin = table
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


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

    def forward(self, x: Tensor, table: Rotary) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, table), rotate(key, table)
        shared = query.shape[1] // key.shape[1]
        if shared > 1:
            key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One transformer layer with pre-normalisation and two residual branches."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, table: Rotary) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), table)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, layers and the last normalisation."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, tokens: Tensor, table: Rotary) -> Tensor:
        """[batch, sequence] token ids to [batch, sequence, hidden]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, table)
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
        self._table: Rotary | None = None

    def tie(self) -> None:
        """Let the output projection share the embedding where the shape says so."""
        if self.shape.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] token ids to [batch, sequence, vocabulary] logits."""
        length = tokens.shape[1]
        if self._table is None or self._table[0].shape[0] != length:
            self._table = rotary(length, self.shape.head_dim, self.shape.rope_theta, tokens.device)
        logits: Tensor = self.lm_head(self.model(tokens, self._table))
        return logits


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the token losses of a micro-batch, in float32; ignored labels add nothing."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def initial_weight(name: str, size: torch.Size, *, seed: int, num_layers: int) -> Tensor:
    """The full initial value of one parameter: normal(0, 0.02), residual outputs scaled by 1/sqrt(2 layers), norms 1.

    Each parameter has a generator of its own, so that a rank may make only those that it needs, in any order.
    """
    if len(size) == 1:
        return torch.ones(size)
    std = _INIT_STD / math.sqrt(2 * num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else _INIT_STD
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(size).normal_(0.0, std, generator=generator)
