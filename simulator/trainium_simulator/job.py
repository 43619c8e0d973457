"""Read the simulated job from a manifest, apply the options of the command line, and refuse invalid ones."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from trainium_contract.job import TrainingJobSpec
from trainium_operator.plan.view.size import decide_size
from trainium_simulator.errors import InputError, describe_errors
from trainium_simulator.stages import read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MAX_STEPS = 2**31 - 1
"""Steps of a job that trains during the whole simulation."""


def read_job(path: Path) -> dict[str, Any]:
    """Return the spec of a TrainingJob's manifest. Raises InputError."""
    document = read_yaml(path)
    if not isinstance(document, dict) or document.get("kind") != "TrainingJob":
        raise InputError(f"{path} is no TrainingJob: its kind must be TrainingJob")
    spec = document.get("spec")
    if not isinstance(spec, dict):
        raise InputError(f"{path} has no spec")
    return spec


def build_spec(
    path: Path, raw_spec: Mapping[str, Any], *, nodes: int | None, spares: int | None, changes: Mapping[str, Any]
) -> TrainingJobSpec:
    """Return the spec with these nodes, spares and changed fields. Raises InputError.

    The keys of `changes` are paths of fields such as `recovery.rescaleAfterSeconds`.
    """
    document = copy.deepcopy(dict(raw_spec))
    workers = document.setdefault("workers", {})
    if nodes is not None:
        workers["replicas"] = nodes
        if (workers.get("maxReplicas") or nodes) < nodes:
            del workers["maxReplicas"]
    if spares is not None:
        workers["spares"] = spares
    # The simulation has its own capacity, so the job waits in no queue.
    document.get("scheduling", {}).pop("queueName", None)
    for field_path, value in changes.items():
        _set_field(document, field_path, value)
    try:
        spec = TrainingJobSpec.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{path}: spec: {describe_errors(error)}") from error
    replicas = spec.workers.replicas
    if (spec.workers.min_replicas or 1) > replicas:
        raise InputError(f"{path}: workers.minReplicas is {spec.workers.min_replicas}, more than {replicas} nodes")
    size = decide_size(spec)
    if size.desired == 0 or size.shape is None or not size.shape.is_legal(replicas):
        raise InputError(f"{path}: the job cannot train on {replicas} nodes: {size.message}")
    checkpoint = spec.checkpoint
    if not spec.workload.saves_on_schedule:
        # It resumes from its own checkpoints, at the interval in checkpoint.durable.
        checkpoint = checkpoint.replaced(memory=checkpoint.memory.replaced(every_steps=0))
    # It trains during all simulated days: near its end a job does not grow back, because little is left to do.
    trainer = spec.trainer and spec.trainer.replaced(steps=_MAX_STEPS, epochs=0.0)
    return spec.replaced(checkpoint=checkpoint, trainer=trainer)


def parse_variation(text: str) -> tuple[str, tuple[Any, ...]]:
    """Parse `recovery.rescaleAfterSeconds=60,600`: a field of the spec and the values to try. Raises InputError."""
    field_path, separator, values = text.partition("=")
    if not separator or not field_path or not values:
        raise InputError(f"--vary {text!r} must be FIELD=VALUE,VALUE, for instance recovery.rescaleAfterSeconds=60,600")
    return field_path, tuple(yaml.safe_load(value) for value in values.split(","))


def _set_field(spec: dict[str, Any], field_path: str, value: Any) -> None:
    *parents, last = field_path.split(".")
    for parent in parents:
        spec = spec.setdefault(parent, {})
        if not isinstance(spec, dict):
            raise InputError(f"--vary: {parent} in {field_path} holds no fields")
    spec[last] = value
