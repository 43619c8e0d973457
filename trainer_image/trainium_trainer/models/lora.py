"""A projection with an adapter beside it: LoRA (arXiv 2106.09685).

Invariants: parameter names are peft's without their prefix; an adapter begins as nothing (B is zero), so the first loss
is the base's.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainium_trainer.models.dropout import dropped, module_key
from trainium_trainer.models.llama import Linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from trainium_contract.trainer.tuning import LoraConfig
    from trainium_trainer.models.rope import Context


class AdaptedLinear(Linear):
    """A projection with an adapter: W x + scale B A dropout(x)."""

    first_feature = 0
    """Number of this rank's first input feature within the whole; set by a plan that divides them."""
    sequence_dimension = 1
    """Of the input; set by a plan that has another order."""
    enabled = True
    """Whether the adapter adds to the output; see `adapters_disabled`."""

    def __init__(self, name: str, width: int, outputs: int, lora: LoraConfig, *, bias: bool = False) -> None:
        super().__init__(width, outputs, bias=bias)
        self.lora_A = Linear(width, lora.rank)
        self.lora_B = Linear(lora.rank, outputs)
        self._dropout = lora.dropout
        self._scale = lora.scale
        self._key = module_key(name)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """[batch, sequence, width] to [batch, sequence, outputs]."""
        out = super().forward(x)
        return out + self.added(x, context) if self.enabled else out

    def added(self, x: Tensor, context: Context | None) -> Tensor:
        """Return the adapter's summand of the output."""
        seen, scale = x, self._scale
        if self._dropout and context is not None and context.samples is not None:
            seen = dropped(
                x,
                context.samples,
                module=self._key,
                share=self._dropout,
                first=self.first_feature,
                sequence=self.sequence_dimension,
            )
            scale /= 1.0 - self._dropout
        added: Tensor = self.lora_B(self.lora_A(seen) * scale)  # where the fewest numbers are
        return added


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
