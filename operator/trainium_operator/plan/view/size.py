"""Policy: the size to work towards is the best one for the nodes that were requested, within the job's bounds.

The best size for a number of nodes is the one with the most samples a pass (with one batch at every size: with the
fewest passes), and of several the smallest: a step lasts by its passes, so what is beyond it would save no time. Such
nodes are in reserve: they are warm, and replace lost ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.requirements.worker_requests import explain_misfit
from trainium_contract.sizes import BatchShape, SizeRule
from trainium_contract.spec.elasticity import IdleNodes
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import counted, sentence

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.spec.workers import WorkersSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDecision:
    """Size that the spec asks for, in nodes."""

    desired: int
    """The legal size to work towards; 0 when there is none."""
    floor: int
    """The smallest size that the job may shrink to; equals `desired` for a rigid job."""
    most: int = 0
    """The best size that it may grow to where nodes are idle; `desired` where it leaves them."""
    reserve: int = 0
    """Nodes that were requested beside `desired` and would save no pass."""
    reason: Reason
    message: str
    shape: BatchShape | None
    """None when the spec is invalid."""
    compiled_first: tuple[int, ...] = ()
    """Sizes whose graphs every worker has before it joins."""

    def legal_at_most(self, nodes: int) -> int:
        """Return the best size for so many nodes that the job may run at; 0 when there is none."""
        return self.shape.best(min(nodes, max(self.desired, self.most)), self.floor) if self.shape else 0

    def data_parallel(self, nodes: int) -> int:
        """Return data-parallel degree at this size."""
        return self.shape.data_parallel(nodes) if self.shape else 0

    def passes(self, nodes: int) -> int:
        """Return micro-batches of a step on each data-parallel rank at this size; 0 when it is not legal."""
        return self.shape.passes(nodes) if self.shape else 0

    def batch(self, nodes: int) -> int:
        """Return samples of a step at this size over all ranks; 0 when it is not legal."""
        return self.shape.batch(nodes) if self.shape else 0

    def speed(self, nodes: int, full: int | None = None) -> float:
        """Return speed at this size as a share of that at `full` nodes, or the desired ones.

        0 when either is not legal.
        """
        full = self.desired if full is None else full
        legal = self.shape is not None and self.passes(nodes) and self.passes(full)
        return self.shape.speed(nodes, full) if self.shape and legal else 0.0


def decide_size(spec: TrainingJobSpec) -> SizeDecision:
    """Return the size that a spec asks for; a spec that contradicts itself gives size 0 and a sentence."""
    workers = spec.workers
    try:
        shape = spec.batch_shape()
    except ValueError as error:
        message = sentence(f"The configuration contradicts itself: {error}; correct spec.trainer and run it again.")
        return SizeDecision(desired=0, floor=0, reason=Reason.INVALID_SPEC, message=message, shape=None)
    requested = workers.replicas if workers.max_replicas is None else min(workers.replicas, workers.max_replicas)
    smallest = workers.min_replicas or 1
    largest, desired = shape.floor(requested, smallest), shape.best(requested, smallest)
    if desired == 0:
        return SizeDecision(
            desired=0,
            floor=0,
            reason=Reason.NO_LEGAL_SIZE,
            message=_none_legal(smallest, requested, shape),
            shape=shape,
        )
    trainer = spec.program is None
    too_large = explain_misfit(spec.training_config(), workers.accelerator, shape, desired) if trainer else ""
    if too_large:
        message = sentence(too_large)
        return SizeDecision(desired=0, floor=0, reason=Reason.INVALID_SPEC, message=message, shape=shape)
    floor = spec.least_size(desired)
    takes = spec.elasticity.idle_nodes is IdleNodes.TAKE
    reason, message = _explain(workers.replicas, requested, largest, desired, shape)
    if floor > (workers.min_replicas or floor):
        message = f"{message.rstrip('.')}. {_bounded(floor, workers)}"
    return SizeDecision(
        desired=desired,
        floor=floor,
        most=shape.best(max(requested, workers.max_replicas or 0), smallest) if takes else desired,
        reserve=largest - desired,
        reason=reason,
        message=sentence(message),
        shape=shape,
        compiled_first=spec.sizes_to_compile() if spec.precompile.enabled else (),
    )


def _explain(asked: int, requested: int, largest: int, desired: int, shape: BatchShape) -> tuple[Reason, str]:
    """Return why the desired size is the one for what was asked."""
    cut = "" if requested == asked else f", at most {requested} are allowed (maxReplicas)"
    worth = _worth(desired, shape)
    short = shape.filled(desired) < 1 or shape.batch(desired) != shape.global_batch_size
    if not shape.global_batch_size:
        worth = "the program's batch changes with the size, because program.batch is not given"
    idle = _idle(desired, shape)
    if desired == asked:
        nodes = counted(desired, "node")
        return Reason.AS_REQUESTED, f"{nodes}{f': {worth}' if short else ''}{f'.{idle}' if idle else ''}"
    reserve = f" {largest - desired} in reserve: more would save no pass." if largest > desired else ""
    if largest == asked:
        return (
            Reason.NODES_IN_RESERVE,
            f"{asked} nodes were requested; {desired} of them train: {worth}.{reserve}{idle}",
        )
    what = "the largest legal size" if largest == desired else "the best size"
    return Reason.FLOORED, f"{asked} nodes were requested{cut}; {desired} is {what}.{reserve}{idle} {_rule(shape)}"


def _bounded(floor: int, workers: WorkersSpec) -> str:
    """Return why the job does not shrink as far as it may."""
    return (
        f"It does not shrink below {counted(floor, 'node')}, although minReplicas is {workers.min_replicas}: on fewer "
        f"a process needs more than a core of {workers.accelerator.instance_type} has for weights, gradients and "
        "optimizer alone."
    )


def _worth(nodes: int, shape: BatchShape) -> str:
    passes = shape.passes(nodes)
    plural = "es" if passes > 1 else ""
    batch = shape.batch(nodes)
    near = f" of {batch:,} samples" if batch != shape.global_batch_size else ""
    return f"{passes} pass{plural} a step{near}, {shape.filled(nodes):.0%} of their rows filled"


def _idle(nodes: int, shape: BatchShape) -> str:
    """Return a sentence where ranks never have a sample; else empty."""
    idle, ranks, batch = shape.idle_ranks(nodes), shape.data_parallel(nodes), shape.batch(nodes)
    if not idle:
        return ""
    return (
        f" The batch of {batch:,} is smaller than the data-parallel degree ({ranks:,}): {idle:,} of its ranks never "
        f"have work, and the job has {batch / ranks:.0%} of the speed that its nodes could give; raise "
        "trainer.batch.globalSize or take fewer cores."
    )


def _rule(shape: BatchShape) -> str:
    cores = (
        f"A size is legal when nodes x {shape.cores_per_node} cores is divisible by tensor x pipeline x context "
        f"({shape.tensor} x {shape.pipeline} x {shape.context})"
    )
    if shape.rule is SizeRule.ANY or not shape.global_batch_size:
        return f"{cores}."
    return (
        f"{cores} and the global batch ({shape.global_batch_size}) by the data-parallel degree x micro-batch "
        f"({shape.micro_batch_size})."
    )


def _none_legal(smallest: int, requested: int, shape: BatchShape) -> str:
    near = shape.legal_sizes(1, max(2 * requested, 16))
    advice = f"legal sizes near it are {', '.join(map(str, near[:8]))}" if near else "no small size is legal"
    return sentence(
        f"No size from {smallest} to {requested} nodes is legal: {advice}. {_rule(shape)} "
        "Change spec.workers.replicas (and minReplicas) or the batch."
    )


def needed_workers(size: SizeDecision) -> int:
    """Return workers that the job cannot begin without; 0 when no size is legal."""
    if size.shape is None or not size.desired:
        return 0
    return next(filter(size.shape.is_legal, range(size.floor, size.desired + 1)), 0)


def size_within(size: SizeDecision, workers: int) -> int:
    """Return the size to work towards with quota for so many workers.

    A job whose new smallest size is not granted yet goes on with what it has.
    """
    if size.shape is None or not size.desired:
        return 0
    most = min(workers, size.desired)
    return size.shape.best(most, size.floor) or size.shape.best(most)
