"""The command `trainium-trainer inspect`: list, verify and repair the durable checkpoints below a root.

Guarantees:
- Nothing is removed. Repair only takes a checkpoint out of use: a note with the reason replaces the receipt, and all
  other files stay.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from trainium_contract.wire.checkpoint_manifest import (
    COMMIT_NAME,
    SET_ASIDE_NAME,
    CheckpointKind,
    parse_milestone,
    parse_step,
)
from trainium_trainer.checkpoint.root import survey as surveys
from trainium_trainer.storage.protocol import Entry, Retry, Storage, read_small

if TYPE_CHECKING:
    from trainium_trainer.checkpoint.root.survey import CommittedCheckpoint

_MEBIBYTE, _GIBIBYTE = 2**20, 2**30
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class CheckpointState(StrEnum):
    """The state of a checkpoint's folder."""

    COMMITTED = "committed"
    """The checkpoint is valid; files and sizes are as they were written."""
    VERIFIED = "verified"
    """The contents are as they were written, too."""
    DAMAGED = "damaged"
    """The checkpoint was committed and is no longer complete."""
    UNCOMMITTED = "uncommitted"
    """A save that is in progress or never ended."""
    SET_ASIDE = "set aside"
    """A user took the checkpoint out of use."""
    OTHER_VERSION = "other version"
    """Another version of the trainer wrote it."""


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One checkpoint folder."""

    folder: str
    step: int
    kind: CheckpointKind
    state: CheckpointState
    size: int
    """The size in bytes."""
    tokens: int | None
    """The number of valid tokens trained on."""
    world: str
    """The ranks that wrote the checkpoint: data x tensor x pipeline parallel."""
    created: float | None
    """Unix seconds."""
    problem: str
    """A message about the damage; empty when there is none."""


def list_checkpoints(storage: Storage, *, verify: bool = False) -> list[ListedCheckpoint]:
    """Return the checkpoints below a root by step. Raises StorageError when they cannot be read."""
    retry = Retry()
    survey = retry.run(lambda: surveys.survey(storage), storage.location)
    rows: list[ListedCheckpoint] = []
    for item in [*survey.committed, *survey.milestones]:
        problems = surveys.verify(storage, item, retry) if verify else []
        rows.append(_format_completeness(item, problems, verified=verify))
    states = {name: (CheckpointState.DAMAGED, problem) for name, problem in survey.damaged.items()}
    states |= {name: (CheckpointState.OTHER_VERSION, problem) for name, problem in survey.other_versions.items()}
    states |= {name: (CheckpointState.SET_ASIDE, _explain_invalid(storage, name)) for name in survey.set_aside}
    states |= dict.fromkeys(survey.uncommitted, (CheckpointState.UNCOMMITTED, ""))
    for name, (state, problem) in states.items():
        step, milestone = parse_step(name), parse_milestone(name)
        kind = CheckpointKind.STATE if milestone is None else CheckpointKind.WEIGHTS
        entries = _list_files(storage, name)
        newest = max((entry.modified for entry in entries), default=None)
        size = sum(entry.size for entry in entries)
        rows.append(ListedCheckpoint(name, step or milestone or 0, kind, state, size, None, "", newest, problem))
    return sorted(rows, key=lambda row: (row.step, row.folder))


def set_aside(storage: Storage, rows: list[ListedCheckpoint]) -> list[ListedCheckpoint]:
    """Take the damaged and the uncommitted checkpoints out of use and return them."""
    retry = Retry()
    broken = [row for row in rows if row.state in (CheckpointState.DAMAGED, CheckpointState.UNCOMMITTED)]
    for row in broken:
        note = json.dumps({"reason": row.problem or "it was never committed", "time": time.time()}).encode()
        name = row.folder
        retry.run(lambda name=name, note=note: storage.write(f"{name}/{SET_ASIDE_NAME}", note), storage.location)  # type: ignore[misc]
        if row.state is CheckpointState.DAMAGED:  # else there was no receipt, and one written in the meantime is valid
            retry.run(lambda name=name: storage.remove_file(f"{name}/{COMMIT_NAME}"), storage.location)  # type: ignore[misc]
    return broken


def format_table(rows: list[ListedCheckpoint], *, now: float) -> str:
    """Format the checkpoints as a table."""
    head = f"{'CHECKPOINT':<18} {'STATE':<13} {'AGE':>8} {'SIZE':>11} {'TOKENS':>16} {'WORLD':>10}  PROBLEM"
    lines = [head]
    for row in rows:
        age = "" if row.created is None else _format_age(now - row.created)
        tokens = "" if row.tokens is None else f"{row.tokens:,}"
        size = f"{row.size / _GIBIBYTE:.1f} GiB" if row.size >= _GIBIBYTE else f"{row.size / _MEBIBYTE:.1f} MiB"
        line = f"{row.folder:<18} {row.state:<13} {age:>8} {size:>11} {tokens:>16} {row.world:>10}  {row.problem}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def format_json(rows: list[ListedCheckpoint]) -> str:
    """Format the checkpoints as a JSON list."""
    return json.dumps([asdict(row) for row in rows], indent=2)


def _format_completeness(item: CommittedCheckpoint, problems: list[str], *, verified: bool) -> ListedCheckpoint:
    manifest = item.manifest
    state = CheckpointState.VERIFIED if verified else CheckpointState.COMMITTED
    world = f"{manifest.data_parallel}x{manifest.tensor_parallel}x{manifest.pipeline_parallel}"
    return ListedCheckpoint(
        folder=item.folder.partition("/")[0],
        step=item.step,
        kind=manifest.kind,
        state=CheckpointState.DAMAGED if problems else state,
        size=item.size,
        tokens=manifest.tokens,
        world=world,
        created=manifest.created,
        problem=problems[0] if problems else "",
    )


def _list_files(storage: Storage, folder: str) -> list[Entry]:
    """Return all files of a checkpoint's folder and of the attempts in it."""
    files: list[Entry] = []
    for entry in storage.list(folder):
        inside = storage.list(f"{folder}/{entry.name}") if entry.is_folder else [entry]
        files += [file for file in inside if not file.is_folder]
    return files


def _explain_invalid(storage: Storage, folder: str) -> str:
    try:
        return str(json.loads(read_small(storage, f"{folder}/{SET_ASIDE_NAME}") or b"")["reason"])
    except (ValueError, KeyError, TypeError):
        return ""


def _format_age(seconds: float) -> str:
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "m")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(0.0, seconds):.0f} s"
