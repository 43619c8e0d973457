"""Check a model folder by a forward pass of the training model on any machine's CPU.

Layer after layer is read, used and let go, so memory holds one layer or one embedding of the model, whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_trainer.models.llama import Block, Embedding, Linear, RMSNorm
from trainium_trainer.models.rope import rotary
from trainium_trainer.weights.base import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

_CPU = torch.device("cpu")
_PROBES = 2
_PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class FolderCheck:
    """The result of a forward pass."""

    finite: bool
    """Whether all logits are numbers."""
    difference: float | None
    """Largest difference of a logit from that of the base, None when there is no base; 0: the tuning left no trace."""

    def problem(self, folder: str, base: str | None) -> str | None:
        """Return a sentence when the folder cannot be right."""
        if not self.finite:
            return f"{folder}: a forward pass gives values that are not finite: do not use this model"
        if self.difference == 0:
            return f"{folder}: computes the same as {base}: the tuning left no trace in it"
        return None


def check_folder(folder: str, base: str | None = None, *, beat: Callable[[], None] = lambda: None) -> FolderCheck:
    """Run tokens through a folder's model, and through its base's. Raises UserError for a folder that is not whole."""
    weights = BaseWeights.open(folder)
    other = BaseWeights.open(base) if base is not None else None
    vocabulary = min(weights.shape.vocab_size, other.shape.vocab_size if other else weights.shape.vocab_size)
    length = min(_PROBE_TOKENS, weights.shape.max_positions)
    tokens = torch.randint(0, vocabulary, (_PROBES, length), generator=torch.Generator().manual_seed(0))
    logits = logits_of(weights, tokens, beat=beat)
    if other is None:
        return FolderCheck(bool(logits.isfinite().all()), None)
    reference = logits_of(other, tokens, beat=beat)
    difference = (logits[..., :vocabulary] - reference[..., :vocabulary]).abs().max()
    return FolderCheck(bool(logits.isfinite().all()), float(difference))


@torch.no_grad()
def logits_of(weights: BaseWeights, tokens: Tensor, *, beat: Callable[[], None] = lambda: None) -> Tensor:
    """[batch, sequence] ids to [batch, sequence, vocabulary] logits, in float32 on the CPU."""
    shape = weights.shape

    def filled(module: nn.Module, prefix: str) -> nn.Module:
        beat()
        module.to_empty(device=_CPU)
        for name, parameter in module.named_parameters():
            weights.fill(f"{prefix}.{name}", (0,) * parameter.dim(), parameter)
        return module

    with torch.device("meta"):
        embedding = Embedding(shape.vocab_size, shape.hidden_size)
        output = Linear(shape.hidden_size, shape.vocab_size)
        norm = RMSNorm(shape.hidden_size, shape.norm_eps)
    x = filled(embedding, "model.embed_tokens")(tokens)
    del embedding
    table = rotary(shape, tokens.shape[1], _CPU)
    for number in range(shape.num_layers):
        with torch.device("meta"):
            block = Block(shape)
        x = filled(block, f"model.layers.{number}")(x, table)
    x = filled(norm, "model.norm")(x)
    logits: Tensor = filled(output, "lm_head")(x)
    return logits
