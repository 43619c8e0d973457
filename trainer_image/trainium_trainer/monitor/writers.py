"""Write the files that people and tools read: `metrics.jsonl`, `samples-<rank>.jsonl`, TensorBoard.

TensorBoard's file format is written here, since importing the library takes longer than a restart may take. It is a
sequence of length-prefixed, checksummed protocol-buffer messages, of which scalars need six fields.

Guarantees:
- Each file is always the final history, one line per step in order: a resume at step S first drops the lines of later
  steps, and a line cut off by a kill. The first TensorBoard record after a resume drops later steps of earlier files.
- A rank writes its line of a step before its snapshot of it, but another rank's snapshot may outlive it: then the
  resume writes the missing line (`mend`), unless the line waits on the node of any rank.
- Only rank 0 drops and mends lines, of every rank's file, before any rank writes.
- Lines that a file does not take wait aside (`lines.LineWriter`). A node that returns writes what nobody has recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING

from trainium_trainer.exits import StorageError
from trainium_trainer.monitor.lines import (
    LineWriter,
    newest_lines,
    read_aside,
    read_step,
    truncate_after,
    unwritable_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainium_trainer.monitor.figures import StepFigures


_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class ScalarWriter:
    """One event file in a folder."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Create the file. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._record(_event(now) + _bytes_field(3, b"brain.Event:2"))
        # SessionLog START (field 7, status 1) at the first step to come: later events of older files are dropped, also
        # where a run that was killed before its first checkpoint begins again.
        self._record(_event(now, resume_step + 1) + _bytes_field(7, b"\x08\x01"))
        self._file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the values of one step."""
        values = b"".join(
            _bytes_field(1, _bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in scalars.items()
        )
        self._record(_event(time.time(), step) + _bytes_field(5, values))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _record(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(
            length + struct.pack("<I", _masked_crc(length)) + event + struct.pack("<I", _masked_crc(event))
        )


def _event(wall_time: float, step: int = 0) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step)


METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
_TENSORBOARD_PAUSE_SECONDS = 30.0


def _ignore(_: str) -> None:
    """Ignore a sentence."""


def _unrecorded_metrics(path: Path, aside: Path | None, last: int) -> list[bytes]:
    """Return the lines on this node of steps after those in the file: another node may have written them since."""
    kept = read_aside(path, aside, last=last)
    with contextlib.suppress(StorageError):
        newest = newest_lines(path, 1) if kept else []
        return [line for line in kept if not newest or (read_step(line) or 0) > newest[-1]["step"]]
    return kept


def _unrecorded_samples(root: Path, path: Path, aside: Path | None, last: int) -> list[bytes]:
    """Return the lines on this node without samples that were recorded while this node was away."""
    kept = [json.loads(line) for line in read_aside(path, aside, last=last)]
    recorded: dict[int, Counter[int]] = {one["step"]: Counter() for one in kept}
    for file in root.glob("samples-*.jsonl") if kept else ():
        with contextlib.suppress(OSError), file.open("rb") as stream:
            for line in stream:
                step = read_step(line)
                if step is not None and step in recorded:
                    recorded[step].update(json.loads(line)["samples"])
    left = [list((Counter(one["samples"]) - recorded[one["step"]]).elements()) for one in kept]
    found = [one | {"samples": samples} for one, samples in zip(kept, left, strict=True) if samples]
    return [(json.dumps(one, separators=(",", ":")) + "\n").encode() for one in found]


class Recorder:
    """All files that one rank writes; most ranks write none. A file that takes nothing stops no step."""

    def __init__(
        self,
        root: Path,
        *,
        rank: int,
        dp_rank: int | None,
        tensorboard: bool,
        record_samples: bool,
        resume_step: int,
        aside: Path | None = None,
        notify: Callable[[str], None] = _ignore,
    ) -> None:
        """Open the files of this rank; `dp_rank` is None for ranks that read the same samples as another one.

        `aside`: a folder on the node for lines that a file does not take. `notify` gets a sentence when that begins and
        when it ends.
        """
        self._notify = notify
        self._metrics = self._samples = None
        if rank == 0:
            path = root / METRICS_NAME
            earlier = _unrecorded_metrics(path, aside, resume_step)
            self._metrics = LineWriter(path, aside=aside, last=resume_step, earlier=earlier, notify=notify)
        if record_samples and dp_rank is not None:
            path = root / f"samples-{dp_rank}.jsonl"
            earlier = _unrecorded_samples(root, path, aside, resume_step)
            self._samples = LineWriter(path, aside=aside, last=resume_step, earlier=earlier, notify=notify)
        self._tensorboard_folder = root / TENSORBOARD_NAME if rank == 0 and tensorboard else None
        self._tensorboard: ScalarWriter | None = None
        self._tensorboard_again_at = 0.0
        self._resume_step = resume_step

    @property
    def writes(self) -> bool:
        """Whether this rank records anything of a step."""
        return self._metrics is not None or self._samples is not None

    @staticmethod
    def rewind(root: Path, step: int) -> None:
        """Make all files the history up to `step`; by rank 0, before anyone opens them. Raises StorageError."""
        truncate_after(root / METRICS_NAME, step)
        for path in root.glob("samples-*.jsonl"):
            truncate_after(path, step)

    @staticmethod
    def lacks(root: Path, step: int, aside: Path | None = None) -> bool:
        """Return whether `rewind` found all steps before `step`, but not its line: then `mend` writes that line.

        Raises StorageError.
        """
        waiting = [json.loads(line) for line in read_aside(root / METRICS_NAME, aside, last=step)]
        newest = waiting or newest_lines(root / METRICS_NAME, 1)
        return bool(newest) and newest[-1]["step"] == step - 1

    @staticmethod
    def mend(root: Path, figures: StepFigures, aside: Path | None = None) -> None:
        """Append the metrics of the resumed step, which `lacks` has found missing."""
        writer = LineWriter(root / METRICS_NAME, aside=aside, last=figures.step)
        writer.write(figures.to_json())
        writer.close()

    @staticmethod
    def samples_aside(step: int, aside: Path | None) -> dict[str, list[int]]:
        """Return the samples of a step that wait on this node, by the file that they are for and their line."""
        found = {}
        for path in sorted(aside.glob("samples-*.jsonl")) if aside is not None else ():
            for line in read_aside(path, aside, last=step):
                if read_step(line) == step:
                    found[f"{path.name} {line.decode()}"] = list(json.loads(line)["samples"])
        return found

    @staticmethod
    def mend_samples(
        root: Path,
        step: int,
        samples: Sequence[int],
        aside: Path | None = None,
        waiting: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Append those of the resumed step's samples that no rank has recorded. Raises StorageError.

        A step that is in the state has summed all ranks' samples, whether or not each of them got to record its own. A
        sample may be there twice, where one pass over the data ends and the next begins. `waiting`: what waits on the
        nodes of all ranks (`samples_aside`); by default what waits on this node.
        """
        # Two: a rank's own line, and after it that of an earlier resume at this very step.
        lines = [line for path in root.glob("samples-*.jsonl") for line in newest_lines(path, 2)]
        recorded = Counter(one for line in lines if line["step"] == step for one in line["samples"])
        for one in (Recorder.samples_aside(step, aside) if waiting is None else waiting).values():
            recorded.update(one)
        missing = list((Counter(samples) - recorded).elements())
        if missing:
            writer = LineWriter(root / "samples-0.jsonl", aside=aside, last=step)
            writer.write({"step": step, "samples": missing, "mended": True})
            writer.close()

    def samples(self, step: int, samples: Sequence[int]) -> None:
        """Record which samples this rank saw in `step`."""
        if self._samples is not None:
            self._samples.write({"step": step, "samples": list(samples)})

    def step(self, figures: StepFigures) -> None:
        """Record a completed step."""
        if self._metrics is None:
            return
        self._metrics.write(figures.to_json())
        self._write_tensorboard(figures.step, figures.scalars())

    def _write_tensorboard(self, step: int, scalars: dict[str, float]) -> None:
        if self._tensorboard_folder is None:
            return
        if self._tensorboard is None and time.monotonic() < self._tensorboard_again_at:
            return
        try:
            if self._tensorboard is None:
                self._tensorboard = ScalarWriter(self._tensorboard_folder, resume_step=self._resume_step)
            self._tensorboard.write(step, scalars)
            self._resume_step = step
        except OSError as error:
            if not self._tensorboard_again_at:
                self._notify(
                    f"{unwritable_error(self._tensorboard_folder, error)}; training goes on without its curves"
                )
            # Half an event may be in the file, so the next try makes another one.
            self._tensorboard_again_at = time.monotonic() + _TENSORBOARD_PAUSE_SECONDS
            self._close_tensorboard()

    def _close_tensorboard(self) -> None:
        writer, self._tensorboard = self._tensorboard, None
        with contextlib.suppress(OSError):
            if writer is not None:
                writer.close()

    def close(self) -> None:
        """Close all files."""
        for writer in (self._metrics, self._samples):
            if writer is not None:
                writer.close()
        self._close_tensorboard()
