"""One rank of a job on neuronx-distributed.

A step is one graph per micro-batch; the last one also reduces the gradients, updates the state and derives the weights,
and is launched before its loss and norm are read.

Guarantees:
- The host waits for the device only once per step, in `step`.
- Values that change between steps are inputs of a graph, so nothing is recompiled after the first step.
- The model's weights are derived from the master weights before the first micro-batch, no matter what filled the state.
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
from trainium_trainer.backends.nxd.adamw import UpdateScalars
from trainium_trainer.backends.nxd.device import XlaDevice
from trainium_trainer.backends.nxd.finetune_llama import build_finetune_llama
from trainium_trainer.backends.nxd.groups import create_groups
from trainium_trainer.backends.nxd.layout.divisions import find_divisions
from trainium_trainer.backends.nxd.llama import apply_recompute, build_llama, compute_loss_sum
from trainium_trainer.backends.nxd.partial_gradients import PartialGradients
from trainium_trainer.backends.nxd.regions import NxdRegion
from trainium_trainer.backends.nxd.state import NxdState
from trainium_trainer.backends.nxd.stores import (
    NamedParameter,
    NxdReplicatedStore,
    NxdStateStore,
    SharedRowSync,
    Zero1Store,
    sum_squares,
)
from trainium_trainer.exits import UserError
from trainium_trainer.models.dropout import apply_dropout, compute_sample_keys
from trainium_trainer.models.initialization import draw_initial_slice
from trainium_trainer.tuning.apply import draw_initial_adapter
from trainium_trainer.tuning.trainable import is_adapter
from trainium_worker.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from trainium_trainer.backends.nxd.layout.pieces import Piece
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.loader import MicroBatch
    from trainium_trainer.models.llama import Llama
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights

_PROBE = (2, 16, 64)
"""The samples, positions and features on which a device's dropout mask is compared with the host's."""


class NxdBackend:
    """See `backends.base.Backend`."""

    def __init__(self, settings: Settings, pulse: Pulse | None = None) -> None:
        """Join the process groups and get this rank's coordinates. Collective."""
        # NxD calls a deprecated name of autocast in every layer.
        warnings.filterwarnings("ignore", message=".*torch.cuda.amp.autocast.*", category=FutureWarning)
        self._pulse = pulse or Pulse()
        self._config, self._shape, self._trainable = settings.config, settings.shape, settings.trainable
        self._is_dry_run = settings.launch.is_dry_run
        self._device = XlaDevice()
        with self._pulse.waiting_for_peers:
            self._groups = create_groups(settings, self._device.device)
        self.mesh = self._groups.mesh
        self._sequence_parallel = settings.config.parallelism.sequence and self.mesh.tp_size > 1
        rows = self._shape.vocab_size // self.mesh.tp_size
        unpadded_rows = self._shape.vocab_size - self._shape.vocab_padding - self.mesh.tp_rank * rows
        self._columns = None if unpadded_rows >= rows else max(0, unpadded_rows)
        """The number of this rank's rows of the vocabulary without padding; None for all."""
        self._tokens = 0
        self._values: list[float] = []
        self._has_derived_weights = False

    def build(self) -> None:
        """Create the divided model without values and allocate this rank's state. Collective."""
        precision = self._config.precision
        dtype = torch.float32 if precision is Precision.FLOAT32 else torch.bfloat16
        weight_dtype = torch.bfloat16 if precision.has_bfloat16_state else torch.float32
        self._model = self._build_model(dtype)
        self._model.to_empty(device=self._device.device)
        self._model.tie()
        # Done now, because otherwise the first micro-batch would be a separate graph.
        self._model.compute_rotary_table(self._config.data.sequence_length, self._device.device)
        parts = [self._name_parameter(name, parameter) for name, parameter in self._model.named_parameters()]
        trained = [entry for entry in parts if entry.parameter.requires_grad]
        self._frozen = [entry for entry in parts if not entry.parameter.requires_grad]
        apply_recompute(self._model, self._config.recompute)
        store_class = NxdReplicatedStore if self.mesh.dp_mode is DataParallelMode.REPLICATED else Zero1Store
        self._store: NxdStateStore = store_class(trained, self._config.optimizer, weight_dtype)
        if precision.has_bfloat16_state:
            self._store.inner.after_update = SharedRowSync(self._store.states, self._groups.tensor).broadcast_first_rank
        self._partial_gradients = PartialGradients(
            trained,
            self._groups.tensor,
            sequence_parallel=self._sequence_parallel,
            own_regions=self._config.tuning.freezes,
        )
        self._loss = torch.zeros((), device=self._device.device)
        self.state = NxdState(self._store.states, self._device)
        self._device.sync()
        if self._uses_dropout and self._device.is_lazy and not self._is_dry_run:
            self._check_dropout_masks()

    @property
    def _uses_dropout(self) -> bool:
        tuning = self._config.tuning
        return tuning.method is TuningMethod.LORA and tuning.lora.dropout > 0

    def _check_dropout_masks(self) -> None:
        """Raise UserError if this device's dropout masks differ from a CPU's."""
        keys = compute_sample_keys(torch.arange(_PROBE[0]), self._config.seed)
        mask = functools.partial(apply_dropout, module=-1, drop_probability=0.5, first_feature=1 << 16)
        (actual,) = self._device.fetch([mask(torch.ones(_PROBE).to(self._device.device), keys.to(self._device.device))])
        if not torch.equal(actual, mask(torch.ones(_PROBE), keys)):
            raise UserError(
                f"tuning.lora.dropout is {self._config.tuning.lora.dropout:g}, but this device computes with integers "
                "otherwise than a CPU, so a resumed run would not be the same everywhere: set tuning.lora.dropout to 0"
            )

    def _build_model(self, dtype: torch.dtype) -> Llama:
        """Create the divided model, of NxD's layers unless weights are frozen."""
        rank, tuning, flash = self._groups.tensor_rank, self._config.tuning, self._device.is_neuron
        if not tuning.freezes:
            return build_llama(rank, sequence_parallel=self._sequence_parallel, flash=flash, dtype=dtype)
        region = NxdRegion(self._groups.tensor, sequence_parallel=self._sequence_parallel)
        return build_finetune_llama(rank, region, self._trainable, tuning.lora, flash=flash, dtype=dtype)

    def _name_parameter(self, name: str, parameter: nn.Parameter) -> NamedParameter:
        rank, width = self._groups.tensor_rank, self._config.tuning.lora.rank
        return NamedParameter(
            name, parameter, rank.find_pieces(name, adapter_rank=width), find_divisions(rank, name, adapter_rank=width)
        )

    @torch.no_grad()
    def load_frozen(self, base: BaseWeights) -> None:
        """See `Backend.load_frozen`; one parameter at a time is on the host."""
        for entry in self._frozen:
            weight = torch.empty(entry.parameter.shape, dtype=entry.parameter.dtype)
            for piece in entry.pieces:
                base.fill(piece.name, piece.offsets, weight[piece.start : piece.end])
            entry.parameter.data = weight.to(self._device.device)

    def initialize(self, seed: int, base: BaseWeights | None = None, adapter: AdapterWeights | None = None) -> None:
        """See `Backend.initialize`; the host draws this rank's boxes of the initial values."""

        def write(piece: Piece, target: Tensor) -> None:
            name, size = piece.name, torch.Size(piece.whole)
            if adapter is not None and adapter.has(name):
                adapter.fill(name, piece.offsets, target)
            elif is_adapter(name):
                target.copy_(piece.slice_of(draw_initial_adapter(name, size, seed)))
            elif base is not None:
                base.fill(name, piece.offsets, target)
            else:
                target.copy_(draw_initial_slice(name, piece.offsets, piece.sizes, seed=seed, shape=self._shape))

        self.state.fill(write)

    def accumulate(self, batch: MicroBatch, *, last: bool) -> None:
        """Record forward and backward of the summed loss; launch them unless the update joins the graph."""
        self._derive_weights()
        with self._pulse.work_with_collectives:
            loss = self._forward(batch, samples=self._create_dropout_keys(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            self._loss += loss.detach()
            if not last:
                self._device.sync()
        self._tokens += batch.valid_tokens

    def _derive_weights(self) -> None:
        """Derive the model's weights once after the state was filled from a seed, a checkpoint or a snapshot."""
        if not self._has_derived_weights:
            self.state.upload_local_tensors()
            self._store.derive()
            self._device.sync()
            self._has_derived_weights = True

    def _forward(self, batch: MicroBatch, *, samples: Tensor | None = None) -> Tensor:
        device = self._device.device
        return compute_loss_sum(
            self._model,
            batch.inputs.to(device),
            batch.labels.to(device),
            sequence_parallel=self._sequence_parallel,
            columns=self._columns,
            positions=None if batch.positions is None else batch.positions.to(device),
            samples=samples,
        )

    def _create_dropout_keys(self, batch: MicroBatch) -> Tensor | None:
        """Return the keys of the samples for dropout; None without dropout."""
        return (
            compute_sample_keys(batch.sample_positions, self._config.seed).to(self._device.device)
            if self._uses_dropout
            else None
        )

    def all_reduce_totals(self, *, stop: bool, memory_ends: bool, vote: int) -> StepTotals:
        """See `Backend.all_reduce_totals`: one all-reduce on the host; one rank contributes the tokens of a share."""
        own_totals = [self._tokens * self.mesh.counts_loss, stop, memory_ends, vote]
        values = torch.tensor(own_totals, dtype=torch.float64)
        with self._pulse.waiting_for_peers:
            dist.all_reduce(values, group=self._groups.host)
        self._tokens = 0
        tokens, stops, ends, votes = values.tolist()
        return StepTotals(
            tokens=int(tokens), divisor=int(tokens), stop=stops > 0, memory_ends=ends > 0, votes=int(votes)
        )

    def step(self, *, divisor: int, learning_rate: float, clip_norm: float) -> StepOutcome:
        """See `Backend.step`."""
        with self._pulse.work_with_collectives:
            gradients = self._store.list_gradients()
            finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
            own_loss = self._loss.clone()
            self._partial_gradients.all_reduce(gradients)
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
            self._device.sync()  # launches the graph; `_record_values` then waits for loss and norm
        loss, norm, local_norm, local_finite = self._values
        outcome = StepOutcome(loss / divisor if divisor else math.nan, norm)
        if not outcome.applied:
            is_finite = bool(local_finite) if math.isfinite(loss) else math.isfinite(local_norm)
            outcome = replace(outcome, nonfinite_ranks=self._find_nonfinite_ranks(is_finite=is_finite))
        self.state.step += outcome.applied
        return outcome

    def _find_nonfinite_ranks(self, *, is_finite: bool) -> tuple[int, ...]:
        """Return the ranks that pass False. Collective."""
        flags = torch.zeros(self.mesh.world_size, dtype=torch.int32)
        flags[self.mesh.rank] = not is_finite
        with self._pulse.waiting_for_peers:
            dist.all_reduce(flags, group=self._groups.host)
        return tuple(flags.nonzero().flatten().tolist())

    def _decide(self, squares: Tensor, numbers: Tensor, own_loss: Tensor, own_finite: Tensor) -> UpdateScalars:
        """Sum loss and norm over the ranks and compute the values of the update, on the device."""
        learning_rate, per_token, clip_norm, correction, root_correction = numbers.unbind()
        loss = self._loss.clone()
        dist.all_reduce(loss, group=self._groups.data)
        scale = per_token * self.mesh.dp_size  # gradients are means over the data-parallel ranks
        norm = self._reduce_norm(squares) * scale
        finite = torch.isfinite(loss) & torch.isfinite(norm) & torch.isfinite(per_token)
        self._device.call_after_sync(
            self._record_values, torch.stack([loss, norm, own_loss, own_finite.to(loss.dtype)])
        )
        return UpdateScalars(
            learning_rate=learning_rate,
            gradient_scale=scale * torch.clamp(clip_norm / (norm + 1e-6), max=1.0),
            correction=correction,
            root_correction=root_correction,
            finite=finite,
        )

    def _reduce_norm(self, squares: Tensor) -> Tensor:
        """Return the norm over all ranks, on the device."""
        total = squares.clone()
        if self.mesh.dp_mode is not DataParallelMode.REPLICATED:
            dist.all_reduce(total, group=self._groups.data)
        dist.all_reduce(total, group=self._groups.tensor)
        return total.sqrt()

    def _record_values(self, values: Tensor) -> None:
        self._values = values.tolist()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """See `Backend.evaluate`."""
        self._derive_weights()
        tokens = 0
        with self._pulse.work_with_collectives:
            loss = torch.zeros((), device=self._device.device)
            for batch in batches:
                loss += self._forward(batch)
                tokens += batch.valid_tokens
                self._device.sync()
            dist.all_reduce(loss, group=self._groups.data)
            self._device.call_after_sync(self._record_values, loss.reshape(1))
            self._device.sync()
        counted = torch.tensor(tokens * self.mesh.counts_loss)
        with self._pulse.waiting_for_peers:
            dist.all_reduce(counted, group=self._groups.host)
        return Evaluation(self._values[0] / int(counted) if counted else math.nan)

    def compute_reference_log_probs(self, batches: Iterable[MicroBatch]) -> Tensor:  # noqa: ARG002 - as `Backend` has it
        """Refuse, as `limits` does before anything runs. Raises UserError."""
        raise UserError("backend Nxd has no loss on pairs of answers: set backend to Native")

    @torch.no_grad()
    def compute_parameter_norm(self) -> float:
        """See `Backend.compute_parameter_norm`."""
        states = self._store.states
        with self._pulse.work_with_collectives:
            norm = self._reduce_norm(
                sum_squares([entry.master for entry in states], [entry.pieces for entry in states])
            )
            self._device.call_after_sync(self._record_values, norm.reshape(1))
            self._device.sync()
        return self._values[0]
