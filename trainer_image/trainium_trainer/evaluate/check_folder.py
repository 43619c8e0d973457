"""Check a model folder by a forward pass of the training model on any machine's CPU.

Layers are read, used and freed one after the other, so memory holds one layer or one embedding of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainium_trainer.models.llama import Llama
from trainium_trainer.models.rope import build_context
from trainium_trainer.weights.base import BaseWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

_CPU = torch.device("cpu")
_PROBES = 2
_PROBE_TOKENS = 24


def find_folder_problem(folder: str, base: str | None, *, heartbeat: Callable[[], None] = lambda: None) -> str:
    """Run tokens through a folder's model and its base; return a message if the folder must be wrong, else "".

    Raises UserError for an incomplete folder.
    """
    weights = BaseWeights.open(folder)
    other = BaseWeights.open(base) if base is not None else None
    vocabulary = min(weights.shape.vocab_size, other.shape.vocab_size if other else weights.shape.vocab_size)
    length = min(_PROBE_TOKENS, weights.shape.max_positions)
    tokens = torch.randint(0, vocabulary, (_PROBES, length), generator=torch.Generator().manual_seed(0))
    logits = compute_logits(weights, tokens, heartbeat=heartbeat)
    if not bool(logits.isfinite().all()):
        return f"{folder}: a forward pass gives values that are not finite: do not use this model"
    if other is None:
        return ""
    reference = compute_logits(other, tokens, heartbeat=heartbeat)
    if torch.equal(logits[..., :vocabulary], reference[..., :vocabulary]):
        return f"{folder}: computes the same as {base}: the tuning left no trace in it"
    return ""


@torch.no_grad()
def compute_logits(weights: BaseWeights, tokens: Tensor, *, heartbeat: Callable[[], None] = lambda: None) -> Tensor:
    """Map [batch, sequence] ids to [batch, sequence, vocabulary] logits, in float32 on the CPU."""
    with torch.device("meta"):
        model = Llama(weights.shape)

    def load(name: str) -> nn.Module:
        heartbeat()
        module = model.get_submodule(name).to_empty(device=_CPU)
        for leaf, parameter in module.named_parameters():
            weights.fill(f"{name}.{leaf}", (0,) * parameter.dim(), parameter)
        return module

    def drop(name: str) -> None:
        model.get_submodule(name).to_empty(device="meta")

    load("model.embed_tokens")
    x = model.model.embed(tokens)
    drop("model.embed_tokens")
    table = build_context(weights.shape, tokens.shape[1], _CPU)
    for number in range(weights.shape.num_layers):
        name = f"model.layers.{number}"
        x = load(name)(x, table)
        drop(name)
    x = load("model.norm")(x)
    load("lm_head")
    return model.project(x, table)
