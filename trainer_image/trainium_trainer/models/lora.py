"""A projection with an adapter beside it: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353).

Invariants: parameter names are peft's without their prefix; an adapter begins as nothing (B is zero, and the lengths of
DoRA are those of the base's rows), so the first loss is the base's.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import all_reduce

from trainium_trainer.models.dropout import dropped, module_key
from trainium_trainer.models.llama import Linear, Weighted
from trainium_trainer.models.products import product

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.tuning import LoraConfig
    from trainium_trainer.models.rope import Context


class Magnitude(Weighted):
    """The trained length of each row of a weight."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))


class AdaptedLinear(Linear):
    """A projection with an adapter: W x + scale B A dropout(x), by DoRA with rows of trained length."""

    first_feature = 0
    """Number of this rank's first input feature within the whole; set by a plan that divides them."""
    sequence_dimension = 1
    """Of the input; set by a plan that has another order."""
    input_group: ProcessGroup | None = None
    """The ranks that hold the other input features; set by a plan that divides them."""
    enabled = True
    """Whether the adapter adds to the output; see `adapters_disabled`."""

    def __init__(self, name: str, width: int, outputs: int, lora: LoraConfig, *, bias: bool = False) -> None:
        super().__init__(width, outputs, bias=bias)
        rank = lora.rank_of(name)
        self.lora_A = Linear(width, rank)
        self.lora_B = Linear(rank, outputs, bias=lora.bias)
        self.lora_magnitude_vector = Magnitude(outputs) if lora.dora else None
        self._dropout = lora.dropout
        self._scale = lora.scale_of(name)
        self._key = module_key(name)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """[batch, sequence, width] to [batch, sequence, outputs]."""
        if not self.enabled:
            return super().forward(x)
        if self.lora_magnitude_vector is None:
            return super().forward(x) + self.added(x, context)
        out = product(x, self.own_weight())
        gain = self.lora_magnitude_vector.own_weight() / self._row_lengths()
        seen, kept = self._seen(x, context)
        added = self.lora_B(self.lora_A(seen) * (self._scale / kept))
        if seen is x:
            return self.with_bias((gain * (out + added)).to(out.dtype))
        # As peft has it, dropout hides the input from all that is trained, the lengths included.
        change = (gain - 1) * product(seen, self.own_weight()) / kept
        return self.with_bias((out + change + gain * added).to(out.dtype))

    def added(self, x: Tensor, context: Context | None) -> Tensor:
        """Return the adapter's summand of the output, without lengths."""
        seen, kept = self._seen(x, context)
        narrow = self.lora_A(seen) * (self._scale / kept)  # where the fewest numbers are
        return self.lora_B.with_bias(product(narrow, self.lora_B.own_weight()), self._scale)

    def _seen(self, x: Tensor, context: Context | None) -> tuple[Tensor, float]:
        """Return what the adapter sees of the input, and the share of the numbers that is kept."""
        if not self._dropout or context is None or context.samples is None:
            return x, 1.0
        seen = dropped(
            x,
            context.samples,
            module=self._key,
            share=self._dropout,
            first=self.first_feature,
            sequence=self.sequence_dimension,
            places=context.places,
        )
        return seen, 1.0 - self._dropout

    @torch.no_grad()
    def _row_lengths(self) -> Tensor:
        """Return the length of each row of W + scale B A, float32, without making that matrix."""
        weight, narrow, wide = self.own_weight(), self.lora_A.own_weight(), self.lora_B.own_weight().float()
        with torch.autocast(weight.device.type, enabled=False):
            squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
            cross = ((weight @ narrow.to(weight.dtype).T).float() * wide).sum(1)
            inner = narrow.float() @ narrow.float().T
            if self.input_group is not None:
                sums = torch.cat((squares + 2 * self._scale * cross, inner.flatten()))
                all_reduce(sums, group=self.input_group)
                ours, inner = sums[: len(squares)], sums[len(squares) :].view_as(inner)
            else:
                ours = squares + 2 * self._scale * cross
            return (ours + self._scale**2 * ((wide @ inner) * wide).sum(1)).sqrt()


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Let the model compute as its base does."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enabled = True
