"""List and verify the durable checkpoints below a root: `trainium-trainer inspect ROOT`. Reads only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_contract.manifest import step_of
from trainium_trainer.checkpoint import commit as commits
from trainium_trainer.checkpoint.storage import PosixStorage

if TYPE_CHECKING:
    from pathlib import Path

_MEBIBYTE = 2**20
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint folder."""

    step: int
    committed: bool
    verified: bool
    """Whether sizes and digests of all files are right; False also when that was not asked for."""
    size: int
    """Bytes."""
    age: float
    """Seconds since it was written."""
    problem: str
    """What is wrong; empty when nothing is."""


def list_checkpoints(root: Path, *, verify: bool = True) -> list[CheckpointRow]:
    """The checkpoints below `root` by step; OSError when the folder cannot be read."""
    storage = PosixStorage(root)
    found = commits.survey(storage)
    modified = {entry.name: entry.modified for entry in storage.list("")}
    now = time.time()
    rows: list[CheckpointRow] = []
    for item in found.committed:
        problems = commits.verify(storage, item) if verify else []
        size = sum(file.size for file in item.manifest.files)
        problem = problems[0] if problems else ""
        rows.append(CheckpointRow(item.step, True, verify and not problems, size, now - item.manifest.created, problem))
    incomplete = dict.fromkeys(found.leftovers, "was never committed")
    incomplete |= {f"step-{step}": problem for step, problem in found.damaged.items()}
    for folder, problem in incomplete.items():
        step = step_of(folder.partition(".")[0])
        size = sum(entry.size for entry in storage.list(folder))
        committed = step in found.damaged and folder == f"step-{step}"
        rows.append(CheckpointRow(step or 0, committed, False, size, now - modified.get(folder, now), problem))
    return sorted(rows, key=lambda row: (row.step, row.committed))


def inspect(root: Path, *, verify: bool = True) -> str:
    """The table that `trainium-trainer inspect` prints."""
    rows = list_checkpoints(root, verify=verify)
    if not rows:
        return f"no checkpoints in {root}"
    lines = [f"{'STEP':>10}  {'COMMITTED':<9}  {'VERIFIED':<8}  {'SIZE':>12}  {'AGE':>8}  PROBLEM"]
    for row in rows:
        verified = "yes" if row.verified else ("no" if verify or row.problem else "-")
        line = (
            f"{row.step:>10}  {'yes' if row.committed else 'no':<9}  {verified:<8}  "
            f"{row.size / _MEBIBYTE:>8.1f} MiB  {_age(row.age):>8}  {row.problem}"
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def _age(seconds: float) -> str:
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "m")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{max(0.0, seconds):.0f} s"
