"""Pipeline parallelism by torch's own schedules: this rank's stage, and one call for all micro-batches of a step.

The schedule is 1F1B (PipeDream-Flush, arXiv 2006.09503), or GPipe (arXiv 1811.06965) for fewer micro-batches than
stages.

Guarantees:
- Shapes and types between stages are specified, not inferred, so that no pass runs twice.
- Gradients are sums over the micro-batches.
- Micro-batches are of one size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch.torch_version import TorchVersion

from trainium_trainer.checkpoint.format.live_state import to_local
from trainium_trainer.data.loader import MicroBatch, Pairs
from trainium_trainer.exits import UserError
from trainium_trainer.models.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from trainium_trainer.backends.base import Mesh
    from trainium_trainer.models.stages import LlamaStage

_log = logging.getLogger("trainium.pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShapes:
    """The tensors between stages: the sizes of one micro-batch."""

    samples: int
    length: int
    """The number of tokens of a sample."""
    part: int
    """The number of tokens of a sample that stages exchange: fewer under sequence parallelism."""
    hidden: int
    vocabulary: int
    hidden_dtype: torch.dtype
    """The type of hidden states between stages."""
    logits: torch.dtype

    def create_empty_input(self, stage: int) -> Tensor:
        """Return a tensor without values like the input of a stage."""
        if stage == 0:
            return torch.empty(self.samples, self.length, dtype=torch.int64, device="meta")
        return torch.empty(
            self.samples, self.part, self.hidden, dtype=self.hidden_dtype, device="meta", requires_grad=True
        )

    def create_empty_output(self, *, last: bool) -> Tensor:
        """Return a tensor without values like the output of a stage."""
        if not last:
            return self.create_empty_input(1)
        return torch.empty(
            self.samples, self.length, self.vocabulary, dtype=self.logits, device="meta", requires_grad=True
        )


class Pipeline:
    """The stage of this rank under a schedule."""

    def __init__(
        self,
        stage: LlamaStage,
        mesh: Mesh,
        shapes: StageShapes,
        *,
        micro_batches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        keys: Callable[[MicroBatch], Tensor | None],
    ) -> None:
        """Create the schedule of a stage; `micro_batches` is their number per step.

        `keys` returns the keys of samples for dropout.
        """
        self._keys = keys
        self._samples = micro_batches * shapes.samples
        self._device = mesh.device
        self._is_first = mesh.pp_rank == 0
        self._is_last = mesh.pp_rank == mesh.pp_size - 1
        part = PipelineStage(
            stage,
            mesh.pp_rank,
            mesh.pp_size,
            mesh.device,
            input_args=shapes.create_empty_input(mesh.pp_rank),
            output_args=shapes.create_empty_output(last=self._is_last),
            group=mesh.pp,
        )
        # Elastic training changes the number of micro-batches, so too few for 1F1B are no error of the configuration.
        kind = Schedule1F1B if micro_batches >= mesh.pp_size else ScheduleGPipe
        if mesh.rank == 0:
            _log.info("pipeline of %d stages: %s", mesh.pp_size, kind.__name__)
        # The loop divides the sum of losses, so gradients are not scaled.
        self._schedule = kind(part, micro_batches, loss_fn=loss, scale_grads=False)

    def run(self, batch: MicroBatch) -> list[Tensor]:
        """Run forward and backward of the joined micro-batches of a step; return their losses on the last rank.

        Collective over the pipeline's ranks.
        """
        return self._run(self._schedule.step, batch, self._keys(batch))

    def evaluate(self, batch: MicroBatch) -> list[Tensor]:
        """Return the losses of joined micro-batches without a backward pass. Collective."""
        with torch.no_grad():
            return self._run(self._schedule.eval, batch, None)

    def join_batches(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Concatenate micro-batches to the samples of a step.

        Only the last micro-batch may be smaller than the others; padding fills the end.
        """
        waiting: list[MicroBatch] = []
        for batch in batches:
            waiting.append(batch)
            if sum(len(batch.inputs) for batch in waiting) == self._samples:
                yield self._pad_batch(waiting)
                waiting = []
        if waiting:
            yield self._pad_batch(waiting)

    def _pad_batch(self, batches: Sequence[MicroBatch]) -> MicroBatch:
        missing = (0, 0, 0, self._samples - sum(len(batch.inputs) for batch in batches))
        positions = [batch.positions for batch in batches if batch.positions is not None]
        pairs = [batch.pairs for batch in batches if batch.pairs is not None]
        return MicroBatch(
            functional.pad(torch.cat([batch.inputs for batch in batches]), missing),
            functional.pad(torch.cat([batch.labels for batch in batches]), missing, value=IGNORED_LABEL),
            sum(batch.valid_tokens for batch in batches),
            functional.pad(torch.cat([batch.sample_positions for batch in batches]), missing[2:]),
            functional.pad(torch.cat(positions), missing) if positions else None,
            Pairs(
                sum(pair_group.count for pair_group in pairs),
                functional.pad(torch.cat([pair_group.answers for pair_group in pairs]), missing[2:]),
                functional.pad(torch.cat([pair_group.references for pair_group in pairs]), missing[2:]),
            )
            if pairs
            else None,
        )

    def _run(self, call: Callable[..., object], batch: MicroBatch, samples: Tensor | None) -> list[Tensor]:
        losses: list[Tensor] = []
        first_inputs = (batch.inputs.to(self._device),) if self._is_first else ()
        target = pack_target(batch).to(self._device) if self._is_last else None
        # Every stage needs the boundaries of documents and the keys of samples.
        more = {} if batch.positions is None else {"positions": batch.positions.to(self._device)}
        more |= {} if samples is None else {"samples": samples}
        call(*first_inputs, target=target, losses=losses if self._is_last else None, return_outputs=False, **more)
        return [to_local(loss) for loss in losses]


def pack_target(batch: MicroBatch) -> Tensor:
    """Pack the loss's inputs besides the logits into one tensor, which a schedule divides into micro-batches.

    For pairs, the labels are followed by the first position of each answer and the bits of its reference
    log-probability.
    """
    if batch.pairs is None:
        return batch.labels
    bits = batch.pairs.references.float().view(torch.int32).long()
    return torch.cat((batch.labels, batch.pairs.answers.unsqueeze(1), bits.unsqueeze(1)), dim=1)


def unpack_target(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels, first positions and reference log-probabilities of pairs."""
    return target[:, :-2], target[:, -2], target[:, -1].int().view(torch.float32)


def check_torch() -> None:
    """Raise UserError for a version of torch with unsuitable schedules.

    2.9 keeps all logits and does not start on gloo; 2.11 cannot train after an evaluation before the first step.
    """
    if TorchVersion(torch.__version__) < "2.13":
        raise UserError(
            f"parallelism.pipeline is above 1, which torch {torch.__version__} cannot do well enough: install a newer "
            "torch (2.13 is tested), or set parallelism.pipeline to 1"
        )


def sum_tied_gradient(gradient: Tensor, mesh: Mesh) -> None:
    """Sum the gradients of a weight that first and last stage share, in place.

    Called on the first and the last rank of the pipeline; both get the same bits.
    """
    if not gradient.numel():
        return
    other = torch.empty_like(gradient)
    peer = mesh.pp_size - 1 - mesh.pp_rank
    operations = [
        dist.P2POp(dist.isend, gradient, group=mesh.pp, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=mesh.pp, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient.add_(other)
