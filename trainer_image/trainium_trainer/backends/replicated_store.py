"""Replicated data parallelism: one flat buffer per kind of value, gradients reduced bucket by bucket.

Guarantees:
- Parameters and their gradients are views of the flat buffers, so a snapshot, an update and a reduction each access a
  few long ranges.
- Buckets are reduced in one fixed order on every rank, so sums are bitwise reproducible.
- Gradients are sums (not means) over the ranks.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainium_trainer.backends.optimizers import Slot
from trainium_trainer.backends.state_store import LocalParameter, StateStore, sum_squares
from trainium_trainer.checkpoint.format.live_state import get_box, get_division, is_dtensor
from trainium_trainer.models.stages import find_shared_with_first, list_canonical_parameters
from trainium_trainer.models.state_dict import OPTIMIZER_STEP, WEIGHT, find_moment, format_state_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed import ProcessGroup, Work

    from trainium_trainer.checkpoint.sharding import Box
    from trainium_trainer.models.llama import Llama

_ALIGNMENT = 16  # in float32 values: one cache line, so that no two parameters share one
_BUCKET_VALUES = 6 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Entry:
    """The position of a parameter in the flat buffers."""

    name: str
    parameter: nn.Parameter
    box: Box
    """The box of the parameter that this rank holds."""
    offset: int
    is_divided: bool

    @property
    def values(self) -> slice:
        """The range of the parameter in the flat buffers."""
        return slice(self.offset, self.offset + self.box.volume)


class ReplicatedStore(StateStore):
    """Flat buffers over a model whose parameters may be divided by tensor parallelism."""

    def __init__(
        self,
        model: Llama,
        device: torch.device,
        dp: ProcessGroup | None,
        tp_rank: int,
        *,
        moments: Sequence[str],
        half: bool = False,
    ) -> None:
        """Create the buffers and replace the parameters of `model`, the whole or this rank's stage.

        `moments` are those of the optimizer by name; `half`: weights and moments are in bfloat16.
        """
        self.step = torch.zeros((), dtype=torch.int64)
        self._dp = dp
        self._tp_rank = tp_rank
        self._half = half
        self._entries, self._ends, total = _plan_buffers(model)
        self._frozen: list[LocalParameter] = []
        dtype = torch.bfloat16 if half else torch.float32
        self._flat = {
            part: torch.zeros(total, dtype=dtype, device=device) for part in (WEIGHT, *map(find_moment, moments))
        }
        self._gradients = torch.zeros(total, device=device)
        self._adopt(model, device)
        self._bounds = self._compute_bucket_bounds(total)
        self._slot_bounds = self._split_by_kind(total)
        self._pending = [0] * len(self._bounds)
        self._passes = [0] * len(self._entries)
        self._next_bucket = 0
        self._works: list[Work] = []
        self._own_sums: list[Tensor] = []
        """The sum of each bucket before its reduction."""

    def _adopt(self, model: Llama, device: torch.device) -> None:
        """Turn every trained parameter and its gradient into views of the flat buffers; allocate the others."""
        replacement: dict[int, nn.Parameter] = {}
        for name, frozen in list_canonical_parameters(model):
            if not frozen.requires_grad:
                box = get_box(frozen)
                local = torch.zeros(box.sizes, dtype=frozen.dtype, device=device)
                replacement[id(frozen)] = nn.Parameter(_wrap_like(frozen, local), requires_grad=False)
                self._frozen.append(LocalParameter(name, frozen.shape, local, box))
        for index, entry in enumerate(self._entries):
            parameter = nn.Parameter(self._slice_view(self._flat[WEIGHT], entry))
            replacement[id(entry.parameter)] = parameter
            gradient = self._slice_view(self._gradients, entry)
            if not self._half:
                parameter.grad = gradient
            if self._half or self._dp is not None:
                hook = functools.partial(self._on_gradient_ready, index, gradient)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for module in model.modules():
            for name, old in list(module._parameters.items()):  # noqa: SLF001 - the place where parameters are replaced
                if old is not None:
                    module.register_parameter(name, replacement[id(old)])

    def _slice_view(self, flat: Tensor, entry: _Entry) -> Tensor:
        return _wrap_like(entry.parameter, flat[entry.values].view(entry.box.sizes))

    def _compute_bucket_bounds(self, total: int) -> list[tuple[int, int]]:
        bounds: list[tuple[int, int]] = []
        if not self._entries:
            return bounds
        start = 0
        for entry in self._entries[1:]:
            if entry.offset - start >= _BUCKET_VALUES:
                bounds.append((start, entry.offset))
                start = entry.offset
        bounds.append((start, total))
        return bounds

    def _split_by_kind(self, total: int) -> list[tuple[int, int, bool]]:
        """Return the buckets, split between matrices and vectors: (start, end, has matrices)."""
        kinds = {entry.offset: len(entry.parameter.shape) > 1 for entry in self._entries}
        if not kinds:
            return []
        kind_changes = [after for before, after in itertools.pairwise(kinds) if kinds[before] != kinds[after]]
        starts = sorted({start for start, _ in self._bounds} | set(kind_changes))
        return [(start, end, kinds[start]) for start, end in itertools.pairwise([*starts, total])]

    def begin_backward(self, passes: int) -> None:
        """Arm the buckets: each is reduced after this many more backward passes of its parameters."""
        self._passes = [passes] * len(self._entries)
        if passes:
            self._next_bucket = 0
            self._pending = [sum(start <= entry.offset < end for entry in self._entries) for start, end in self._bounds]

    @torch.no_grad()
    def _on_gradient_ready(self, index: int, gradient: Tensor, parameter: Tensor) -> None:
        """Count a parameter whose gradient is complete for this backward pass; called by autograd."""
        if self._half and parameter.grad is not None:
            gradient += parameter.grad
            parameter.grad = None
        if self._dp is None or not self._passes[index]:
            return
        self._passes[index] -= 1
        if self._passes[index]:
            return
        offset = self._entries[index].offset
        bucket = next(number for number, (start, end) in enumerate(self._bounds) if start <= offset < end)
        self._pending[bucket] -= 1
        # In a fixed order, because all ranks must issue the same collectives although gradients complete in any order.
        while self._next_bucket < len(self._bounds) and self._pending[self._next_bucket] == 0:
            self._launch()

    def _launch(self) -> None:
        start, end = self._bounds[self._next_bucket]
        self._next_bucket += 1
        # A sum is nonfinite if a value is; after the reduction every rank has the values of all ranks.
        self._own_sums.append(self._gradients[start:end].sum())
        work = torch.distributed.all_reduce(self._gradients[start:end], group=self._dp, async_op=True)
        self._works.append(work)

    def accumulate(self) -> None:
        """Do nothing: hooks count every gradient."""

    def reduce(self) -> None:
        """Launch the remaining reductions and wait for all buckets."""
        if self._dp is None:
            return
        while self._next_bucket < len(self._bounds):
            self._launch()
        for work in self._works:
            work.wait()
        self._works.clear()

    def has_finite_own_gradients(self) -> bool:
        """See `StateStore.has_finite_own_gradients`."""
        sums = self._own_sums or [self._gradients.sum()]
        return bool(torch.stack(sums).isfinite().all())

    def sum_gradient_squares(self) -> tuple[float, float]:
        """Return sums of squares of divided and of repeated gradients, over fixed ranges."""
        return self._sum_squares(self._gradients)

    def sum_weight_squares(self) -> tuple[float, float]:
        """Return the sums of squares of the weights; the gaps between weights are zero."""
        return self._sum_squares(self._flat[WEIGHT])

    def _sum_squares(self, flat: Tensor) -> tuple[float, float]:
        divided, repeated = self._ends
        return sum_squares(_split_ranges(flat[:divided])), sum_squares(_split_ranges(flat[divided:repeated]))

    def find_gradient(self, name: str) -> Tensor:
        """See `StateStore.find_gradient`."""
        entry = next(entry for entry in self._entries if entry.name == name)
        return self._gradients[entry.values]

    def iterate_slots(self) -> Iterator[Slot]:
        """Yield the flat buffers in ranges that keep temporaries small, matrices apart from vectors.

        In bfloat16 a range is a parameter, because noise depends on the name: copies of a tied weight have other
        offsets.
        """
        if self._half:
            for entry in self._entries:
                key = f"{entry.name}:{self._tp_rank if entry.is_divided else 0}"
                yield self._create_slot(entry.values, is_matrix=len(entry.parameter.shape) > 1, key=key)
            return
        for start, end, is_matrix in self._slot_bounds:
            yield self._create_slot(slice(start, end), is_matrix=is_matrix)

    def _create_slot(self, values: slice, *, is_matrix: bool, key: str = "") -> Slot:
        weight, *moments = (flat[values] for flat in self._flat.values())
        return Slot(weight, self._gradients[values], tuple(moments), is_matrix, key)

    def zero_grad(self) -> None:
        """Set the gradients to zero; they keep their memory."""
        self._gradients.zero_()
        self._own_sums.clear()

    def free_evaluation_memory(self) -> None:
        """Do nothing: nothing was gathered."""

    def iterate_parameters(self) -> Iterator[LocalParameter]:
        """See `StateStore.iterate_parameters`."""
        for entry in self._entries:
            local = self._flat[WEIGHT][entry.values].view(entry.box.sizes)
            yield LocalParameter(entry.name, entry.parameter.shape, local, entry.box)

    def iterate_frozen(self) -> Iterator[LocalParameter]:
        """See `StateStore.iterate_frozen`."""
        yield from self._frozen

    def state_dict(self) -> dict[str, Any]:
        """Return one view per parameter and kind of value."""
        views = {
            format_state_name(part, entry.name): self._slice_view(flat, entry)
            for part, flat in self._flat.items()
            for entry in self._entries
        }
        return views | {OPTIMIZER_STEP: self.step}

    def list_local_tensors(self) -> dict[str, Tensor]:
        """Return the flat buffers themselves."""
        return self._flat | {OPTIMIZER_STEP: self.step}


def _split_ranges(flat: Tensor) -> list[Tensor]:
    return [flat[start : start + _BUCKET_VALUES] for start in range(0, flat.numel(), _BUCKET_VALUES)]


def _plan_buffers(model: Llama) -> tuple[list[_Entry], tuple[int, int], int]:
    """Return the entries, the ends of the regions of divided and of repeated parameters, and the total length.

    Parameters are in reverse order of use, so that the gradients of the first bucket complete first. Parameters that
    tensor parallelism repeats come after the divided ones, so that the norm of either kind is that of one range.
    Without tensor parallelism all parameters count as divided. In either region vectors come last, so that parameters
    without decay form one range. Parameters that another pipeline stage counts come after both.
    """
    shared, named = find_shared_with_first(model), list_canonical_parameters(model)[::-1]
    tensor_parallel = any(is_dtensor(parameter) for _, parameter in named)
    placed = [
        (name, parameter, bool(get_division(parameter)) or not tensor_parallel)
        for name, parameter in named
        if parameter.requires_grad
    ]
    placed.sort(key=lambda item: (item[0] in shared, not item[2], len(item[1].shape) == 1))
    entries: list[_Entry] = []
    offset = divided_end = repeated_end = 0
    for name, parameter, is_divided in placed:
        box = get_box(parameter)
        entries.append(_Entry(name, parameter, box, offset, is_divided))
        offset += -(-box.volume // _ALIGNMENT) * _ALIGNMENT
        if name not in shared:
            divided_end = offset if is_divided else divided_end
            repeated_end = offset
    return entries, (divided_end, repeated_end), offset


def _wrap_like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """Wrap `local` as this rank's part of a tensor divided like `parameter`."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - only tensor parallelism pays for it

    return DTensor.from_local(
        local,
        _as_dtensor(parameter).device_mesh,
        _as_dtensor(parameter).placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _as_dtensor(parameter: nn.Parameter) -> Any:
    """Return the parameter with the attributes that only a DTensor has."""
    return parameter
