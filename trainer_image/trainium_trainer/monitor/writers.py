"""Files that people and tools read: `metrics.jsonl`, `samples-<rank>.jsonl`, TensorBoard.

Invariants: each file is always the final history, one line per step in order: a resume at step S first drops the lines
of later steps (and a line cut off by a kill). A rank writes its line of a step before its snapshot of it, but another
rank's snapshot may outlive it: then the resume writes the missing line (`mend`). Only rank 0 drops and mends lines, of
every rank's file, before any rank writes.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from typing import TYPE_CHECKING, Any

from trainium_trainer.exits import StorageError
from trainium_trainer.monitor.tensorboard import ScalarWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainium_trainer.monitor.figures import StepFigures

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and an unfinished last line; one truncation, so readers see it whole.

    Raises StorageError.
    """
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            keep = _end_of_step(file.fileno(), step) if size else 0
            if keep < size:
                file.truncate(keep)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _storage(path, error) from error


def _end_of_step(descriptor: int, step: int) -> int:
    """Offset after the last whole line of a step <= `step`; looks from the end, where the resume step is near."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data:
        end = data.rfind(b"\n") + 1
        while end > 0:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            number = _step_of(data[begin:end])
            if number is not None and number <= step:
                break
            end = begin
        return end


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def newest_lines(path: Path, count: int) -> list[dict[str, Any]]:
    """The last lines, at most `count`, oldest first, of a file that `forget_after` has left whole.

    Raises StorageError.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if not size:
                return []
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                begin = size
                for _ in range(count):
                    begin = data.rfind(b"\n", 0, max(begin - 1, 0)) + 1
                return [json.loads(line) for line in data[begin:].splitlines()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _storage(path, error) from error


def first_line(path: Path) -> dict[str, Any] | None:
    """The first line of such a file; None when there is none. Raises StorageError."""
    try:
        with path.open("rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _storage(path, error) from error
    found: dict[str, Any] | None = json.loads(line) if line else None
    return found


def _append(path: Path, record: dict[str, Any]) -> None:
    writer = LineWriter(path)
    try:
        writer.write(record)
    finally:
        writer.close()


def _storage(path: Path, error: OSError) -> StorageError:
    advice = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make checkpoint.path writable"
    return StorageError(f"{path}: cannot be written ({error.strerror}): {advice}")


class LineWriter:
    """Appends one JSON object per line; a line is in the file when `write` returns."""

    def __init__(self, path: Path) -> None:
        """Open for appending. Raises StorageError."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise _storage(path, error) from error

    def write(self, record: dict[str, Any]) -> None:
        """Append one line with one system call. Raises StorageError."""
        data = (json.dumps(record, separators=(",", ":")) + "\n").encode()
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise _storage(self._path, error) from error
        if written < len(data):
            raise _storage(self._path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Recorder:
    """All files that one rank writes; most ranks write none."""

    def __init__(
        self, root: Path, *, rank: int, dp_rank: int | None, tensorboard: bool, record_samples: bool, resume_step: int
    ) -> None:
        """Open the files of this rank; `dp_rank` is None for ranks that read the same samples as another one."""
        self._metrics = LineWriter(root / METRICS_NAME) if rank == 0 else None
        self._samples = None
        if record_samples and dp_rank is not None:
            self._samples = LineWriter(root / f"samples-{dp_rank}.jsonl")
        self._tensorboard_folder = root / TENSORBOARD_NAME if rank == 0 and tensorboard else None
        self._tensorboard: ScalarWriter | None = None
        self._resume_step = resume_step

    @staticmethod
    def rewind(root: Path, step: int) -> None:
        """Make all files the history up to `step`; by rank 0, before anyone opens them."""
        forget_after(root / METRICS_NAME, step)
        for path in root.glob("samples-*.jsonl"):
            forget_after(path, step)

    @staticmethod
    def lacks(root: Path, step: int) -> bool:
        """Whether `rewind` found all steps before `step`, but not the line of it: then `mend` writes that line."""
        newest = newest_lines(root / METRICS_NAME, 1)
        return bool(newest) and newest[0]["step"] == step - 1

    @staticmethod
    def mend(root: Path, figures: StepFigures) -> None:
        """Append the metrics of the resumed step, which `lacks` has found missing."""
        _append(root / METRICS_NAME, figures.to_json())

    @staticmethod
    def mend_samples(root: Path, step: int, samples: Sequence[int]) -> None:
        """Append those of the resumed step's samples that nobody recorded.

        A step that is in the state has summed all ranks' samples, whether or not each of them got to record its own.
        """
        # Two: a rank's own line, and after it that of an earlier resume at this very step.
        lines = [line for path in root.glob("samples-*.jsonl") for line in newest_lines(path, 2)]
        recorded = {one for line in lines if line["step"] == step for one in line["samples"]}
        missing = [one for one in samples if one not in recorded]
        if missing:
            _append(root / "samples-0.jsonl", {"step": step, "samples": missing})

    def samples(self, step: int, samples: Sequence[int]) -> None:
        """Record which samples this rank saw in `step`. Raises StorageError."""
        if self._samples is not None:
            self._samples.write({"step": step, "samples": list(samples)})

    def step(self, figures: StepFigures) -> None:
        """Record a completed step. Raises StorageError."""
        if self._metrics is None:
            return
        self._metrics.write(figures.to_json())
        self._write_tensorboard(figures.step, figures.scalars())

    def _write_tensorboard(self, step: int, scalars: dict[str, float]) -> None:
        if self._tensorboard_folder is None:
            return
        try:
            if self._tensorboard is None:
                self._tensorboard = ScalarWriter(self._tensorboard_folder, resume_step=self._resume_step)
            self._tensorboard.write(step, scalars)
        except OSError as error:
            raise _storage(self._tensorboard_folder, error) from error

    def close(self) -> None:
        """Close all files."""
        for writer in (self._metrics, self._samples, self._tensorboard):
            if writer is not None:
                writer.close()
