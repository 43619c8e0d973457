"""Compare the numbers of nodes that a job may have (docs/job.md, Sizes)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainium_contract.api_server.errors import ClientError
from trainium_contract.job import TrainingJobSpec
from trainium_contract.spec.elasticity import IdleNodes
from trainium_contract.views.raw import mapping
from trainium_contract.views.status_reader import public_status

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class SizeRow:
    """Some numbers of nodes at which the same number of them trains."""

    fewest: int
    most: int
    """Nodes that are there, from `fewest` to `most`."""
    trains: int
    """Number of them that train; the others wait in reserve."""
    passes: int
    """Micro-batches of a step on each data-parallel rank."""
    batch: int
    """Samples of a step over all ranks."""
    speed: float
    """Share of the speed at the size asked for, by the samples of a pass."""
    filled: float
    """Share of a step's rows that hold a sample."""
    idle_ranks: int
    """Data-parallel ranks that never have a sample, since the batch is smaller than their number."""
    data_parallel: int
    """Data-parallel degree."""
    step_seconds: float | None
    """Measured at this size; None where the job has not been."""
    current: bool
    idle: bool
    """Beyond the nodes that were asked for: only where others leave them idle, and the job takes those."""
    compiled: bool | None
    """Whether its graphs are there; None where nobody knows, without `precompile`."""


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """Speed that was measured at one number of nodes."""

    nodes: int
    steps: int
    step_seconds: float
    """Reference step time (docs/goodput.md)."""
    samples_per_second: float | None
    """None where the samples of a step are not known."""
    speedup: float | None
    """Samples per second in units of those at the smallest size."""
    efficiency: float | None
    """Share of the speed that as many nodes would have if each were as fast as one of the smallest size."""
    current: bool


def scaling_rows(job: Mapping[str, Any]) -> tuple[ScalingRow, ...]:
    """Return the sizes at which a job has trained, the smallest first. Raises ClientError as `size_rows` does."""
    status, shape = public_status(job), _spec_of(job).batch_shape()
    now = status.part("membership").whole("size")
    rows: list[ScalingRow] = []
    for each in sorted(status.part("goodput").parts("sizes"), key=lambda each: each.whole("size")):
        nodes, seconds = each.whole("size"), each.number("stepSeconds")
        if not seconds or nodes < 1:
            continue
        speed = shape.batch(nodes) / seconds if shape.global_batch_size else None
        first = rows[0] if rows else None
        least = first.samples_per_second if first else speed
        speedup = speed / least if speed and least else None
        rows.append(
            ScalingRow(
                nodes=nodes,
                steps=each.whole("steps"),
                step_seconds=seconds,
                samples_per_second=speed,
                speedup=speedup,
                efficiency=speedup * (first.nodes if first else nodes) / nodes if speedup else None,
                current=nodes == now,
            )
        )
    return tuple(rows)


def _spec_of(job: Mapping[str, Any]) -> TrainingJobSpec:
    try:
        return TrainingJobSpec.model_validate(mapping(job, "spec"))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ClientError(
            f"the job's spec.{where} is not known to this command: use the kubectl trn of the operator's version"
        ) from error


def size_rows(job: Mapping[str, Any]) -> tuple[SizeRow, ...]:
    """Return the sizes of a job between its least and its largest, the largest first.

    Raises ClientError when the job's specification is not one that this version knows.
    """
    status, spec = public_status(job), _spec_of(job)
    workers, shape = spec.workers, spec.batch_shape()
    most = max(workers.replicas, workers.max_replicas or 0)
    full = shape.best(workers.replicas, workers.min_replicas or 1)
    least = spec.least_size(full) if full and workers.min_replicas else workers.min_replicas or 1
    useful = shape.useful_sizes(least, most)
    now = status.part("membership").whole("size")
    measured = {each.whole("size"): each.number("stepSeconds") for each in status.part("goodput").parts("sizes")}
    compiled = {*status.part("compiled").wholes("sizes"), *spec.sizes_to_compile()}
    rows = [
        SizeRow(
            fewest=size,
            most=max(size, following - 1),
            trains=size,
            passes=shape.passes(size),
            batch=shape.batch(size),
            speed=shape.speed(size, full) if full else 0.0,
            filled=shape.filled(size),
            idle_ranks=shape.idle_ranks(size),
            data_parallel=shape.data_parallel(size),
            step_seconds=measured.get(size),
            current=size == now,
            idle=size > workers.replicas and spec.elasticity.idle_nodes is IdleNodes.TAKE,
            compiled=size in compiled if spec.precompile.enabled else None,
        )
        for size, following in pairwise((*useful, most + 1))
    ]
    return tuple(reversed(rows))
