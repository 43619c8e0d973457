"""The job that is simulated: read from a manifest, changed as the command line states, and refused with a sentence."""

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

_ENDLESS = 2**31 - 1
"""Steps of a job that trains for as long as it is simulated."""


def read_job(path: Path) -> dict[str, Any]:
    """Return the spec of a TrainingJob's manifest. Raises InputError."""
    document = read_yaml(path)
    if not isinstance(document, dict) or document.get("kind") != "TrainingJob":
        raise InputError(f"{path} is no TrainingJob: its kind must be TrainingJob")
    spec = document.get("spec")
    if not isinstance(spec, dict):
        raise InputError(f"{path} has no spec")
    return spec


def make_spec(
    path: Path, raw: Mapping[str, Any], *, nodes: int | None, spares: int | None, changes: Mapping[str, Any]
) -> TrainingJobSpec:
    """Return the spec with these nodes, spares and paths (`recovery.rescaleAfterSeconds`) set. Raises InputError."""
    changed = copy.deepcopy(dict(raw))
    workers = changed.setdefault("workers", {})
    if nodes is not None:
        workers["replicas"] = nodes
        if (workers.get("maxReplicas") or nodes) < nodes:
            del workers["maxReplicas"]
    if spares is not None:
        workers["spares"] = spares
    # Capacity is what is simulated; a queue would have to be asked.
    changed.get("scheduling", {}).pop("queueName", None)
    for place, value in changes.items():
        _set(changed, place, value)
    try:
        spec = TrainingJobSpec.model_validate(changed)
    except ValidationError as error:
        raise InputError(f"{path}: spec: {describe_errors(error)}") from error
    asked = spec.workers.replicas
    if (spec.workers.min_replicas or 1) > asked:
        raise InputError(f"{path}: workers.minReplicas is {spec.workers.min_replicas}, more than {asked} nodes")
    size = decide_size(spec)
    if size.desired == 0 or size.shape is None or not size.shape.is_legal(asked):
        raise InputError(f"{path}: the job cannot train on {asked} nodes: {size.message}")
    if spec.trainer is None:
        # A program resumes from its own checkpoints, as often as checkpoint.durable states.
        checkpoint = spec.checkpoint
        return spec.replaced(checkpoint=checkpoint.replaced(memory=checkpoint.memory.replaced(every_steps=0)))
    # It trains all the days that are asked for: near its end a job does not grow back, for little is left to do.
    return spec.replaced(trainer=spec.trainer.replaced(steps=_ENDLESS, epochs=0.0))


def parse_variation(text: str) -> tuple[str, tuple[Any, ...]]:
    """`recovery.rescaleAfterSeconds=60,600`: a field of the spec and the values to try. Raises InputError."""
    place, separator, values = text.partition("=")
    if not separator or not place or not values:
        raise InputError(f"--vary {text!r} must be FIELD=VALUE,VALUE, for instance recovery.rescaleAfterSeconds=60,600")
    return place, tuple(yaml.safe_load(value) for value in values.split(","))


def _set(spec: dict[str, Any], place: str, value: Any) -> None:
    *folders, last = place.split(".")
    for folder in folders:
        spec = spec.setdefault(folder, {})
        if not isinstance(spec, dict):
            raise InputError(f"--vary: {folder} in {place} holds no fields")
    spec[last] = value
