"""Fully sharded data parallelism (FSDP2): parameters, gradients and moments divided over the data-parallel ranks.

Invariants: one FSDP unit per layer and one for the rest; reductions are sums in float32; moments have the placement of
their parameter, so a checkpoint of them is as reshardable as the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainium_contract.trainer import Precision
from trainium_trainer.backends.adamw import Slot
from trainium_trainer.backends.store import local_of, square_sum
from trainium_trainer.models.state_dict import Part, state_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_trainer.models.llama import Llama


def apply_fully_sharded(model: Llama, mesh: DeviceMesh, precision: Precision) -> None:
    """Shard a model (already divided by tensor parallelism, on the meta device) over the data-parallel `mesh`."""
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if precision is Precision.BFLOAT16
        else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: the loop divides by the valid tokens of the whole batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    parameter: nn.Parameter
    exp_avg: Tensor
    exp_avg_sq: Tensor
    divided: bool
    cuts: tuple[tuple[int, int, int], ...]


class ShardedStore:
    """The state of an FSDP2 model; gradients live where FSDP puts them."""

    def __init__(self, model: Llama, device: torch.device, *, dp: tuple[int, int], tp: tuple[int, int]) -> None:
        model.to_empty(device=device)
        self._entries = [_entry(name, parameter, dp=dp, tp=tp) for name, parameter in model.named_parameters()]

    def before_backward(self, *, last: bool) -> None:
        """Nothing to prepare: every backward pass reduces, which keeps gradients divided at all times."""

    def reduce(self) -> None:
        """Nothing is left to reduce after the backward pass."""

    def square_sums(self) -> tuple[float, float]:
        """Sums of squares of this rank's shards."""
        divided = [local_of(entry.parameter.grad) for entry in self._entries if entry.divided]
        repeated = [local_of(entry.parameter.grad) for entry in self._entries if not entry.divided]
        return square_sum(divided), square_sum(repeated)

    def slots(self) -> Iterator[Slot]:
        """One slot per parameter shard."""
        for entry in self._entries:
            yield Slot(
                local_of(entry.parameter),
                local_of(entry.parameter.grad),
                local_of(entry.exp_avg),
                local_of(entry.exp_avg_sq),
            )

    def forget(self) -> None:
        """Free the gradients."""
        for entry in self._entries:
            entry.parameter.grad = None

    def parameters(self) -> Iterator[tuple[str, torch.Size, Tensor, tuple[tuple[int, int, int], ...]]]:
        """See `Store.parameters`."""
        for entry in self._entries:
            yield entry.name, entry.parameter.shape, local_of(entry.parameter), entry.cuts

    def state_dict(self) -> dict[str, Any]:
        """DTensors that know their place in the whole."""
        return {
            state_name(part, entry.name): value
            for entry in self._entries
            for part, value in (
                (Part.WEIGHT, entry.parameter.detach()),
                (Part.EXP_AVG, entry.exp_avg),
                (Part.EXP_AVG_SQ, entry.exp_avg_sq),
            )
        }

    def local_tensors(self) -> dict[str, Tensor]:
        """This rank's shards."""
        return {name: local_of(value) for name, value in self.state_dict().items()}


def _entry(name: str, parameter: nn.Parameter, *, dp: tuple[int, int], tp: tuple[int, int]) -> _Entry:
    """`dp` and `tp` are (size, rank). Tensor parallelism cuts first, FSDP cuts what is left."""
    placements: tuple[Any, ...] = parameter.placements  # type: ignore[attr-defined]
    cuts = []
    divided = False
    if len(placements) == 2 and placements[1].is_shard():
        cuts.append((placements[1].dim, *tp))
        divided = True
    cuts.append((placements[0].dim, *dp))
    return _Entry(
        name=name,
        parameter=parameter,
        exp_avg=torch.zeros_like(parameter.detach()),
        exp_avg_sq=torch.zeros_like(parameter.detach()),
        divided=divided,
        cuts=tuple(cuts),
    )
