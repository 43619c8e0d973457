"""Fully sharded data parallelism (FSDP2): parameters, gradients and moments divided over the data-parallel ranks.

Guarantees:
- One FSDP unit per layer and one for the rest, with master weights also one per normalisation.
- A value is rounded where the replicated layout rounds it, and nowhere else.
- Reductions are sums in float32.
- Moments have the placement of their parameter, so a checkpoint of them is as reshardable as the weights.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from trainium_contract.models.parameters import EMBEDDING
from trainium_contract.trainer.parallelism import DataParallelMode, Precision
from trainium_trainer.backends.optimizers import Slot
from trainium_trainer.backends.store import local_of, square_sum
from trainium_trainer.models.llama import RMSNorm
from trainium_trainer.models.stages import canonical_parameters, present_layers, shared_with_first
from trainium_trainer.models.state_dict import WEIGHT, moment, state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_trainer.models.llama import Llama


def apply_sharding(model: Llama, mesh: DeviceMesh, precision: Precision, mode: DataParallelMode) -> None:
    """Shard a model (already divided by tensor parallelism, on the meta device) over the data-parallel `mesh`.

    With the optimizer sharded only, weights stay gathered from a step's first forward to its last backward pass. With
    master weights the layers' projections are gathered in bfloat16; what the replicated layout computes with in float32
    (normalisations, the embedding) stays so here, and inputs are left alone: the rotary table is float32.
    """
    again = mode is DataParallelMode.FULLY_SHARDED
    kept = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    narrow = kept if precision is Precision.FLOAT32 else replace(kept, param_dtype=torch.bfloat16)
    for layer in present_layers(model):
        if precision is Precision.BFLOAT16:
            for norm in (module for module in layer.modules() if isinstance(module, RMSNorm)):
                fully_shard(norm, mesh=mesh, mp_policy=kept, reshard_after_forward=again)
        fully_shard(layer, mesh=mesh, mp_policy=narrow, reshard_after_forward=again)
    whole = narrow if precision.keeps_half else kept
    fully_shard(model, mesh=mesh, mp_policy=whole, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: the loop divides by the valid tokens of the whole batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class _WatchedReduceScatter(DefaultReduceScatter):
    """FSDP's reduction, which first sums this rank's gradients up: one value that is not finite shows in the sum."""

    def __init__(self, sums: list[Tensor]) -> None:
        self._sums = sums

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *given: Any, **named: Any) -> Any:
        self._sums.append(input_tensor.sum(dtype=torch.float32))
        return super().__call__(output_tensor, input_tensor, *given, **named)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    parameter: nn.Parameter
    moments: dict[str, Tensor]
    """By part of the state."""
    gradient: Tensor | None
    """The float32 sum of what FSDP has left, where that is in bfloat16 like the parameter."""
    key: str
    shared: bool
    """Whether ranks of a tensor-parallel group or of other stages hold the same values."""
    divided: bool
    counted: bool
    cuts: tuple[tuple[int, int, int], ...]

    def sum(self) -> Tensor:
        """Return this rank's part of the step's gradient, float32."""
        return local_of(self.parameter.grad) if self.gradient is None else self.gradient


class ShardedStore:
    """The state of an FSDP2 model; gradients live where FSDP puts them."""

    def __init__(
        self,
        models: Sequence[Llama],
        device: torch.device,
        *,
        dp: tuple[int, int],
        tp: tuple[int, int],
        moments: Sequence[str],
        once: bool = False,
    ) -> None:
        """`models`: the whole, or this rank's stages of it; `dp` and `tp` are (size, rank).

        `moments`: those of the optimizer by name; `once`: gather and reduce once a step, and hold what is gathered in
        between.
        """
        self._roots = [model for model in models if isinstance(model, FSDPModule)] if once else []
        self._own_sums: list[Tensor] = []
        """Of this step's reductions, before they happen."""
        for model in models:
            model.to_empty(device=device)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(_WatchedReduceScatter(self._own_sums))
        self._models = models
        self._frozen = [
            (name, parameter.shape, local_of(parameter), _cuts(parameter, dp, tp))
            for model in models
            for name, parameter in canonical_parameters(model)
            if not parameter.requires_grad
        ]
        self._entries = [
            _entry(
                name,
                parameter,
                dp=dp,
                tp=tp,
                moments=moments,
                counted=name not in shared_with_first(model),
                tied=name == EMBEDDING and model.shape.tie_embeddings,
            )
            for model in models
            for name, parameter in canonical_parameters(model)
            if parameter.requires_grad
        ]

    def begin_backward(self, passes: int) -> None:
        """Every backward pass reduces, which keeps gradients divided at all times, unless that is to happen once."""
        for root in self._roots:
            root.set_requires_gradient_sync(passes > 0)
            root.set_reshard_after_backward(passes > 0)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add what FSDP has left in the type of the parameters to our sums."""
        for entry in self._entries:
            if entry.gradient is not None and entry.parameter.grad is not None:
                entry.gradient.add_(local_of(entry.parameter.grad))
                entry.parameter.grad = None

    def reduce(self) -> None:
        """Nothing is left to reduce after the backward pass."""

    def square_sums(self) -> tuple[float, float]:
        """Return sums of squares of this rank's shards."""
        return self._square_sums(_Entry.sum)

    def weight_square_sums(self) -> tuple[float, float]:
        """Return sums of squares of this rank's shards of the weights."""
        return self._square_sums(lambda entry: local_of(entry.parameter))

    def _square_sums(self, values: Callable[[_Entry], Tensor]) -> tuple[float, float]:
        counted = [entry for entry in self._entries if entry.counted]
        divided = [values(entry) for entry in counted if entry.divided]
        repeated = [values(entry) for entry in counted if not entry.divided]
        return square_sum(divided), square_sum(repeated)

    def has_finite_own_gradients(self) -> bool:
        """See `StateStore.has_finite_own_gradients`."""
        sums = self._own_sums or [entry.sum().sum() for entry in self._entries]
        return bool(torch.stack(sums).isfinite().all())

    def gradient(self, name: str) -> Tensor:
        """See `Store.gradient`."""
        return next(entry.sum() for entry in self._entries if entry.name == name)

    def slots(self) -> Iterator[Slot]:
        """One slot per parameter shard."""
        for entry in self._entries:
            yield Slot(
                local_of(entry.parameter),
                entry.sum(),
                tuple(map(local_of, entry.moments.values())),
                len(entry.parameter.shape) > 1,
                entry.key,
                shared=entry.shared,
            )

    def zero_grad(self) -> None:
        """Free the gradients."""
        self._own_sums.clear()
        for entry in self._entries:
            entry.parameter.grad = None
            if entry.gradient is not None:
                entry.gradient.zero_()

    def after_evaluation(self) -> None:
        """Free the gathered parameters that FSDP keeps for a backward pass: the next update would make them stale."""
        for module in itertools.chain.from_iterable(model.modules() for model in self._models):
            if isinstance(module, FSDPModule):
                module.reshard()

    def parameters(self) -> Iterator[tuple[str, torch.Size, Tensor, tuple[tuple[int, int, int], ...]]]:
        """See `Store.parameters`."""
        for entry in self._entries:
            yield entry.name, entry.parameter.shape, local_of(entry.parameter), entry.cuts

    def frozen(self) -> Iterator[tuple[str, torch.Size, Tensor, tuple[tuple[int, int, int], ...]]]:
        """See `Store.frozen`."""
        yield from self._frozen

    def state_dict(self) -> dict[str, Any]:
        """DTensors that know their place in the whole."""
        return {
            state_name(part, entry.name): value
            for entry in self._entries
            for part, value in ({WEIGHT: entry.parameter.detach()} | entry.moments).items()
        }

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards."""
        return {name: local_of(value) for name, value in self.state_dict().items()}


def _entry(
    name: str,
    parameter: nn.Parameter,
    *,
    dp: tuple[int, int],
    tp: tuple[int, int],
    moments: Sequence[str],
    counted: bool,
    tied: bool,
) -> _Entry:
    """`dp` and `tp` are (size, rank). Tensor parallelism cuts first, FSDP cuts what is left."""
    cuts = _cuts(parameter, dp, tp)
    divided = len(cuts) == 2
    local = local_of(parameter)
    return _Entry(
        name=name,
        parameter=parameter,
        gradient=None if local.dtype is torch.float32 else torch.zeros_like(local, dtype=torch.float32),
        key=f"{name}:{dp[1]}:{tp[1] if divided else 0}",
        shared=tied or (tp[0] > 1 and not divided),
        moments={moment(each): torch.zeros_like(parameter.detach()) for each in moments},
        divided=divided,
        counted=counted,
        cuts=cuts,
    )


def _cuts(parameter: nn.Parameter, dp: tuple[int, int], tp: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    """Return how this rank's part is cut from the whole."""
    placements: tuple[Any, ...] = parameter.placements  # type: ignore[attr-defined]
    by_data = (placements[0].dim, *dp)
    if len(placements) == 2 and placements[1].is_shard():
        return (placements[1].dim, *tp), by_data
    return (by_data,)
