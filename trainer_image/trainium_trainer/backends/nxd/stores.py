"""The storage of weights, master weights, gradients and moments on the nxd backend: replicated or NxD's ZeRO-1.

Guarantees:
- The master weights (of the type that the optimizer computes in) are the state.
- `derive` and every step compute the model's weights from them, never the reverse, so no order of loading restores old
  weights.
- Gradients are summed and reduced in float32, to means over the data-parallel ranks, and keep their memory between
  steps, so every micro-batch is the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import grads, parallel_state
from torch import Tensor, nn
from torch import distributed as dist

from trainium_trainer.backends.nxd.adamw import GraphAdamW, list_adamw_settings
from trainium_trainer.backends.nxd.layout.divisions import find_replicated_rows, find_zero1_rows
from trainium_trainer.backends.nxd.layout.pieces import find_shared_rows, list_norm_terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed import ProcessGroup

    from trainium_contract.trainer.optimizer import OptimizerConfig
    from trainium_trainer.backends.nxd.adamw import UpdateScalars
    from trainium_trainer.backends.nxd.layout.divisions import StoredRows
    from trainium_trainer.backends.nxd.layout.pieces import Piece
    from trainium_trainer.checkpoint.sharding import Division

    Decide = Callable[[Tensor], UpdateScalars]
    """Maps this rank's sum of squares of reduced gradients to the values of the step."""

_BUCKET_MIB = 130
"""The size of ZeRO-1's collectives; NxD warns of wrong results above 140."""


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of the divided model."""

    name: str
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]
    """The pieces of its rows."""
    divisions: tuple[Division, ...]
    """The division of the whole tensor of each piece over the ranks of the job, before ZeRO-1."""


@dataclass(frozen=True, slots=True)
class ParameterState:
    """This rank's part of one parameter's state."""

    name: str
    pieces: tuple[Piece, ...]
    """The pieces of the rows of the three tensors; rows beyond the last piece are padding."""
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    stored: tuple[StoredRows, ...]
    """All tensors that are stacked in the parameter, including those of which this rank has no rows."""


class NxdStateStore(Protocol):
    """One layout of the training state."""

    @property
    def states(self) -> Sequence[ParameterState]:
        """The state of each parameter."""
        ...

    @property
    def inner(self) -> GraphAdamW:
        """The optimizer of the state."""
        ...

    def list_gradients(self) -> list[Tensor]:
        """Return this rank's accumulated gradients before the reduction, in the order of the parameters."""
        ...

    def step(self, decide: Decide) -> None:
        """Reduce the gradients, get the values of the step, update, and derive the model's weights. Collective."""
        ...

    def derive(self) -> None:
        """Derive the model's weights from the master weights. Collective."""
        ...

    def zero_grad(self) -> None:
        """Set the gradients to zero; they keep their memory."""
        ...


class NxdReplicatedStore:
    """Every data-parallel rank holds the state of its tensor-parallel rank."""

    def __init__(self, named: Sequence[NamedParameter], config: OptimizerConfig, dtype: torch.dtype) -> None:
        """Create the state; if the optimizer's `dtype` differs from the model's, with master weights."""
        self._named = named
        self._masters = [
            entry.parameter if entry.parameter.dtype == dtype else nn.Parameter(entry.parameter.data.to(dtype))
            for entry in named
        ]
        self.inner = GraphAdamW(self._masters, **list_adamw_settings(config))
        self._gradients = [torch.zeros_like(master.data, dtype=torch.float32) for master in self._masters]
        for entry, total in zip(named, self._gradients, strict=True):
            entry.parameter.register_post_accumulate_grad_hook(_create_gradient_hook(total))  # type: ignore[no-untyped-call]
        states = [self.inner.state[master] for master in self._masters]
        self.states = [
            ParameterState(
                entry.name,
                entry.pieces,
                master,
                state["exp_avg"],
                state["exp_avg_sq"],
                find_replicated_rows(entry.pieces, entry.divisions),
            )
            for entry, master, state in zip(named, self._masters, states, strict=True)
        ]

    def list_gradients(self) -> list[Tensor]:
        """See `NxdStateStore.list_gradients`."""
        return self._gradients

    @torch.no_grad()
    def step(self, decide: Decide) -> None:
        """See `NxdStateStore.step`."""
        grads.bucket_allreduce_gradients(self._gradients)
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        self.inner.scalars = decide(sum_squares(self._gradients, [state.pieces for state in self.states]))
        self.inner.step()
        for master in self._masters:
            master.grad = None
        self.derive()

    @torch.no_grad()
    def derive(self) -> None:
        """See `NxdStateStore.derive`."""
        for entry, master in zip(self._named, self._masters, strict=True):
            if entry.parameter is not master:
                entry.parameter.copy_(master)

    def zero_grad(self) -> None:
        """See `NxdStateStore.zero_grad`."""
        for gradient in self._gradients:
            gradient.zero_()


