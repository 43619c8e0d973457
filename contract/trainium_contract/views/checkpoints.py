"""Durable checkpoints as `trainium-trainer inspect --json` lists them inside a worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import integer, mapping, number, text
from trainium_contract.views.workload import read_workload
from trainium_contract.wire.worker_env import CHECKPOINT_MOUNT

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint or milestone."""

    name: str
    """Name of the folder."""
    state: str
    step: int
    bytes: int
    tokens: int | None
    world: str
    """Ranks that wrote it: data x tensor x pipeline parallel."""
    created: float | None
    """Unix seconds."""
    problem: str


def metrics_path(job: Mapping[str, Any]) -> str:
    """Return the file with the figures of each step, in a folder, because objects of a bucket cannot be appended to."""
    root = read_workload(job).checkpoint_root
    return f"{CHECKPOINT_MOUNT if '://' in root else root}/metrics.jsonl"


def describe_location(job: Mapping[str, Any], file: str = "") -> str:
    """Return where a file of the run is when no worker is left; empty if it was deleted with the pods."""
    storage = mapping(mapping(mapping(job, "spec"), "checkpoint"), "storage")
    path = read_workload(job).stored_path + (f"/{file}" if file else "")
    if bucket := text(storage, "uri"):
        return f"{bucket}/{path}"
    if folder := text(mapping(storage, "hostPath"), "path"):
        return f"{folder}/{path} on the nodes"
    if claim := text(mapping(storage, "persistentVolumeClaim"), "claimName"):
        return f"{path} on the volume of claim {claim}"
    return ""


def parse_checkpoint_rows(printed: str) -> tuple[CheckpointRow, ...] | None:
    """Parse the list that `inspect` prints; None for anything else."""
    try:
        entries = json.loads(printed)
    except ValueError:
        return None
    if not isinstance(entries, list):
        return None
    return tuple(_row(entry) for entry in entries if isinstance(entry, dict))


def _row(raw: dict[str, object]) -> CheckpointRow:
    return CheckpointRow(
        name=text(raw, "folder"),
        state=text(raw, "state"),
        step=integer(raw, "step", -1),
        bytes=integer(raw, "size"),
        tokens=None if number(raw, "tokens") is None else integer(raw, "tokens"),
        world=text(raw, "world"),
        created=number(raw, "created"),
        problem=text(raw, "problem"),
    )
