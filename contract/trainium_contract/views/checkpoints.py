"""Durable checkpoints as `trainium-trainer inspect --json` lists them inside a worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import mapping, number, text, whole
from trainium_contract.wire.worker_env import CHECKPOINT_MOUNT

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEPT = ("hostPath", "persistentVolumeClaim", "uri")
"""Storage that outlives a pod."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint or milestone."""

    name: str
    """Folder."""
    state: str
    step: int
    bytes: int
    tokens: int | None
    world: str
    """Ranks that wrote it: data x tensor x pipeline parallel."""
    created: float | None
    """Unix seconds."""
    problem: str


def checkpoint_root(job: Mapping[str, Any]) -> str:
    """Return where the job's workers see its checkpoints; empty for a program that does not name its folder."""
    metadata, storage = mapping(job, "metadata"), mapping(mapping(mapping(job, "spec"), "checkpoint"), "storage")
    program = mapping(mapping(job, "spec"), "program")
    if program:
        return text(mapping(program, "checkpoints"), "path")
    if not any(storage.get(kind) for kind in _KEPT):
        return CHECKPOINT_MOUNT
    root = text(storage, "uri") or CHECKPOINT_MOUNT
    return f"{root}/{text(storage, 'subPath') or text(metadata, 'namespace') + '/' + text(metadata, 'name')}"


def metrics_path(job: Mapping[str, Any]) -> str:
    """Return the file of the figures of each step, in a folder: objects of a bucket cannot be appended to."""
    root = checkpoint_root(job)
    return f"{CHECKPOINT_MOUNT if '://' in root else root}/metrics.jsonl"


def where_kept(job: Mapping[str, Any], file: str = "") -> str:
    """Return where a file of the run is when no worker is left; empty when it was deleted with the pods."""
    storage = mapping(mapping(mapping(job, "spec"), "checkpoint"), "storage")
    metadata = mapping(job, "metadata")
    below = text(storage, "subPath") or text(metadata, "namespace") + "/" + text(metadata, "name")
    if mapping(mapping(job, "spec"), "program"):
        folder = checkpoint_root(job).removeprefix(CHECKPOINT_MOUNT).strip("/")
        below = "/".join(filter(None, (text(storage, "subPath"), folder)))
    below += f"/{file}" if file else ""
    if bucket := text(storage, "uri"):
        return f"{bucket}/{below}"
    if folder := text(mapping(storage, "hostPath"), "path"):
        return f"{folder}/{below} on the nodes"
    if claim := text(mapping(storage, "persistentVolumeClaim"), "claimName"):
        return f"{below} on the volume of claim {claim}"
    return ""


def checkpoint_rows(printed: str) -> tuple[CheckpointRow, ...] | None:
    """Parse the list that `inspect` prints; None for anything else."""
    try:
        found = json.loads(printed)
    except ValueError:
        return None
    if not isinstance(found, list):
        return None
    return tuple(_row(each) for each in found if isinstance(each, dict))


def _row(raw: dict[str, object]) -> CheckpointRow:
    return CheckpointRow(
        name=text(raw, "folder"),
        state=text(raw, "state"),
        step=whole(raw, "step", -1),
        bytes=whole(raw, "size"),
        tokens=None if number(raw, "tokens") is None else whole(raw, "tokens"),
        world=text(raw, "world"),
        created=number(raw, "created"),
        problem=text(raw, "problem"),
    )
