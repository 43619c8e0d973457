"""Durable checkpoints as `trainium-trainer inspect --json` lists them inside a worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import read_integer, read_mapping, read_number, read_text
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


def get_metrics_path(job: Mapping[str, Any]) -> str:
    """Return the file with the figures of each step, in a folder, because objects of a bucket cannot be appended to."""
    root = read_workload(job).checkpoint_root
    return f"{CHECKPOINT_MOUNT if '://' in root else root}/metrics.jsonl"


def describe_location(job: Mapping[str, Any], file: str = "") -> str:
    """Return where a file of the run is when no worker is left; empty if it was deleted with the pods."""
    storage = read_mapping(read_mapping(read_mapping(job, "spec"), "checkpoint"), "storage")
    path = read_workload(job).stored_path + (f"/{file}" if file else "")
    if bucket := read_text(storage, "uri"):
        return f"{bucket}/{path}"
    if folder := read_text(read_mapping(storage, "hostPath"), "path"):
        return f"{folder}/{path} on the nodes"
    if claim := read_text(read_mapping(storage, "persistentVolumeClaim"), "claimName"):
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
    return tuple(_read_row(entry) for entry in entries if isinstance(entry, dict))


def _read_row(raw: dict[str, object]) -> CheckpointRow:
    return CheckpointRow(
        name=read_text(raw, "folder"),
        state=read_text(raw, "state"),
        step=read_integer(raw, "step", -1),
        bytes=read_integer(raw, "size"),
        tokens=None if read_number(raw, "tokens") is None else read_integer(raw, "tokens"),
        world=read_text(raw, "world"),
        created=read_number(raw, "created"),
        problem=read_text(raw, "problem"),
    )
