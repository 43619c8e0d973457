"""The native backend: one code path for CPU, CUDA and Neuron devices, with the process group, mesh and state of a rank.

Guarantees:
- Small agreements use gloo on the CPU, so they cost the device nothing.
- Training is deterministic for a given size.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from trainium_contract.models.parameters import EMBEDDING
from trainium_contract.models.shape import RopeScalingKind
from trainium_contract.trainer.parallelism import TorchCompile
from trainium_contract.trainer.tuning import TuningMethod
from trainium_trainer.backends.base import Evaluation, StepOutcome, StepTotals
from trainium_trainer.backends.device import join_process_group, pick_device, set_current_device
from trainium_trainer.backends.mesh import create_mesh
from trainium_trainer.backends.native_model import (
    create_model,
    create_pipeline,
    create_store,
    divide_model,
    uses_autocast,
)
from trainium_trainer.backends.nonfinite_origins import NonfiniteOrigins
from trainium_trainer.backends.optimizers import Rounding, find_update
from trainium_trainer.checkpoint.format.live_state import to_local
from trainium_trainer.data.loader import trim_padding
from trainium_trainer.models.dropout import compute_sample_keys
from trainium_trainer.models.initialization import draw_initial_slice
from trainium_trainer.models.lora import disable_adapters
from trainium_trainer.models.loss import ChunkedLoss, compute_loss_sum, compute_token_losses
from trainium_trainer.models.preference_loss import compute_answer_log_probs, compute_preference_loss
from trainium_trainer.models.stages import LlamaStage, list_canonical_parameters
from trainium_trainer.monitor.step_metrics import Rewards
from trainium_trainer.tuning.apply import draw_initial_adapter
from trainium_trainer.tuning.trainable import MAGNITUDE, find_adapted_module, is_adapter, is_reference_in_model
from trainium_worker.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from trainium_trainer.backends.pipeline import Pipeline
    from trainium_trainer.configuration.config import Settings
    from trainium_trainer.data.loader import MicroBatch
    from trainium_trainer.weights.adapter import AdapterWeights
    from trainium_trainer.weights.base import BaseWeights

_PADDED_COLUMNS = 64
"""The multiple to which the longest row of a micro-batch is padded: few lengths, so that memory is reused."""


class NativeBackend:
    """One rank of a job on CPU, CUDA or Neuron."""

    def __init__(self, settings: Settings, pulse: Pulse | None = None) -> None:
        """Join the process group and create the mesh. Collective."""
        self._pulse = pulse or Pulse()
        self._settings, self._config, self._shape = settings, settings.config, settings.shape
        self._device = pick_device(settings.launch.local_rank, self._config.device)
        set_current_device(self._device)
        with self._pulse.waiting_for_peers:
            join_process_group(self._device, settings.launch)
        self.mesh, self._device_mesh = create_mesh(settings, self._device)
        self._pipeline: Pipeline | None = None
        self._pipeline_batches: list[MicroBatch] = []
        self._losses: list[Tensor] = []
        self._nonfinite = NonfiniteOrigins(self.mesh, self._pulse)
        self._tokens = 0
        self._divisor = 0
        self._rewards: list[Tensor] = []
        self._log_probs: list[Tensor] | None = None
        """The log-probabilities of a pipeline's micro-batches, while they are computed instead of a loss."""
        self._loss_sum = math.nan

    def build(self) -> None:
        """Create the model or this rank's stage without values, divide it, and allocate the state. Collective."""
        settings, config = self._settings, self._config
        self._model = create_model(settings, self.mesh)
        if isinstance(self._model, LlamaStage):
            self._nonfinite.watch(self._model)
        divide_model(self._model, config, self.mesh, self._device_mesh)
        self._store = self.state = create_store(self._model, config, self.mesh, self._device_mesh)
        if isinstance(self._model, LlamaStage):
            self._pipeline = create_pipeline(
                self._model, settings, self.mesh, loss=self._compute_target_loss, keys=self._create_dropout_keys
            )

    @torch.no_grad()
    def load_frozen(self, base: BaseWeights) -> None:
        """See `Backend.load_frozen`; only this rank's boxes are read."""
        for parameter in self._store.iterate_frozen():
            base.fill(parameter.name, parameter.box.offsets, parameter.local)

    @torch.no_grad()
    def initialize(self, seed: int, base: BaseWeights | None = None, adapter: AdapterWeights | None = None) -> None:
        """See `Backend.initialize`; the CPU draws this rank's part of the initial values."""
        for parameter in self._store.iterate_parameters():
            name, local, box = parameter.name, parameter.local, parameter.box
            if adapter is not None and name in adapter.names:
                adapter.fill(name, box.offsets, local)
            elif name.endswith(f".{MAGNITUDE}.weight"):
                assert base is not None
                local.copy_(base.compute_row_norms(f"{find_adapted_module(name)}.weight", box.offsets[0], box.sizes[0]))
            elif is_adapter(name):
                local.copy_(parameter.slice_whole(draw_initial_adapter(name, parameter.size, seed)))
            elif base is not None:
                base.fill(name, box.offsets, local)
            else:
                local.copy_(draw_initial_slice(name, box.offsets, box.sizes, seed=seed, shape=self._shape))

    def _open_autocast(self) -> AbstractContextManager[Any]:
        if uses_autocast(self._config):
            return torch.autocast(self._device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _take_local_part(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's part of a micro-batch, which still counts all tokens."""
        if self._model.token_positions is None:
            return (
                trim_padding(batch, math.lcm(_PADDED_COLUMNS, self.mesh.tp_size)) if self._takes_any_length else batch
            )
        positions = None if batch.positions is None else batch.positions[:, self._model.token_positions]
        inputs, labels = batch.inputs[:, self._model.token_positions], batch.labels[:, self._model.token_positions]
        return replace(batch, inputs=inputs, labels=labels, positions=positions)

    @property
    def _takes_any_length(self) -> bool:
        """Return whether no compiled program, shape agreement or rotary embedding depends on the length."""
        windowed = self._shape.windowed_rope
        stretches = (self._shape.rope_stretch, windowed and windowed.stretch)
        return (
            self._device.type in ("cpu", "cuda")
            and self._config.torch_compile is TorchCompile.NONE
            and self._pipeline is None
            and not any(stretch and stretch.kind is RopeScalingKind.DYNAMIC for stretch in stretches)
        )

    def accumulate(self, batch: MicroBatch, *, last: bool) -> None:
        """Run forward and backward of the summed loss."""
        batch = self._take_local_part(batch)
        self._tokens += batch.valid_tokens
        self._divisor += batch.divisor
        if self._pipeline is not None:
            self._pipeline_batches.append(batch)
            if last:
                self._run_pipeline(self._pipeline)
            return
        references = self._find_references(batch)
        self._store.begin_backward(1 if last else 0)
        with self._pulse_context(), self._open_autocast():
            loss = self._forward(batch, samples=self._create_dropout_keys(batch), references=references)
            loss.backward()  # type: ignore[no-untyped-call]
        self._store.accumulate()
        self._losses.append(to_local(loss))

    def _forward(self, batch: MicroBatch, *, samples: Tensor | None = None, references: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro-batch by the whole model; also record the rewards of pairs."""
        if batch.pairs is None or references is None:
            labels, width = batch.labels.to(self._device), self._shape.vocab_size // self.mesh.tp_size
            loss = ChunkedLoss(labels, width, self.mesh.tp, self._unpadded_vocabulary)
            return self._run_model(batch, samples, loss)
        logits = self._run_model(batch, samples)
        labels, answers = batch.labels.to(self._device), batch.pairs.answers.to(self._device)
        return self._sum_of_pair_losses(logits, labels, answers, references)

    def _sum_of_pair_losses(self, logits: Tensor, labels: Tensor, answers: Tensor, references: Tensor) -> Tensor:
        """Return the summed loss of pairs of answers, and record their rewards."""
        assert self._config.tuning.objective is not None
        losses = compute_token_losses(logits, labels, group=self.mesh.tp, vocabulary=self._unpadded_vocabulary)
        result = compute_preference_loss(
            self._config.tuning.objective, losses, labels, answers=answers, references=references
        )
        self._rewards.append(result.rewards)
        return result.loss

    def _compute_target_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the summed loss of a pipeline's micro-batch, or record the requested log-probabilities."""
        if self._config.tuning.objective is None:
            return compute_loss_sum(logits, target, group=self.mesh.tp, vocabulary=self._unpadded_vocabulary)
        from trainium_trainer.backends.pipeline import unpack_target  # noqa: PLC0415 - imported by now

        labels, answers, references = unpack_target(target)
        if self._log_probs is None:
            return self._sum_of_pair_losses(logits, labels, answers, references)
        losses = compute_token_losses(logits, labels, group=self.mesh.tp, vocabulary=self._unpadded_vocabulary)
        self._log_probs.append(compute_answer_log_probs(losses, labels, answers))
        return losses.sum()

    def _run_model(self, batch: MicroBatch, samples: Tensor | None = None, loss: ChunkedLoss | None = None) -> Tensor:
        """Return the logits of a micro-batch on the device, or its loss."""
        positions = None if batch.positions is None else batch.positions.to(self._device)
        length = None if self._model.token_positions is None else self._config.data.sequence_length
        inputs = batch.inputs.to(self._device)
        output: Tensor = self._model(inputs, length=length, positions=positions, samples=samples, loss=loss)
        return output

    def _find_references(self, batch: MicroBatch) -> Tensor | None:
        """Return the log-probabilities of a micro-batch's answers by the reference model, where rows are pairs."""
        if batch.pairs is None:
            return None
        if is_reference_in_model(self._config.tuning):
            return self._compute_batch_log_probs(batch)
        return batch.pairs.references.to(self._device)

    def compute_reference_log_probs(self, batches: Iterable[MicroBatch]) -> Tensor:
        """See `Backend.compute_reference_log_probs`."""
        if self._pipeline is not None:
            joined = [
                self._compute_pipeline_log_probs(self._pipeline, batch)
                for batch in self._pipeline.join_batches(batches)
            ]
        else:
            joined = [self._compute_batch_log_probs(batch) for batch in map(self._take_local_part, batches)]
        self._store.free_evaluation_memory()
        return torch.cat(joined).cpu()

    @torch.no_grad()
    def _compute_batch_log_probs(self, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities of a micro-batch's answers by the model without its adapters."""
        assert batch.pairs is not None
        with self._pulse_context(), self._open_autocast(), disable_adapters(self._model):
            logits, labels = self._run_model(batch), batch.labels.to(self._device)
            losses = compute_token_losses(logits, labels, group=self.mesh.tp, vocabulary=self._unpadded_vocabulary)
        return compute_answer_log_probs(losses, labels, batch.pairs.answers.to(self._device))

    @property
    def _unpadded_vocabulary(self) -> int:
        """Return the size of the vocabulary without padding."""
        return self._shape.vocab_size - self._shape.vocab_padding

    def _create_dropout_keys(self, batch: MicroBatch) -> Tensor | None:
        """Return the keys of the samples for dropout; None without dropout."""
        tuning = self._config.tuning
        if tuning.method is not TuningMethod.LORA or not tuning.lora.dropout:
            return None
        return compute_sample_keys(batch.sample_positions, self._config.seed).to(self._device)

    def _pulse_context(self) -> AbstractContextManager[None]:
        """Mark whether a pass contains collectives."""
        divided = self.mesh.tp is not None or self.mesh.cp is not None or self.mesh.dp_mode.is_sharded
        return self._pulse.work_with_collectives if divided else self._pulse.local_work

    def _run_pipeline(self, pipeline: Pipeline) -> None:
        """Run forward and backward of all micro-batches of the step."""
        batches, self._pipeline_batches = self._pipeline_batches, []
        (batch,) = map(self._add_references, pipeline.join_batches(batches))
        self._store.begin_backward(len(batches))
        with self._pulse.work_with_collectives, self._open_autocast():
            self._losses += pipeline.run(batch)
        self._store.accumulate()

    def _add_references(self, batch: MicroBatch) -> MicroBatch:
        """Add the reference log-probabilities to a pipeline's batch, if this model also is the reference."""
        if self._pipeline is None or batch.pairs is None or not is_reference_in_model(self._config.tuning):
            return batch
        log_probs = self._compute_pipeline_log_probs(self._pipeline, batch)
        return replace(batch, pairs=replace(batch.pairs, references=log_probs.cpu()))

    def _compute_pipeline_log_probs(self, pipeline: Pipeline, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities of the answers by the stages without adapters; NaN except on the last rank."""
        self._log_probs = []
        with disable_adapters(self._model), self._pulse.work_with_collectives, self._open_autocast():
            pipeline.evaluate(batch)
        log_probs, self._log_probs = self._log_probs, None
        return torch.cat(log_probs) if log_probs else torch.full((len(batch.inputs),), math.nan)

    def all_reduce_totals(self, *, stop: bool, memory_ends: bool, vote: int) -> StepTotals:
        """See `Backend.all_reduce_totals`: one small all-reduce, in which one rank counts a data-parallel share."""
        self._own_loss = _sum(self._losses)
        contribution = self._zero_unless_counted(self._own_loss, self._tokens, self._divisor, *self._sum_rewards())
        values = torch.tensor([*contribution, stop, memory_ends, vote], dtype=torch.float64)
        if self.mesh.world_size > 1:
            with self._pulse.waiting_for_peers:
                dist.all_reduce(values)
        self._losses = []
        self._tokens = self._divisor = 0
        self._loss_sum, tokens, divisor, *rewards, stops, ends, votes = values.tolist()
        return StepTotals(
            tokens=int(tokens),
            divisor=int(divisor),
            stop=stops > 0,
            memory_ends=ends > 0,
            votes=int(votes),
            rewards=Rewards.of_sums(rewards, divisor) if rewards else None,
        )

    def _zero_unless_counted(self, loss: float, *counts: float) -> list[float]:
        """Return a loss and counts of this rank, zero if another rank contributes them."""
        return [loss * self.mesh.counts_loss, *(count * self.mesh.counts_tokens for count in counts)]

    def _sum_rewards(self) -> list[float]:
        """Return the sums of this rank's pairs since the last call; empty if rows are not pairs."""
        if self._config.tuning.objective is None:
            return []
        rewards, self._rewards = self._rewards, []
        return torch.stack(rewards).cpu().double().sum(0).tolist() if rewards else [0.0, 0.0, 0.0]

    def step(self, *, divisor: int, learning_rate: float, clip_norm: float) -> StepOutcome:
        """See `Backend.step`; the loss was summed by `all_reduce_totals`."""
        loss = self._loss_sum / divisor if divisor else math.nan
        outcome = StepOutcome(loss, self._compute_gradient_norm(max(divisor, 1)))
        if outcome.applied:
            clip = min(1.0, clip_norm / (outcome.gradient_norm + 1e-6))
            self._update(learning_rate=learning_rate, gradient_scale=clip / divisor)
        elif self._settings.launch.is_dry_run:  # numbers mean nothing there, and the update is to be compiled
            self._update(learning_rate=learning_rate, gradient_scale=1.0)
        elif math.isfinite(loss):
            ranks = self._nonfinite.find_gradient_origins(own_are_finite=self._store.has_finite_own_gradients())
            names = (
                name for name in self._list_trained_names() if not self._store.find_gradient(name).isfinite().all()
            )
            outcome = replace(outcome, nonfinite_parameters=tuple(names), nonfinite_ranks=ranks)
        else:
            outcome = replace(outcome, nonfinite_ranks=self._nonfinite.find_loss_origins(self._own_loss))
        self._store.zero_grad()
        self._nonfinite.clear()
        return outcome

    def _list_trained_names(self) -> list[str]:
        """Return the names of this rank's parameters with gradients, from input to output."""
        return [name for name, parameter in list_canonical_parameters(self._model) if parameter.requires_grad]

    def _compute_gradient_norm(self, divisor: int) -> float:
        """Return the gradient norm over all divided values, each counted once."""
        with self._pulse.waiting_for_peers:
            self._store.reduce()
            self._sum_tied_embedding()
        return self._reduce_norm(self._store.sum_gradient_squares()) / divisor

    def compute_parameter_norm(self) -> float:
        """See `Backend.compute_parameter_norm`."""
        return self._reduce_norm(self._store.sum_weight_squares())

    def _reduce_norm(self, square_sums: tuple[float, float]) -> float:
        """Return the norm over all ranks of the store's divided and repeated values."""
        sums = torch.tensor(square_sums, dtype=torch.float64)
        with self._pulse.waiting_for_peers:
            if self.mesh.dp is not None and self.mesh.dp_mode.is_sharded:
                dist.all_reduce(sums, group=self.mesh.dp)
            if self.mesh.tp is not None:
                divided = sums[:1].clone()
                dist.all_reduce(divided, group=self.mesh.tp)
                sums[0] = divided[0]
            if self.mesh.pp is not None:
                dist.all_reduce(sums, group=self.mesh.pp)
        return float(sums.sum().sqrt())

    def _sum_tied_embedding(self) -> None:
        """Sum the gradients of a weight that the first and the last stage share."""
        if self.mesh.pp is None or not self._shape.tie_embeddings or 0 < self.mesh.pp_rank < self.mesh.pp_size - 1:
            return
        if EMBEDDING not in self._list_trained_names():
            return
        from trainium_trainer.backends.pipeline import sum_tied_gradient  # noqa: PLC0415 - imported by now

        sum_tied_gradient(self._store.find_gradient(EMBEDDING), self.mesh)

    def _update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """Update this rank's part of the state."""
        self._store.step += 1
        find_update(self._config.optimizer.kind)(
            self._store.iterate_slots(),
            self._config.optimizer,
            step=int(self._store.step),
            learning_rate=learning_rate,
            gradient_scale=gradient_scale,
            rounding=Rounding(self._config.seed, by_device=self._device.type == "neuron")
            if self._config.precision.has_bfloat16_state
            else None,
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """See `Backend.evaluate`."""
        losses: list[Tensor] = []
        divisor = 0
        if self._pipeline is not None:
            for batch in map(self._add_references, self._pipeline.join_batches(map(self._take_local_part, batches))):
                with self._pulse.work_with_collectives, self._open_autocast():
                    losses += self._pipeline.evaluate(batch)
                divisor += batch.divisor
        else:
            for batch in map(self._take_local_part, batches):
                references = self._find_references(batch)
                with self._pulse_context(), self._open_autocast():
                    losses.append(to_local(self._forward(batch, references=references)))
                divisor += batch.divisor
        self._store.free_evaluation_memory()
        values = torch.tensor(
            self._zero_unless_counted(_sum(losses), divisor, *self._sum_rewards()), dtype=torch.float64
        )
        if self.mesh.world_size > 1:
            with self._pulse.waiting_for_peers:
                dist.all_reduce(values)
        loss, divided, *rewards = values.tolist()
        return Evaluation(
            loss / divided if divided else math.nan, Rewards.of_sums(rewards, divided) if rewards else None
        )


def _sum(losses: list[Tensor]) -> float:
    """Sum in double precision on the host, with one transfer, because not every device supports that type."""
    return float(torch.stack(losses).cpu().double().sum()) if losses else 0.0
