"""Cut a model into pipeline stages: each holds some of the layers, under the names that they have in the whole model.

With tied embeddings the first and the last stage each hold a copy of the weight; both have the embedding's name.

Guarantees:
- A parameter's canonical name does not depend on the cut, so a checkpoint of any number of stages is read at any other.
- Modules of other stages pass their input through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainium_contract.models.parameters import EMBEDDING, HEAD
from trainium_trainer.models.llama import Block, Llama

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainium_contract.models.shape import ModelShape
    from trainium_trainer.models.loss import LossOfHidden


class Placeholder(nn.Module):
    """The placeholder of a module that another stage holds."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """Return the input."""
        return x


def split_layers(stage: int, num_stages: int, num_layers: int) -> range:
    """Return the layers of one stage, in order and divided as evenly as possible.

    Layers that do not divide evenly go to stages in the middle first: the outer ones also embed or compute the loss.
    """
    shares = [num_layers // num_stages] * num_stages
    for extra in range(num_layers % num_stages):
        # 1, 2, ... then the last, then the first.
        shares[(extra + 1) % num_stages] += 1
    return range(sum(shares[:stage]), sum(shares[: stage + 1]))


class LlamaStage(Llama):
    """Stage `stage` of `num_stages`: token ids or hidden states in, hidden states or logits out."""

    def __init__(
        self, shape: ModelShape, *, stage: int, num_stages: int, length: int, hidden_dtype: torch.dtype
    ) -> None:
        """Create the stage; `length` is the tokens of a sample, `hidden_dtype` the type of exchanged hidden states."""
        super().__init__(shape)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self._length = length
        self._hidden_dtype = hidden_dtype
        stage_layers = split_layers(stage, num_stages, shape.num_layers)
        for number in range(shape.num_layers):
            if number not in stage_layers:
                self.model.layers[number] = Placeholder()
        if not self.is_first:
            self.model.multiplier = 1.0
            self.model.embed_tokens = Placeholder()  # type: ignore[assignment]
        if not self.is_last:
            self.logits_divisor = 1.0
            self.model.norm = Placeholder()  # type: ignore[assignment]
            self.lm_head = Placeholder()  # type: ignore[assignment]

    def tie(self) -> None:
        """Share the weight if one stage holds both ends."""
        if not isinstance(self.model.embed_tokens, Placeholder) and not isinstance(self.lm_head, Placeholder):
            super().tie()

    def forward(
        self,
        x: Tensor,
        *,
        length: int | None = None,
        positions: Tensor | None = None,
        samples: Tensor | None = None,
        loss: LossOfHidden | None = None,
    ) -> Tensor:
        """Map [batch, sequence] ids or [batch, part of the sequence, hidden] to hidden states or logits."""
        assert loss is None, "the schedule computes it from logits"
        out = super().forward(x, length=length or self._length, positions=positions, samples=samples)
        if self.is_last:
            return out
        out = out.to(self._hidden_dtype)
        # The schedule runs a backward pass on every stage, also on a first stage that trains nothing.
        return out.requires_grad_() if torch.is_grad_enabled() and not out.requires_grad else out


def list_present_layers(model: Llama) -> Iterator[Block]:
    """Return the layers that a model or a stage holds."""
    for layer in model.model.layers:
        if isinstance(layer, Block):
            yield layer


def list_canonical_parameters(model: Llama) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a model or a stage under the names of the whole model, in order of use."""
    return [
        (EMBEDDING if name == HEAD and model.shape.tie_embeddings else name, parameter)
        for name, parameter in model.named_parameters()
    ]


def find_shared_with_first(model: Llama) -> frozenset[str]:
    """Return the names of the weights that this stage copies from the first: the tied weight on the last of several."""
    tied = model.shape.tie_embeddings and isinstance(model.model.embed_tokens, Placeholder)
    return frozenset({EMBEDDING} if tied and not isinstance(model.lm_head, Placeholder) else ())
