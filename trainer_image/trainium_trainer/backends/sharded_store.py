"""Fully sharded data parallelism (FSDP2): parameters, gradients and moments divided over the data-parallel ranks.

Guarantees:
- One FSDP unit per layer and one for the rest, with master weights also one per normalization.
- Values are rounded exactly where the replicated layout rounds them.
- Reductions are sums in float32.
- Moments have the placement of their parameter, so that their checkpoints can be resharded like the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from trainium_contract.models.parameters import EMBEDDING
from trainium_contract.trainer.parallelism import DataParallelMode, Precision
from trainium_trainer.backends.optimizers import Slot
from trainium_trainer.backends.state_store import LocalParameter, StateStore, sum_squares
from trainium_trainer.checkpoint.format.live_state import get_box, get_division, to_local
from trainium_trainer.checkpoint.sharding import Axis
from trainium_trainer.models.llama import RMSNorm
from trainium_trainer.models.stages import find_shared_with_first, list_canonical_parameters, list_present_layers
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, WEIGHT, find_moment, format_state_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from trainium_trainer.checkpoint.interfaces import MeshCoordinates
    from trainium_trainer.models.llama import Llama


def apply_sharding(model: Llama, mesh: DeviceMesh, precision: Precision, mode: DataParallelMode) -> None:
    """Shard a model (already divided by tensor parallelism, on the meta device) over the data-parallel `mesh`.

    If only the optimizer is sharded, weights stay gathered from a step's first forward to its last backward pass. With
    master weights the layers' projections are gathered in bfloat16. Normalisations and the embedding stay in float32,
    as in the replicated layout, and inputs are not converted, because the rotary table is float32.
    """
    reshard = mode is DataParallelMode.FULLY_SHARDED
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    mixed = policy if precision is Precision.FLOAT32 else replace(policy, param_dtype=torch.bfloat16)
    for layer in list_present_layers(model):
        if precision is Precision.BFLOAT16:
            for norm in (module for module in layer.modules() if isinstance(module, RMSNorm)):
                fully_shard(norm, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=reshard)
    half_policy = mixed if precision.has_bfloat16_state else policy
    fully_shard(model, mesh=mesh, mp_policy=half_policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums, not means: the loop divides by the valid tokens of the whole batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class _WatchedReduceScatter(DefaultReduceScatter):
    """FSDP's reduction, which first records the sum of this rank's gradients: it is nonfinite if a gradient is."""

    def __init__(self, sums: list[Tensor]) -> None:
        self._sums = sums

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._sums.append(input_tensor.sum(dtype=torch.float32))
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    parameter: nn.Parameter
    moments: dict[str, Tensor]
    """The moments by section of the state."""
    gradient: Tensor | None
    """The float32 sum of FSDP's gradients, if these are in bfloat16 like the parameter."""
    key: str
    is_shared: bool
    """Whether other ranks of the tensor-parallel group or of other stages hold the same values."""
    is_divided: bool
    """Whether tensor parallelism divides the parameter."""
    is_counted: bool
    """Whether this stage counts the parameter in norms."""

    def sum(self) -> Tensor:
        """Return this rank's part of the step's gradient, float32."""
        return to_local(self.parameter.grad) if self.gradient is None else self.gradient


