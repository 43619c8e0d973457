"""Choose the sizes of a job to compile, and their order, from a manifest or the trainer's configuration.

Guarantees:
- Only legal sizes are returned; for a job only those at which it may run.
- The job's initial size comes first, then the sizes closest to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.sizes import BatchShape, SizeRule
from trainium_contract.wire.worker_env import KIND
from trainium_trainer.configuration.config import parse, parse_job_spec
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.trainer.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class CompileSizes:
    """A configuration and the numbers of nodes for which it is compiled."""

    config: TrainingConfig
    cores_per_node: int
    nodes: tuple[int, ...]
    instance_type: str = ""


def resolve_sizes(
    path: Path,
    document: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    requested: Sequence[int] = (),
    cores_per_node: int | None = None,
) -> CompileSizes:
    """Return the sizes of a document that was read from `path`, or those of `requested`. Raises UserError."""
    if document.get("kind") != KIND:
        config = parse(document, overrides, str(path))
        if not requested:
            raise UserError(
                f"{path} is the trainer's own configuration, which does not have the number of nodes: give "
                "--sizes (and --cores-per-node), or the TrainingJob"
            )
        shape = config.batch_shape(cores_per_node or 1)
        return CompileSizes(config, shape.cores_per_node, _check_legal(shape, requested))
    spec = parse_job_spec(path, document)
    config = parse(spec.training_config().to_wire(), overrides, str(path))
    shape = config.batch_shape(cores_per_node or spec.workers.accelerator.cores(), spec.elasticity.sizes)
    nodes = _check_legal(shape, requested) if requested else _find_job_sizes(path, spec, shape)
    return CompileSizes(config, shape.cores_per_node, nodes, spec.workers.accelerator.instance_type or "")


def _find_job_sizes(path: Path, spec: TrainingJobSpec, shape: BatchShape) -> tuple[int, ...]:
    nodes = spec.useful_sizes()
    if not nodes:
        raise UserError(
            f"{path}: workers.replicas {spec.workers.replicas} is not a legal size, nor is any below it: change it, or "
            "trainer.batch.globalSize"
        )
    return _check_legal(shape, nodes)


def _check_legal(shape: BatchShape, requested: Sequence[int]) -> tuple[int, ...]:
    for nodes in requested:
        if not shape.is_legal(nodes):
            smaller = shape.floor(nodes)
            batch = (
                f" and a global batch of {shape.global_batch_size} in micro-batches of {shape.micro_batch_size}"
                if shape.rule is SizeRule.EVEN
                else ""
            )
            context = f" x context {shape.context}" if shape.context > 1 else ""
            raise UserError(
                f"--sizes has {nodes}, but {nodes} x {shape.cores_per_node} ranks cannot share tensor {shape.tensor} x "
                f"pipeline {shape.pipeline}{context}{batch}: "
                + (f"the next smaller legal size is {smaller}" if smaller else "no size below it is legal either")
            )
    return tuple(dict.fromkeys(requested))
