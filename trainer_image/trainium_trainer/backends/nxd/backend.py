"""One rank of a job on neuronx-distributed.

A step is one graph per micro-batch; the last one also reduces the gradients, updates and makes the weights, and is
launched before its loss and norm are read.

Guarantees:
- The host waits for the device in `step`, once, and nowhere else.
- Everything that changes between steps reaches a graph as data, so nothing is compiled again after the first step.
- The model's weights follow the master weights from before the first micro-batch on, whatever filled the state.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from trainium_contract.trainer.parallelism import DataParallelMode, Precision
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer.backends.base import Evaluation, StepOutcome, StepTotals
from trainium_trainer.backends.nxd.adamw import Controls
from trainium_trainer.backends.nxd.device import XlaDevice
from trainium_trainer.backends.nxd.groups import join
from trainium_trainer.backends.nxd.layout.divisions import divisions
from trainium_trainer.backends.nxd.llama import apply_recompute, divided_llama, loss_sum
from trainium_trainer.backends.nxd.regions import NxdRegion
from trainium_trainer.backends.nxd.state import NxdState
from trainium_trainer.backends.nxd.stores import (
    NamedParameter,
    NxdReplicatedStore,
    NxdStateStore,
    Sharing,
    Zero1Store,
    square_sum,
)
from trainium_trainer.backends.nxd.summands import Summands
from trainium_trainer.backends.nxd.tuned import tuned_llama
from trainium_trainer.exits import UserError
from trainium_trainer.models.dropout import dropped, sample_keys
from trainium_trainer.models.initial import initial_box
from trainium_trainer.tuning.apply import initial_adapter
from trainium_trainer.tuning.choice import is_adapter
from trainium_worker import Pulse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from trainium_trainer.backends.nxd.layout.pieces import Piece
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.batches.loader import MicroBatch
    from trainium_trainer.models.llama import Llama
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights

_PROBE = (2, 16, 64)
"""Samples, positions, features on which a device's mask of dropout is compared with the host's."""


class NxdBackend:
    """See `backends.base.Backend`."""

    def __init__(self, settings: Settings, pulse: Pulse | None = None) -> None:
        """Join the process groups and find this rank's place. Collective."""
        # NxD calls an older name of autocast in every layer.
        warnings.filterwarnings("ignore", message=".*torch.cuda.amp.autocast.*", category=FutureWarning)
        self._pulse = pulse or Pulse()
        self._config, self._shape, self._choice = settings.config, settings.shape, settings.choice
        self._alone = settings.launch.alone
        self._device = XlaDevice()
        with self._pulse.peers:
            self._groups = join(settings, self._device.device)
        self.mesh = self._groups.mesh
        self._sequence = settings.config.parallelism.sequence and self.mesh.tp_size > 1
        share = self._shape.vocab_size // self.mesh.tp_size
        known = self._shape.vocab_size - self._shape.vocab_padding - self.mesh.tp_rank * share
        self._columns = None if known >= share else max(0, known)
        """Return the number of this rank's rows of the vocabulary that have a token; None for all."""
        self._tokens = 0
        self._noted: list[float] = []
        self._derived = False

    def build(self) -> None:
        """Create the divided model without values, and allocate this rank's state. Collective."""
        precision = self._config.precision
        dtype = torch.float32 if precision is Precision.FLOAT32 else torch.bfloat16
        kept = torch.bfloat16 if precision.keeps_half else torch.float32
        self._model = self._make_model(dtype)
        self._model.to_empty(device=self._device.device)
        self._model.tie()
        # Now, or the first micro-batch would be a separate graph.
        self._model.rotary_table(self._config.data.sequence_length, self._device.device)
        parts = [self._named(name, parameter) for name, parameter in self._model.named_parameters()]
        named = [entry for entry in parts if entry.parameter.requires_grad]
        self._frozen = [entry for entry in parts if not entry.parameter.requires_grad]
        apply_recompute(self._model, self._config.recompute)
        layout = NxdReplicatedStore if self.mesh.dp_mode is DataParallelMode.REPLICATED else Zero1Store
        self._store: NxdStateStore = layout(named, self._config.optimizer, kept)
        if precision.keeps_half:
            self._store.inner.after_update = Sharing(self._store.held, self._groups.tensor).agree
        self._summands = Summands(
            named, self._groups.tensor, sequence=self._sequence, own_regions=self._config.tuning.freezes
        )
        self._loss = torch.zeros((), device=self._device.device)
        self.state = NxdState(self._store.held, self._device)
        self._device.sync()
        if self._drops and self._device.is_lazy and not self._alone:
            self._refuse_other_masks()

    @property
    def _drops(self) -> bool:
        tuning = self._config.tuning
        return tuning.method is TuningMethod.LORA and tuning.lora.dropout > 0

    def _refuse_other_masks(self) -> None:
        """Raise UserError where this device hides other numbers than a CPU does."""
        keys = sample_keys(torch.arange(_PROBE[0]), self._config.seed)
        mask = functools.partial(dropped, module=-1, share=0.5, first=1 << 16)
        (found,) = self._device.fetch([mask(torch.ones(_PROBE).to(self._device.device), keys.to(self._device.device))])
        if not torch.equal(found, mask(torch.ones(_PROBE), keys)):
            raise UserError(
                f"tuning.lora.dropout is {self._config.tuning.lora.dropout:g}, but this device computes with integers "
                "otherwise than a CPU, so a resumed run would not be the same everywhere: set tuning.lora.dropout to 0"
            )

    def _make_model(self, dtype: torch.dtype) -> Llama:
        """Return the divided model, of NxD's layers unless something is frozen."""
        rank, tuning, flash = self._groups.tensor_rank, self._config.tuning, self._device.is_neuron
        if not tuning.freezes:
            return divided_llama(rank, sequence=self._sequence, flash=flash, dtype=dtype)
        region = NxdRegion(self._groups.tensor, sequence=self._sequence)
        return tuned_llama(rank, region, self._choice, tuning.lora, flash=flash, dtype=dtype)

    def _named(self, name: str, parameter: nn.Parameter) -> NamedParameter:
        rank, width = self._groups.tensor_rank, self._config.tuning.lora.rank
        return NamedParameter(
            name, parameter, rank.pieces(name, adapter_rank=width), divisions(rank, name, adapter_rank=width)
        )

    @torch.no_grad()
    def load_frozen(self, base: BaseWeights) -> None:
        """See `Backend.load_frozen`; one parameter at a time is on the host."""
        for entry in self._frozen:
            made = torch.empty(entry.parameter.shape, dtype=entry.parameter.dtype)
            for piece in entry.pieces:
                base.fill(piece.name, piece.offsets, made[piece.start : piece.end])
            entry.parameter.data = made.to(self._device.device)

    def initialize(self, seed: int, base: BaseWeights | None = None, adapter: AdapterWeights | None = None) -> None:
        """See `Backend.initialize`; of a value from the seed the host draws this rank's box."""

        def write(piece: Piece, target: Tensor) -> None:
            name, size = piece.name, torch.Size(piece.whole)
            if adapter is not None and adapter.has(name):
                adapter.fill(name, piece.offsets, target)
            elif is_adapter(name):
                target.copy_(piece.of(initial_adapter(name, size, seed)))
            elif base is not None:
                base.fill(name, piece.offsets, target)
            else:
                target.copy_(initial_box(name, piece.offsets, piece.sizes, seed=seed, shape=self._shape))

        self.state.fill(write)

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
            loss = self._forward(batch, samples=self._keys(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            self._loss += loss.detach()
            if not last:
                self._device.sync()
        self._tokens += batch.valid_tokens

    def _derive(self) -> None:
        """Make the model's weights once, however the state was filled: from a seed, a checkpoint or a snapshot."""
        if not self._derived:
            self.state.upload_local_tensors()
            self._store.derive()
            self._device.sync()
            self._derived = True

    def _forward(self, batch: MicroBatch, *, samples: Tensor | None = None) -> Tensor:
        device = self._device.device
        return loss_sum(
            self._model,
            batch.inputs.to(device),
            batch.labels.to(device),
            sequence=self._sequence,
            columns=self._columns,
            positions=None if batch.positions is None else batch.positions.to(device),
            samples=samples,
        )

    def _keys(self, batch: MicroBatch) -> Tensor | None:
        """Return what names the samples for dropout; None where nothing is dropped."""
        return sample_keys(batch.places, self._config.seed).to(self._device.device) if self._drops else None

    def totals(self, *, stop: bool, memory_ends: bool, vote: int) -> StepTotals:
        """One small sum on the host; tokens of a data-parallel share are counted by one of its ranks."""
        mine = [self._tokens * self.mesh.counts_loss, stop, memory_ends, vote]
        values = torch.tensor(mine, dtype=torch.float64)
        with self._pulse.peers:
            dist.all_reduce(values, group=self._groups.host)
        self._tokens = 0
        tokens, stops, ends, votes = values.tolist()
        return StepTotals(
            tokens=int(tokens), divisor=int(tokens), stop=stops > 0, memory_ends=ends > 0, votes=int(votes)
        )

    def step(self, *, divisor: int, learning_rate: float, clip_norm: float) -> StepOutcome:
        """See `Backend.step`."""
        with self._pulse.work_with_collectives:
            gradients = self._store.gradients()
            finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
            own_loss = self._loss.clone()
            self._summands.add_up(gradients)
            number, betas = int(self.state.step) + 1, self._config.optimizer
            numbers = torch.tensor(
                [
                    learning_rate,
                    1.0 / divisor if divisor else math.nan,
                    clip_norm,
                    1.0 - betas.beta1**number,
                    math.sqrt(1.0 - betas.beta2**number),
                ]
            ).to(self._device.device)
            self._store.step(lambda squares: self._decide(squares, numbers, own_loss, finite))
            self._store.zero_grad()
            self._loss.zero_()
            self._device.sync()  # launches; `_note`, given to it by `_decide`, then waits for loss and norm
        loss, norm, own, own_finite = self._noted
        outcome = StepOutcome(loss / divisor if divisor else math.nan, norm)
        if not outcome.applied:
            is_finite = bool(own_finite) if math.isfinite(loss) else math.isfinite(own)
            outcome = replace(outcome, origins=self._nonfinite_ranks(is_finite=is_finite))
        self.state.step += outcome.applied
        return outcome

    def _nonfinite_ranks(self, *, is_finite: bool) -> tuple[int, ...]:
        """Return the ranks that pass False. Collective."""
        found = torch.zeros(self.mesh.world_size, dtype=torch.int32)
        found[self.mesh.rank] = not is_finite
        with self._pulse.peers:
            dist.all_reduce(found, group=self._groups.host)
        return tuple(found.nonzero().flatten().tolist())

    def _decide(self, squares: Tensor, numbers: Tensor, own_loss: Tensor, own_finite: Tensor) -> Controls:
        """Sum loss and norm over the ranks, and compute the numbers of the update, all on the device."""
        learning_rate, per_token, clip_norm, correction, root_correction = numbers.unbind()
        loss = self._loss.clone()
        dist.all_reduce(loss, group=self._groups.data)
        scale = per_token * self.mesh.dp_size  # gradients are means over the data-parallel ranks
        norm = self._norm(squares) * scale
        finite = torch.isfinite(loss) & torch.isfinite(norm) & torch.isfinite(per_token)
        self._device.after_sync(self._note, torch.stack([loss, norm, own_loss, own_finite.to(loss.dtype)]))
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
    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
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
        return Evaluation(self._noted[0] / int(counted) if counted else math.nan)

    def reference_log_probs(self, batches: Iterable[MicroBatch]) -> Tensor:  # noqa: ARG002 - as `Backend` has it
        """Refuse, as `limits` does before anything runs. Raises UserError."""
        raise UserError("backend Nxd has no loss on pairs of answers: set backend to Native")

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
        """Run an empty reduction on the host."""
        with self._pulse.peers:
            dist.all_reduce(torch.zeros(1), group=self._groups.host)

    def close(self) -> None:
        """Destroy the process groups."""
        dist.destroy_process_group()
