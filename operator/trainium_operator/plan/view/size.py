"""Policy: choose the best size for the requested nodes, within the job's bounds.

The best size for a number of nodes is the one with the most samples a pass (with one batch at every size: with the
fewest passes), and of several the smallest. A step's duration follows from its passes, so nodes beyond it save no time.
Such nodes are in reserve: they are warm, and replace lost ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.pages.formatting import pluralize
from trainium_contract.requirements.worker_requests import explain_misfit
from trainium_contract.sizes import BatchShape, SizeRule
from trainium_contract.spec.elasticity import IdleNodes
from trainium_operator.plan.model.reasons import Reason
from trainium_operator.plan.model.text import format_sentence

if TYPE_CHECKING:
    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.spec.workers import WorkersSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeDecision:
    """The size that the spec requests, in nodes."""

    desired: int
    """The legal size to work towards; 0 when there is none."""
    floor: int
    """The smallest size that the job may shrink to; equals `desired` for a rigid job."""
    max_size: int = 0
    """The largest size where nodes are idle; `desired` if idle nodes are not used."""
    reserve: int = 0
    """Requested nodes beyond `desired`, which would save no pass."""
    reason: Reason
    message: str
    shape: BatchShape | None
    """None when the spec is invalid."""
    compiled_first: tuple[int, ...] = ()
    """Sizes whose graphs every worker has before it joins."""

    def find_legal_size(self, nodes: int) -> int:
        """Return the best size for this number of nodes at which the job may run; 0 if there is none."""
        return self.shape.best(min(nodes, max(self.desired, self.max_size)), self.floor) if self.shape else 0

    def compute_data_parallel(self, nodes: int) -> int:
        """Return data-parallel degree at this size."""
        return self.shape.data_parallel(nodes) if self.shape else 0

    def count_micro_batches(self, nodes: int) -> int:
        """Return the micro-batches of a step on each data-parallel rank at this size; 0 if the size is not legal."""
        return self.shape.micro_batches(nodes) if self.shape else 0

    def compute_batch(self, nodes: int) -> int:
        """Return the samples of a step at this size over all ranks; 0 if the size is not legal."""
        return self.shape.batch(nodes) if self.shape else 0

    def compute_speed(self, nodes: int, full: int | None = None) -> float:
        """Return the speed at this size relative to `full` nodes, or to the desired size; 0 if either is not legal."""
        full = self.desired if full is None else full
        legal = self.shape is not None and self.count_micro_batches(nodes) and self.count_micro_batches(full)
        return self.shape.speed(nodes, full) if self.shape and legal else 0.0


def decide_size(spec: TrainingJobSpec) -> SizeDecision:
    """Return the size that a spec requests; for a spec that contradicts itself size 0 and a sentence."""
    workers = spec.workers
    try:
        shape = spec.batch_shape()
    except ValueError as error:
        text = f"The configuration contradicts itself: {error}; correct spec.trainer and run it again."
        return SizeDecision(desired=0, floor=0, reason=Reason.INVALID_SPEC, message=format_sentence(text), shape=None)
    requested = workers.replicas if workers.max_replicas is None else min(workers.replicas, workers.max_replicas)
    smallest = workers.min_replicas or 1
    largest, desired = shape.floor(requested, smallest), shape.best(requested, smallest)
    if desired == 0:
        return SizeDecision(
            desired=0,
            floor=0,
            reason=Reason.NO_LEGAL_SIZE,
            message=_explain_no_legal_size(smallest, requested, shape),
            shape=shape,
        )
    too_large = explain_misfit(spec.workload.configure(), workers.accelerator, shape, desired)
    if too_large:
        message = format_sentence(too_large)
        return SizeDecision(desired=0, floor=0, reason=Reason.INVALID_SPEC, message=message, shape=shape)
    floor = spec.min_size(desired)
    takes_idle_nodes = spec.elasticity.idle_nodes is IdleNodes.TAKE
    reason, message = _explain_size(workers.replicas, requested, largest, desired, shape)
    if floor > (workers.min_replicas or floor):
        message = f"{message.rstrip('.')}. {_explain_floor(floor, workers)}"
    return SizeDecision(
        desired=desired,
        floor=floor,
        max_size=shape.best(max(requested, workers.max_replicas or 0), smallest) if takes_idle_nodes else desired,
        reserve=largest - desired,
        reason=reason,
        message=format_sentence(message),
        shape=shape,
        compiled_first=spec.sizes_to_compile() if spec.workload.compile_command else (),
    )


def _explain_size(replicas: int, requested: int, largest: int, desired: int, shape: BatchShape) -> tuple[Reason, str]:
    cap = "" if requested == replicas else f", at most {requested} are allowed (maxReplicas)"
    speed = _describe_speed(desired, shape)
    short = shape.fill_ratio(desired) < 1 or shape.batch(desired) != shape.global_batch_size
    if not shape.global_batch_size:
        speed = "program.batch is not given, so the batch changes with the size unless the trainer is elastic"
    idle = _describe_idle_ranks(desired, shape)
    if desired == replicas:
        nodes = pluralize(desired, "node")
        return Reason.AS_REQUESTED, f"{nodes}{f': {speed}' if short else ''}{f'.{idle}' if idle else ''}"
    reserve = f" {largest - desired} in reserve: more would save no pass." if largest > desired else ""
    if largest == replicas:
        return (
            Reason.NODES_IN_RESERVE,
            f"{replicas} nodes were requested; {desired} of them train: {speed}.{reserve}{idle}",
        )
    kind = "the largest legal size" if largest == desired else "the best size"
    return (
        Reason.FLOORED,
        f"{replicas} nodes were requested{cap}; {desired} is {kind}.{reserve}{idle} {_describe_rule(shape)}",
    )


def _explain_floor(floor: int, workers: WorkersSpec) -> str:
    return (
        f"It does not shrink below {pluralize(floor, 'node')}, although minReplicas is {workers.min_replicas}: on "
        f"fewer a process needs more than a core of {workers.accelerator.instance_type} has for weights, gradients and "
        "optimizer alone."
    )


def _describe_speed(nodes: int, shape: BatchShape) -> str:
    passes = shape.micro_batches(nodes)
    plural = "es" if passes > 1 else ""
    batch = shape.batch(nodes)
    near = f" of {batch:,} samples" if batch != shape.global_batch_size else ""
    return f"{passes} pass{plural} a step{near}, {shape.fill_ratio(nodes):.0%} of their rows filled"


def _describe_idle_ranks(nodes: int, shape: BatchShape) -> str:
    """Return a sentence if ranks never have a sample; else empty."""
    idle, ranks, batch = shape.idle_ranks(nodes), shape.data_parallel(nodes), shape.batch(nodes)
    if not idle:
        return ""
    return (
        f" The batch of {batch:,} is smaller than the data-parallel degree ({ranks:,}): {idle:,} of its ranks never "
        f"have work, and the job has {batch / ranks:.0%} of the speed that its nodes could give; raise "
        "trainer.batch.globalSize or take fewer cores."
    )


def _describe_rule(shape: BatchShape) -> str:
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


def _explain_no_legal_size(smallest: int, requested: int, shape: BatchShape) -> str:
    nearby_sizes = shape.legal_sizes(1, max(2 * requested, 16))
    advice = (
        f"legal sizes near it are {', '.join(map(str, nearby_sizes[:8]))}" if nearby_sizes else "no small size is legal"
    )
    return format_sentence(
        f"No size from {smallest} to {requested} nodes is legal: {advice}. {_describe_rule(shape)} "
        "Change spec.workers.replicas (and minReplicas) or the batch."
    )


def count_needed_workers(size: SizeDecision) -> int:
    """Return the number of workers that the job needs to start; 0 if no size is legal."""
    if size.shape is None or not size.desired:
        return 0
    return next(filter(size.shape.is_legal, range(size.floor, size.desired + 1)), 0)


def find_size_within_quota(size: SizeDecision, workers: int) -> int:
    """Return the size to work towards with quota for this number of workers.

    A job whose new smallest size is not granted yet continues with its present one.
    """
    if size.shape is None or not size.desired:
        return 0
    max_available = min(workers, size.desired)
    return size.shape.best(max_available, size.floor) or size.shape.best(max_available)
