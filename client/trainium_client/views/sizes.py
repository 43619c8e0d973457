"""Compare the numbers of nodes that a job may have (docs/job.md, Sizes)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainium_contract.api_server.errors import ClientError
from trainium_contract.job import TrainingJobSpec
from trainium_contract.spec.elasticity import IdleNodes
from trainium_contract.views.raw import read_mapping
from trainium_contract.views.status_reader import read_public_status

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class SizeRow:
    """A range of node counts at which the same number of them trains."""

    min_nodes: int
    max_nodes: int
    """Available nodes, from `min_nodes` to `max_nodes`."""
    trains: int
    """Number of nodes that train; the others wait in reserve."""
    micro_batches: int
    """Micro-batches of a step on each data-parallel rank."""
    batch: int
    """Samples of a step over all ranks."""
    speed: float
    """Speed relative to the requested size, by the samples of a micro-batch."""
    fill_ratio: float
    """Fraction of a step's rows that have a sample."""
    idle_ranks: int
    """Data-parallel ranks that never have a sample, because the batch is smaller than their number."""
    data_parallel: int
    """Data-parallel degree."""
    step_seconds: float | None
    """Measured at this size; None if the job has not trained at it."""
    current: bool
    uses_idle_nodes: bool
    """Whether it is beyond the requested nodes, so that the job uses it only if other nodes are idle."""
    compiled: bool | None
    """Whether its graphs are compiled; None if unknown, without `precompile`."""


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """Measured speed at one number of nodes."""

    nodes: int
    steps: int
    step_seconds: float
    """Reference step time (docs/goodput.md)."""
    samples_per_second: float | None
    """None if the samples of a step are unknown."""
    speedup: float | None
    """Samples per second relative to the smallest size."""
    efficiency: float | None
    """Speed relative to the same number of nodes, each as fast as one of the smallest size."""
    current: bool


def list_scaling_rows(job: Mapping[str, Any]) -> tuple[ScalingRow, ...]:
    """Return the sizes at which a job has trained, the smallest first. Raises ClientError as `list_size_rows` does."""
    status, shape = read_public_status(job), _parse_spec(job).batch_shape()
    current_size = status.read_part("membership").read_integer("size")
    rows: list[ScalingRow] = []
    for account in sorted(
        status.read_part("goodput").read_parts("sizes"), key=lambda account: account.read_integer("size")
    ):
        nodes, seconds = account.read_integer("size"), account.read_number("stepSeconds")
        if not seconds or nodes < 1:
            continue
        speed = shape.batch(nodes) / seconds if shape.global_batch_size else None
        smallest = rows[0] if rows else None
        baseline = smallest.samples_per_second if smallest else speed
        speedup = speed / baseline if speed and baseline else None
        rows.append(
            ScalingRow(
                nodes=nodes,
                steps=account.read_integer("steps"),
                step_seconds=seconds,
                samples_per_second=speed,
                speedup=speedup,
                efficiency=speedup * (smallest.nodes if smallest else nodes) / nodes if speedup else None,
                current=nodes == current_size,
            )
        )
    return tuple(rows)


def _parse_spec(job: Mapping[str, Any]) -> TrainingJobSpec:
    try:
        return TrainingJobSpec.model_validate(read_mapping(job, "spec"))
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ClientError(
            f"the job's spec.{field} is not known to this command: use the kubectl trn of the operator's version"
        ) from error


def list_size_rows(job: Mapping[str, Any]) -> tuple[SizeRow, ...]:
    """Return the sizes of a job between its least and its largest, the largest first.

    Raises ClientError when the job's specification is not one that this version knows.
    """
    status, spec = read_public_status(job), _parse_spec(job)
    workers, shape = spec.workers, spec.batch_shape()
    max_nodes = max(workers.replicas, workers.max_replicas or 0)
    full = shape.best(workers.replicas, workers.min_replicas or 1)
    min_nodes = spec.min_size(full) if full and workers.min_replicas else workers.min_replicas or 1
    useful = shape.useful_sizes(min_nodes, max_nodes)
    current_size = status.read_part("membership").read_integer("size")
    measured = {
        account.read_integer("size"): account.read_number("stepSeconds")
        for account in status.read_part("goodput").read_parts("sizes")
    }
    compiled = {*status.read_part("compiled").read_integers("sizes"), *spec.sizes_to_compile()}
    rows = [
        SizeRow(
            min_nodes=size,
            max_nodes=max(size, following - 1),
            trains=size,
            micro_batches=shape.micro_batches(size),
            batch=shape.batch(size),
            speed=shape.speed(size, full) if full else 0.0,
            fill_ratio=shape.fill_ratio(size),
            idle_ranks=shape.idle_ranks(size),
            data_parallel=shape.data_parallel(size),
            step_seconds=measured.get(size),
            current=size == current_size,
            uses_idle_nodes=size > workers.replicas and spec.elasticity.idle_nodes is IdleNodes.TAKE,
            compiled=size in compiled if spec.workload.compile_command else None,
        )
        for size, following in pairwise((*useful, max_nodes + 1))
    ]
    return tuple(reversed(rows))