def _create_gradient_hook(total: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a parameter's gradient to `total` and frees it."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add


class Zero1Store:
    """Each data-parallel rank holds a chunk of rows of every parameter's state (NxD's ZeRO-1)."""

    def __init__(self, named: Sequence[NamedParameter], config: OptimizerConfig, dtype: torch.dtype) -> None:
        """Create the state; `dtype` is that of master weights and moments."""
        size = parallel_state.get_data_parallel_size()
        self._optimizer = _Zero1WithUpdateHook(
            [entry.parameter for entry in named],
            GraphAdamW,
            optimizer_dtype=dtype,
            pin_layout=False,
            grad_norm_groups=parallel_state.get_tensor_model_parallel_replica_groups(),
            bucket_cap_mb_reduce_scatter=_BUCKET_MIB,
            bucket_cap_mb_all_gather=max(1, _BUCKET_MIB // size),
            use_grad_acc_hook=True,
            save_master_weights=True,
            **list_adamw_settings(config),
        )
        self.inner: GraphAdamW = self._optimizer.base_optimizer
        self._shards: list[nn.Parameter] = self.inner.param_groups[0]["params"]
        rank, self.states = self._optimizer.local_rank, list[ParameterState]()
        for entry, shard in zip(named, self._shards, strict=True):
            rows, state = shard.shape[0], self.inner.state[shard]
            overlaps = [piece.within(rank * rows, (rank + 1) * rows) for piece in entry.pieces]
            pieces = tuple(piece for piece in overlaps if piece is not None)
            stored = find_zero1_rows(entry.pieces, entry.divisions, rank, rows)
            self.states.append(ParameterState(entry.name, pieces, shard, state["exp_avg"], state["exp_avg_sq"], stored))
            # The library would create them in the first backward pass, which would then be a separate graph.
            gradient = torch.zeros(entry.parameter.shape, device=entry.parameter.device)
            shard.main_grad = entry.parameter.main_grad = gradient  # type: ignore[attr-defined]

    def list_gradients(self) -> list[Tensor]:
        """See `NxdStateStore.list_gradients`."""
        gradients: list[Tensor] = [shard.main_grad for shard in self._shards]  # type: ignore[attr-defined]
        return gradients

    def step(self, decide: Decide) -> None:
        """See `NxdStateStore.step`."""

        def before_update() -> None:
            gradients = [shard.grad for shard in self._shards]
            pieces = [state.pieces for state in self.states]
            sums = sum_squares([gradient for gradient in gradients if gradient is not None], pieces)
            self.inner.scalars = decide(sums)

        self._optimizer.before_update = before_update
        self._optimizer.step()

    @torch.no_grad()
    def derive(self) -> None:
        """See `NxdStateStore.derive`."""
        self._optimizer.allgather_weights_and_update_full_parameter()

    def zero_grad(self) -> None:
        """See `NxdStateStore.zero_grad`."""
        for gradient in self.list_gradients():
            gradient.zero_()


class _Zero1WithUpdateHook(NeuronZero1Optimizer):  # type: ignore[misc]
    """NxD's ZeRO-1, with the values of the update computed in place of its clipping."""

    before_update: Callable[[], None]

    def _clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> None:  # noqa: ARG002 - the library's signature
        """Compute the values of the update, between reduction and update."""
        self.before_update()


def sum_squares(tensors: Sequence[Tensor], pieces: Sequence[tuple[Piece, ...]]) -> Tensor:
    """Return the sum of squares in float32; values on several tensor-parallel ranks are divided by their number."""
    terms = []
    for tensor, parts in zip(tensors, pieces, strict=True):
        terms += [
            _compute_squared_norm(tensor[start:end]) / replicas for start, end, replicas in list_norm_terms(parts)
        ]
    return torch.stack(terms).sum()


def _compute_squared_norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values.float())
    return norm * norm


class SharedRowSync:
    """The rows of this rank's master weights that other ranks of its tensor-parallel group hold as well.

    Norms and repeated key/value heads are updated on every rank that holds them. With deterministic rounding equal
    inputs stay equal; with a NeuronCore's stochastic rounding they would drift apart. After `broadcast_first_rank` the
    weights are bit for bit those of the group's first rank, because adding zeros changes no number. Moments may
    differ: only those of the first rank affect the weights.
    """

    def __init__(self, states: Iterable[ParameterState], tensor: ProcessGroup) -> None:
        fully_replicated_rows: list[Tensor] = []
        kv_shared_rows: list[Tensor] = []
        for entry in states:
            for start, end, all_hold in find_shared_rows(entry.pieces, tensor.size()):
                (fully_replicated_rows if all_hold else kv_shared_rows).append(entry.master.detach()[start:end])
        self._groups = [(tensor, fully_replicated_rows)]
        if kv_shared_rows:
            self._groups.append((parallel_state.get_kv_shared_group(), kv_shared_rows))

    @torch.no_grad()
    def broadcast_first_rank(self) -> None:
        """Set the rows to the values of the group's first rank. Collective."""
        for group, rows in self._groups:
            if not rows or group.size() == 1:
                continue
            joined = torch.cat([part.flatten() for part in rows]) * float(dist.get_rank(group) == 0)
            dist.all_reduce(joined, group=group)
            for part, values in zip(rows, torch.split(joined, [part.numel() for part in rows]), strict=True):
                part.copy_(values.view(part.shape))