class ShardedStore(StateStore):
    """The state of an FSDP2 model; FSDP stores the gradients."""

    def __init__(
        self,
        model: Llama,
        device: torch.device,
        *,
        mesh: MeshCoordinates,
        moments: Sequence[str],
        keep_gathered: bool = False,
    ) -> None:
        """Create the state of `model`, the whole or this rank's stage.

        `moments` are those of the optimizer by name. With `keep_gathered` a step gathers the weights once, keeps them
        and reduces once.
        """
        self.step = torch.zeros((), dtype=torch.int64)
        self._model = model
        self._keep_gathered = keep_gathered
        self._own_sums: list[Tensor] = []
        """The sums before the reductions of this step."""
        model.to_empty(device=device)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_WatchedReduceScatter(self._own_sums))
        named = list_canonical_parameters(model)
        self._frozen = [
            LocalParameter(name, parameter.shape, to_local(parameter), get_box(parameter))
            for name, parameter in named
            if not parameter.requires_grad
        ]
        shared = find_shared_with_first(model)
        self._entries = [
            _create_entry(
                name,
                parameter,
                mesh,
                moments,
                is_counted=name not in shared,
                is_tied=name == EMBEDDING and model.shape.tie_embeddings,
            )
            for name, parameter in named
            if parameter.requires_grad
        ]

    def begin_backward(self, passes: int) -> None:
        """Configure FSDP to reduce in every backward pass, or with `keep_gathered` only in the last."""
        if self._keep_gathered:
            assert isinstance(self._model, FSDPModule)
            self._model.set_requires_gradient_sync(passes > 0)
            self._model.set_reshard_after_backward(passes > 0)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add FSDP's gradients, which have the type of the parameters, to the float32 sums."""
        for entry in self._entries:
            if entry.gradient is not None and entry.parameter.grad is not None:
                entry.gradient.add_(to_local(entry.parameter.grad))
                entry.parameter.grad = None

    def reduce(self) -> None:
        """Do nothing: the backward pass has reduced."""

    def sum_gradient_squares(self) -> tuple[float, float]:
        """Return sums of squares of this rank's shards."""
        return self._sum_squares(_Entry.sum)

    def sum_weight_squares(self) -> tuple[float, float]:
        """Return sums of squares of this rank's shards of the weights."""
        return self._sum_squares(lambda entry: to_local(entry.parameter))

    def _sum_squares(self, values: Callable[[_Entry], Tensor]) -> tuple[float, float]:
        counted = [entry for entry in self._entries if entry.is_counted]
        divided = [values(entry) for entry in counted if entry.is_divided]
        repeated = [values(entry) for entry in counted if not entry.is_divided]
        return sum_squares(divided), sum_squares(repeated)

    def has_finite_own_gradients(self) -> bool:
        """See `StateStore.has_finite_own_gradients`."""
        sums = self._own_sums or [entry.sum().sum() for entry in self._entries]
        return bool(torch.stack(sums).isfinite().all())

    def find_gradient(self, name: str) -> Tensor:
        """See `StateStore.find_gradient`."""
        return next(entry.sum() for entry in self._entries if entry.name == name)

    def iterate_slots(self) -> Iterator[Slot]:
        """Yield one slot per parameter shard."""
        for entry in self._entries:
            yield Slot(
                to_local(entry.parameter),
                entry.sum(),
                tuple(map(to_local, entry.moments.values())),
                len(entry.parameter.shape) > 1,
                entry.key,
                shared=entry.is_shared,
            )

    def zero_grad(self) -> None:
        """Free the gradients."""
        self._own_sums.clear()
        for entry in self._entries:
            entry.parameter.grad = None
            if entry.gradient is not None:
                entry.gradient.zero_()

    def free_evaluation_memory(self) -> None:
        """Free the gathered parameters that FSDP keeps for a backward pass; the next update would make them stale."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def iterate_parameters(self) -> Iterator[LocalParameter]:
        """See `StateStore.iterate_parameters`."""
        for entry in self._entries:
            parameter = entry.parameter
            yield LocalParameter(entry.name, parameter.shape, to_local(parameter), get_box(parameter))

    def iterate_frozen(self) -> Iterator[LocalParameter]:
        """See `StateStore.iterate_frozen`."""
        yield from self._frozen

    def state_dict(self) -> dict[str, Any]:
        """Return DTensors, which have their offsets in the whole."""
        shards = {
            format_state_name(part, entry.name): value
            for entry in self._entries
            for part, value in ({WEIGHT: entry.parameter.detach()} | entry.moments).items()
        }
        return shards | {OPTIMIZER_STEP: self.step}

    def list_local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's shards."""
        return {name: to_local(value) for name, value in self.state_dict().items()}


def _create_entry(
    name: str,
    parameter: nn.Parameter,
    mesh: MeshCoordinates,
    moments: Sequence[str],
    *,
    is_counted: bool,
    is_tied: bool,
) -> _Entry:
    """Create the entry of a parameter."""
    is_divided = any(cut.axis is Axis.TENSOR for cut in get_division(parameter))
    local = to_local(parameter)
    return _Entry(
        name=name,
        parameter=parameter,
        gradient=None if local.dtype is torch.float32 else torch.zeros_like(local, dtype=torch.float32),
        key=f"{name}:{mesh.dp_rank}:{mesh.tp_rank if is_divided else 0}",
        is_shared=is_tied or (mesh.tp_size > 1 and not is_divided),
        moments={find_moment(moment_name): torch.zeros_like(parameter.detach()) for moment_name in moments},
        is_divided=is_divided,
        is_counted=is_counted,
    )
