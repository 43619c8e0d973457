"""A projection with an adapter: LoRA (arXiv 2106.09685) or DoRA (arXiv 2402.09353).

Guarantees:
- Parameter names are peft's without their prefix.
- A new adapter changes nothing (B is zero, and DoRA's magnitudes are the norms of the base's rows), so the first loss
  equals the base's.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import all_reduce

from trainium_trainer.models.dropout import apply_dropout, hash_module_name
from trainium_trainer.models.linear import apply_linear
from trainium_trainer.models.llama import Linear, WeightedModule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.tuning import LoraConfig
    from trainium_trainer.models.rope import AttentionContext


class Magnitude(WeightedModule):
    """The trained norm of each row of a weight (DoRA)."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))


class AdaptedLinear(Linear):
    """A projection with an adapter: W x + scale B A dropout(x); with DoRA the norm of each row is trained."""

    first_feature = 0
    """Index of this rank's first input feature; set by a plan that divides the features."""
    sequence_dimension = 1
    """The dimension of the sequence in the input; set by a plan with another order."""
    input_group: ProcessGroup | None = None
    """The ranks that hold the other input features; set by a plan that divides the features."""
    enabled = True
    """Whether the adapter adds to the output; see `disable_adapters`."""

    def __init__(self, name: str, width: int, outputs: int, lora: LoraConfig, *, bias: bool = False) -> None:
        super().__init__(width, outputs, bias=bias)
        rank = lora.rank_of(name)
        self.lora_A = Linear(width, rank)
        self.lora_B = Linear(rank, outputs)
        self.lora_magnitude_vector = Magnitude(outputs) if lora.dora else None
        self._dropout = lora.dropout
        self._scale = lora.find_scale(name)
        self._key = hash_module_name(name)

    def forward(self, x: Tensor, context: AttentionContext | None = None) -> Tensor:
        """Map [batch, sequence, width] to [batch, sequence, outputs]."""
        if not self.enabled:
            return super().forward(x)
        if self.lora_magnitude_vector is None:
            return super().forward(x) + self.compute_adapter_output(x, context)
        out = apply_linear(x, self.find_local_weight())
        gain = self.lora_magnitude_vector.find_local_weight() / self._compute_row_norms()
        kept, keep_rate = self._drop_input(x, context)
        addend = self.lora_B(self.lora_A(kept) * (self._scale / keep_rate))
        if kept is x:
            return self.add_bias((gain * (out + addend)).to(out.dtype))
        # As in peft, dropout hides the input from everything that is trained, including the magnitudes.
        change = (gain - 1) * apply_linear(kept, self.find_local_weight()) / keep_rate
        return self.add_bias((out + change + gain * addend).to(out.dtype))

    def compute_adapter_output(self, x: Tensor, context: AttentionContext | None) -> Tensor:
        """Return the adapter's summand of the output, without DoRA's magnitudes."""
        kept, keep_rate = self._drop_input(x, context)
        narrow = self.lora_A(kept) * (self._scale / keep_rate)  # scale at the narrowest point
        output: Tensor = self.lora_B(narrow)
        return output

    def _drop_input(self, x: Tensor, context: AttentionContext | None) -> tuple[Tensor, float]:
        """Return the adapter's input after dropout, and the fraction of values that is kept."""
        if not self._dropout or context is None or context.samples is None:
            return x, 1.0
        kept = apply_dropout(
            x,
            context.samples,
            module=self._key,
            drop_probability=self._dropout,
            first_feature=self.first_feature,
            sequence_dimension=self.sequence_dimension,
            token_positions=context.token_positions,
        )
        return kept, 1.0 - self._dropout

    @torch.no_grad()
    def _compute_row_norms(self) -> Tensor:
        """Return the norm of each row of W + scale B A, float32, without materialising that matrix."""
        weight, narrow, wide = (
            self.find_local_weight(),
            self.lora_A.find_local_weight(),
            self.lora_B.find_local_weight().float(),
        )
        with torch.autocast(weight.device.type, enabled=False):
            squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
            cross = ((weight @ narrow.to(weight.dtype).T).float() * wide).sum(1)
            inner = narrow.float() @ narrow.float().T
            if self.input_group is not None:
                sums = torch.cat((squares + 2 * self._scale * cross, inner.flatten()))
                all_reduce(sums, group=self.input_group)
                squared_norms, inner = sums[: len(squares)], sums[len(squares) :].view_as(inner)
            else:
                squared_norms = squares + 2 * self._scale * cross
            return (squared_norms + self._scale**2 * ((wide @ inner) * wide).sum(1)).sqrt()


@contextlib.contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters, so that the model computes as its base."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enabled = True
