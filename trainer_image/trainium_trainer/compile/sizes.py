"""Choose the sizes of a job that are compiled, and their order, from a manifest or the trainer's own file.

Guarantees:
- Only legal sizes come out, of a job only those that it may come to run at.
- The size that the job starts at comes first, then those next to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.sizes import BatchShape, SizeRule
from trainium_contract.spec.precompile import PrecompileSizes, PrecompileSpec
from trainium_contract.wire.worker_env import KIND
from trainium_trainer.configuration.config import parse, read_document
from trainium_trainer.configuration.job_file import spec_of
from trainium_trainer.exits import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_contract.job import TrainingJobSpec
    from trainium_contract.trainer.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class Sizes:
    """A configuration and the numbers of nodes that it is compiled for."""

    config: TrainingConfig
    cores_per_node: int
    nodes: tuple[int, ...]
    instance_type: str = ""


def read_sizes(
    path: Path, overrides: Sequence[str] = (), *, asked: Sequence[int] = (), cores_per_node: int | None = None
) -> Sizes:
    """Return the sizes that a file asks for, or those of `asked`. Raises UserError."""
    return resolve_sizes(path, read_document(path), overrides, asked=asked, cores_per_node=cores_per_node)


def resolve_sizes(
    path: Path,
    document: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    asked: Sequence[int] = (),
    cores_per_node: int | None = None,
) -> Sizes:
    """Return the sizes of a document that was read from `path`. Raises UserError."""
    if document.get("kind") != KIND:
        config = parse(document, overrides, str(path))
        if not asked:
            raise UserError(
                f"{path} is the trainer's own configuration, which does not have the number of nodes: give "
                "--sizes (and --cores-per-node), or the TrainingJob"
            )
        shape = config.batch_shape(cores_per_node or 1)
        return Sizes(config, shape.cores_per_node, _legal(shape, asked))
    spec = spec_of(path, document)
    config = parse(spec.training_config().to_wire(), overrides, str(path))
    shape = config.batch_shape(cores_per_node or spec.workers.accelerator.cores(), spec.elasticity.sizes)
    nodes = _legal(shape, asked) if asked else _of_job(path, spec, shape)
    return Sizes(config, shape.cores_per_node, nodes, spec.workers.accelerator.instance_type or "")


def _of_job(path: Path, spec: TrainingJobSpec, shape: BatchShape) -> tuple[int, ...]:
    every = PrecompileSpec(sizes=PrecompileSizes.ALL)
    nodes = spec.model_copy(update={"precompile": every}).sizes_to_compile()
    if not nodes:
        raise UserError(
            f"{path}: workers.replicas {spec.workers.replicas} is not a legal size, nor is any below it: change it, or "
            "trainer.batch.globalSize"
        )
    return _legal(shape, nodes)


def _legal(shape: BatchShape, asked: Sequence[int]) -> tuple[int, ...]:
    for nodes in asked:
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
    return tuple(dict.fromkeys(asked))
