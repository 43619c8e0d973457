"""One rank of a job on neuronx-distributed.

A step is one graph per micro-batch; the last one also reduces the gradients, updates and makes the weights, and is
launched before its loss and norm are read. Invariants: the host waits for the device in `step`, once, and nowhere else;
everything that changes between steps reaches a graph as data, so nothing is compiled again after the first step; the
model's weights follow the master weights from before the first micro-batch on, whatever filled the state.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from trainium_contract.trainer_parallelism import DataParallelMode, Precision
from trainium_trainer.backends.base import StepOutcome, StepTotals
from trainium_trainer.backends.nxd.adamw import Controls
from trainium_trainer.backends.nxd.device import Device
from trainium_trainer.backends.nxd.groups import join
from trainium_trainer.backends.nxd.llama import apply_recompute, divided_llama, loss_sum
from trainium_trainer.backends.nxd.sharing import Sharing
from trainium_trainer.backends.nxd.state import NxdState
from trainium_trainer.backends.nxd.stores import Named, ReplicatedStore, Store, Zero1Store, square_sum
from trainium_trainer.models.llama import initial_weight
from trainium_trainer.monitor.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from trainium_trainer.config import Settings
    from trainium_trainer.data.loader import MicroBatch

_NORMS = "norm.weight"


class NxdBackend:
    """See `backends.base.Backend`."""

    def __init__(self, settings: Settings, pulse: Pulse | None = None) -> None:
        """Join the process groups and find this rank's place. Collective."""
        # NxD calls an older name of autocast in every layer.
        warnings.filterwarnings("ignore", message=".*torch.cuda.amp.autocast.*", category=FutureWarning)
        self._pulse = pulse or Pulse()
        self._config, self._shape = settings.config, settings.shape
        self._device = Device()
        with self._pulse.peers:
            self._groups = join(settings, self._device.device)
        self.mesh = self._groups.mesh
        self._sequence = settings.config.parallelism.sequence and self.mesh.tp_size > 1
        self._tokens = 0
        self._noted: list[float] = []
        self._derived = False

    def build(self) -> None:
        """Create the divided model without values, and allocate this rank's state. Collective."""
        precision = self._config.precision
        dtype = torch.float32 if precision is Precision.FLOAT32 else torch.bfloat16
        kept = torch.bfloat16 if precision.keeps_half else torch.float32
        rank = self._groups.tensor_rank
        self._model = divided_llama(rank, sequence=self._sequence, flash=self._device.is_neuron, dtype=dtype)
        self._model.to_empty(device=self._device.device)
        self._model.tie()
        # Now, or the first micro-batch would be a graph of its own.
        self._model.rotary_table(self._config.data.sequence_length, self._device.device)
        named = [Named(name, parameter, rank.pieces(name)) for name, parameter in self._model.named_parameters()]
        apply_recompute(self._model, self._config.recompute)
        layout = ReplicatedStore if self.mesh.dp_mode is DataParallelMode.REPLICATED else Zero1Store
        self._store: Store = layout(named, self._config.optimizer, kept)
        if precision.keeps_half:
            self._store.inner.after_update = Sharing(self._store.held, self._groups.tensor).agree
        self._norms = [number for number, entry in enumerate(named) if entry.name.endswith(_NORMS)]
        self._loss = torch.zeros((), device=self._device.device)
        self.state = NxdState(self._store.held, self._device)
        self._device.sync()

    def initialize(self, seed: int) -> None:
        """Make each parameter's full value on the host, keep this rank's part, drop the rest."""
        layers, std = self._shape.num_layers, self._shape.initial_std

        def whole(name: str, size: torch.Size) -> Tensor:
            return initial_weight(name, size, seed=seed, num_layers=layers, std=std)

        self.state.fill(whole)

    def agree(self, value: int) -> bool:
        """Compare by the greatest value and the greatest negative value."""
        pair = torch.tensor([value, -value], dtype=torch.int64)
        with self._pulse.peers:
            dist.all_reduce(pair, dist.ReduceOp.MAX, group=self._groups.host)
        return int(pair[0]) == -int(pair[1])

    def accumulate(self, batch: MicroBatch, *, last: bool) -> None:
        """Record forward and backward of the summed loss; launch them unless the update joins them."""
        self._derive()
        with self._pulse.work_with_collectives:
            loss = self._forward(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self._loss += loss.detach()
            if not last:
                self._device.sync()
        self._tokens += batch.valid_tokens

    def _derive(self) -> None:
        """Make the model's weights once, however the state was filled: from a seed, a checkpoint or a snapshot."""
        if not self._derived:
            self.state.settle()
            self._store.derive()
            self._device.sync()
            self._derived = True

    def _forward(self, batch: MicroBatch) -> Tensor:
        device = self._device.device
        return loss_sum(self._model, batch.inputs.to(device), batch.labels.to(device), sequence=self._sequence)

    def totals(self, *, stop: bool, memory_ends: bool, vote: float) -> StepTotals:
        """One small sum on the host; tokens of a data-parallel share are counted by one of its ranks."""
        mine = [self._tokens * self.mesh.counts_loss, stop, memory_ends, vote]
        values = torch.tensor(mine, dtype=torch.float64)
        with self._pulse.peers:
            dist.all_reduce(values, group=self._groups.host)
        self._tokens = 0
        tokens, stops, ends, votes = values.tolist()
        return StepTotals(tokens=int(tokens), stop=stops > 0, memory_ends=ends > 0, votes=votes)

    def step(self, *, tokens: int, learning_rate: float, clip_norm: float) -> StepOutcome:
        """See `Backend.step`."""
        with self._pulse.work_with_collectives:
            if self._sequence:
                gradients = self._store.gradients()
                for number in self._norms:  # each rank has seen its part of the sequence only
                    dist.all_reduce(gradients[number], group=self._groups.tensor)
            number, betas = int(self.state.step) + 1, self._config.optimizer
            numbers = torch.tensor(
                [
                    learning_rate,
                    1.0 / tokens if tokens else math.nan,
                    clip_norm,
                    1.0 - betas.beta1**number,
                    math.sqrt(1.0 - betas.beta2**number),
                ]
            ).to(self._device.device)
            self._store.step(lambda squares: self._decide(squares, numbers))
            self._store.forget()
            self._loss.zero_()
            self._device.sync()  # launches; `_note`, given to it by `_decide`, then waits for loss and norm
        loss, norm = self._noted
        outcome = StepOutcome(loss / tokens if tokens else math.nan, norm)
        self.state.step += outcome.applied
        return outcome

    def _decide(self, squares: Tensor, numbers: Tensor) -> Controls:
        """Sum loss and norm over the ranks, and say what the update has to do, all on the device."""
        learning_rate, per_token, clip_norm, correction, root_correction = numbers.unbind()
        loss = self._loss.clone()
        dist.all_reduce(loss, group=self._groups.data)
        scale = per_token * self.mesh.dp_size  # gradients are means over the data-parallel ranks
        norm = self._norm(squares) * scale
        finite = torch.isfinite(loss) & torch.isfinite(norm) & torch.isfinite(per_token)
        self._device.after_sync(self._note, torch.stack([loss, norm]))
        return Controls(
            learning_rate=learning_rate,
            gradient_scale=scale * torch.clamp(clip_norm / (norm + 1e-6), max=1.0),
            correction=correction,
            root_correction=root_correction,
            finite=finite,
        )

    def _norm(self, squares: Tensor) -> Tensor:
        """Norm over all ranks of what they hold, on the device."""
        total = squares.clone()
        if self.mesh.dp_mode is not DataParallelMode.REPLICATED:
            dist.all_reduce(total, group=self._groups.data)
        dist.all_reduce(total, group=self._groups.tensor)
        return total.sqrt()

    def _note(self, values: Tensor) -> None:
        self._noted = values.tolist()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> float:
        """See `Backend.evaluate`."""
        self._derive()
        tokens = 0
        with self._pulse.work_with_collectives:
            loss = torch.zeros((), device=self._device.device)
            for batch in batches:
                loss += self._forward(batch)
                tokens += batch.valid_tokens
                self._device.sync()
            dist.all_reduce(loss, group=self._groups.data)
            self._device.after_sync(self._note, loss.reshape(1))
            self._device.sync()
        counted = torch.tensor(tokens * self.mesh.counts_loss)
        with self._pulse.peers:
            dist.all_reduce(counted, group=self._groups.host)
        return self._noted[0] / int(counted) if counted else math.nan

    @torch.no_grad()
    def parameter_norm(self) -> float:
        """See `Backend.parameter_norm`."""
        held = self._store.held
        with self._pulse.work_with_collectives:
            norm = self._norm(square_sum([entry.master for entry in held], [entry.pieces for entry in held]))
            self._device.after_sync(self._note, norm.reshape(1))
            self._device.sync()
        return self._noted[0]

    def barrier(self) -> None:
        """An empty reduction on the host."""
        with self._pulse.peers:
            dist.all_reduce(torch.zeros(1), group=self._groups.host)

    def close(self) -> None:
        """Destroy the process groups."""
        dist.destroy_process_group()
