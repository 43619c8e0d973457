"""Check a model folder by a forward pass of the training model on any machine's CPU.

Layer after layer is read, used and let go, so memory holds one layer or one embedding of the model, whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainium_trainer.models.llama import Llama
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
    with torch.device("meta"):
        model = Llama(weights.shape)

    def load(name: str) -> nn.Module:
        beat()
        module = model.get_submodule(name).to_empty(device=_CPU)
        for leaf, parameter in module.named_parameters():
            weights.fill(f"{name}.{leaf}", (0,) * parameter.dim(), parameter)
        return module

    def drop(name: str) -> None:
        model.get_submodule(name).to_empty(device="meta")

    load("model.embed_tokens")
    x = model.model.embed(tokens)
    drop("model.embed_tokens")
    table = rotary(weights.shape, tokens.shape[1], _CPU)
    for number in range(weights.shape.num_layers):
        name = f"model.layers.{number}"
        x = load(name)(x, table)
        drop(name)
    x = load("model.norm")(x)
    load("lm_head")
    return model.project(x, table)
