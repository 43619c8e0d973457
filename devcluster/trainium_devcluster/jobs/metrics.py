"""Read the trainer's files: a record for each step of the final history, and the samples of each step.

`StepLog` rereads `metrics.jsonl` and keeps when a step ended for the first time, which a fault may let the trainer
compute again. Times are Unix seconds of this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


_TAIL_BYTES = 8192


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the record of each line; skip a line that is still being written, and a file that does not exist yet."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Return the record of each step."""
    return {record["step"]: record for record in read_lines(path)}


def read_newest_step(path: Path) -> int:
    """Return the step of the last whole line, from the end of the file; 0 if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
    return 0


@dataclass
class StepLog:
    """Records the steps of a run."""

    path: Path
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    first_times: dict[int, float] = field(default_factory=dict)
    """When each step ended for the first time."""

    def refresh(self) -> None:
        """Read the file again."""
        records = read_steps(self.path)
        for step, record in records.items():
            self.first_times.setdefault(step, float(record["time"]))
        self.steps.update(records)

    def list_losses(self) -> dict[int, float]:
        """Return the loss of each step."""
        return {step: float(record["loss"]) for step, record in self.steps.items()}

    @property
    def newest(self) -> int:
        """The highest step so far; 0 before the first."""
        return max(self.steps, default=0)

    def step_time(self, step: int) -> float | None:
        """Return when `step` ended; None if it has not."""
        record = self.steps.get(step)
        return None if record is None else float(record["time"])


def has_every_sample_once(folder: Path, steps: int, batch: int) -> bool:
    """Return whether every step used a whole global batch and no sample twice, within the first epoch."""
    return has_every_sample_once_in_batches(folder, dict.fromkeys(range(1, steps + 1), batch))


def has_every_sample_once_in_batches(folder: Path, batches: Mapping[int, int]) -> bool:
    """Return whether every step used as many samples as in `batches`, none of them twice, within the first epoch."""
    seen = read_samples(folder)
    every = [sample for samples in seen.values() for sample in samples]
    return {step: len(samples) for step, samples in seen.items()} == batches and len(set(every)) == len(every)


def has_every_sample_once_an_epoch(folder: Path, steps: int, batch: int, epochs: int) -> bool:
    """Return whether each epoch had every sample exactly once, in whole global batches except for its last one."""
    seen = read_samples(folder)
    if steps <= 0 or steps % epochs or not set(seen) <= set(range(1, steps + 1)):
        return False
    length = steps // epochs
    every = sorted({sample for samples in seen.values() for sample in samples})
    if every != list(range(len(every))) or -(-len(every) // batch) != length:
        return False
    for first in range(1, steps + 1, length):
        batches = [seen.get(step, []) for step in range(first, first + length)]
        if any(len(samples) != batch for samples in batches[:-1]) or sorted(itertools.chain(*batches)) != every:
            return False
    return True


def read_samples(folder: Path) -> dict[int, list[int]]:
    """Return the sorted samples of all ranks by step; a sample that was used twice appears twice."""
    samples_by_step: dict[int, list[int]] = {}
    for path in folder.glob("samples-*.jsonl"):
        for record in read_lines(path):
            samples_by_step.setdefault(record["step"], []).extend(record["samples"])
    return {step: sorted(samples) for step, samples in sorted(samples_by_step.items())}
