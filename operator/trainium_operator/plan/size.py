"""Policy: the size to work towards is the requested one, floored to a legal one within the job's bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_operator.plan.reasons import Reason
from trainium_operator.plan.sentences import sentence

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.sizes import BatchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDecision:
    """What the spec asks for, in nodes."""

    desired: int
    """The legal size to work towards; 0 when there is none."""
    floor: int
    """The smallest size that the job may shrink to; equals `desired` for a rigid job."""
    reason: Reason
    message: str
    shape: BatchShape | None
    """None when the spec is invalid."""

    def legal_at_most(self, nodes: int) -> int:
        """The largest legal size <= nodes that the job may run at; 0 when there is none."""
        return self.shape.floor(min(nodes, self.desired), self.floor) if self.shape else 0

    def data_parallel(self, nodes: int) -> int:
        """Data-parallel degree at this size."""
        return self.shape.data_parallel(nodes) if self.shape else 0


def decide_size(spec: TrainingJobSpec) -> SizeDecision:
    """The size that a spec asks for; never raises: a spec that contradicts itself gives size 0 and a sentence."""
    workers = spec.workers
    try:
        shape = spec.batch_shape()
    except ValueError as error:
        message = sentence(f"The configuration contradicts itself: {error}; correct spec.trainer and create it again.")
        return SizeDecision(desired=0, floor=0, reason=Reason.INVALID_SPEC, message=message, shape=None)
    requested = workers.replicas if workers.max_replicas is None else min(workers.replicas, workers.max_replicas)
    smallest = workers.min_replicas or 1
    desired = shape.floor(requested, smallest)
    floor = desired if workers.min_replicas is None else min(workers.min_replicas, desired)
    if desired == 0:
        return SizeDecision(
            desired=0,
            floor=0,
            reason=Reason.NO_LEGAL_SIZE,
            message=_none_legal(smallest, requested, shape),
            shape=shape,
        )
    if desired == workers.replicas:
        return SizeDecision(
            desired=desired, floor=floor, reason=Reason.AS_REQUESTED, message=f"{desired} nodes", shape=shape
        )
    cut = "" if requested == workers.replicas else f", at most {requested} are allowed (maxReplicas)"
    message = f"{workers.replicas} nodes were requested{cut}; {desired} is the largest legal size. {_rule(shape)}"
    return SizeDecision(desired=desired, floor=floor, reason=Reason.FLOORED, message=sentence(message), shape=shape)


def _rule(shape: BatchShape) -> str:
    return (
        f"A size is legal when nodes x {shape.cores_per_node} cores is divisible by tensor x pipeline "
        f"({shape.tensor} x {shape.pipeline}) and the global batch ({shape.global_batch_size}) by the data-parallel "
        f"degree x micro-batch ({shape.micro_batch_size})."
    )


def _none_legal(smallest: int, requested: int, shape: BatchShape) -> str:
    near = shape.legal_sizes(1, max(2 * requested, 16))
    advice = f"legal sizes near it are {', '.join(map(str, near[:8]))}" if near else "no small size is legal"
    return sentence(
        f"No size from {smallest} to {requested} nodes is legal: {advice}. {_rule(shape)} "
        "Change spec.workers.replicas (and minReplicas) or spec.trainer.batch."
    )
