"""Write the files for users and tools: `metrics.jsonl`, `samples-<rank>.jsonl`, TensorBoard.

TensorBoard's file format is written here, because importing the library takes longer than a restart may. It is a
sequence of length-prefixed, checksummed protocol-buffer messages, of which scalars need six fields.

Guarantees:
- Each file is always the final history, one line per step in order: a resume at step S first drops the lines of later
  steps, and an incomplete line. The first TensorBoard record after a resume drops later steps of earlier files.
- A rank writes its line of a step before its snapshot, but another rank's snapshot may survive without that line: then
  the resume writes the missing line (`append_missing_line`), unless the line waits on the node of any rank.
- Only rank 0 drops and mends lines, of every rank's file, before any rank writes.
- Lines that cannot be written wait aside (`json_lines.LineWriter`). A node that returns writes unrecorded lines.
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
from trainium_trainer.monitor.json_lines import (
    LineWriter,
    create_write_error,
    read_fallback_lines,
    read_newest_lines,
    read_step,
    truncate_after,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainium_trainer.monitor.step_metrics import StepMetrics


_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected


def _build_crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _build_crc_table()


def _compute_masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_bytes_field(number: int, data: bytes) -> bytes:
    return _encode_varint(number << 3 | 2) + _encode_varint(len(data)) + data


class ScalarWriter:
    """An event file in a folder."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Create the file. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._record(_encode_event(now) + _encode_bytes_field(3, b"brain.Event:2"))
        # SessionLog START (field 7, status 1) at the next step drops later events of older files, also if a run that
        # was killed before its first checkpoint starts again.
        self._record(_encode_event(now, resume_step + 1) + _encode_bytes_field(7, b"\x08\x01"))
        self._file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the values of one step."""
        values = b"".join(
            _encode_bytes_field(1, _encode_bytes_field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in scalars.items()
        )
        self._record(_encode_event(time.time(), step) + _encode_bytes_field(5, values))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _record(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(
            length
            + struct.pack("<I", _compute_masked_crc(length))
            + event
            + struct.pack("<I", _compute_masked_crc(event))
        )


def _encode_event(wall_time: float, step: int = 0) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _encode_varint(step)


METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
_TENSORBOARD_PAUSE_SECONDS = 30.0


def _find_unrecorded_metrics(path: Path, fallback: Path | None, last: int) -> list[bytes]:
    """Return the lines on this node of steps after those in the file, which another node may have written since."""
    lines = read_fallback_lines(path, fallback, last=last)
    with contextlib.suppress(StorageError):
        newest = read_newest_lines(path, 1) if lines else []
        return [line for line in lines if not newest or (read_step(line) or 0) > newest[-1]["step"]]
    return lines


def _find_unrecorded_samples(root: Path, path: Path, fallback: Path | None, last: int) -> list[bytes]:
    """Return the lines on this node without samples that were recorded while it was unreachable."""
    waiting = [json.loads(line) for line in read_fallback_lines(path, fallback, last=last)]
    recorded: dict[int, Counter[int]] = {line["step"]: Counter() for line in waiting}
    for file in root.glob("samples-*.jsonl") if waiting else ():
        with contextlib.suppress(OSError), file.open("rb") as stream:
            for line in stream:
                step = read_step(line)
                if step is not None and step in recorded:
                    recorded[step].update(json.loads(line)["samples"])
    missing = [list((Counter(line["samples"]) - recorded[line["step"]]).elements()) for line in waiting]
    unrecorded = [line | {"samples": samples} for line, samples in zip(waiting, missing, strict=True) if samples]
    return [(json.dumps(line, separators=(",", ":")) + "\n").encode() for line in unrecorded]


class Recorder:
    """The files that one rank writes; most ranks write none. A failing file stops no step."""

    def __init__(
        self,
        root: Path,
        *,
        rank: int,
        dp_rank: int | None,
        tensorboard: bool,
        record_samples: bool,
        resume_step: int,
        fallback: Path | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open the files of this rank; `dp_rank` is None for ranks that read the same samples as another rank.

        `fallback` is on the node, for lines that cannot be written. `notify` gets a message when that begins and
        ends.
        """
        self._notify = notify
        self._metrics = self._samples = None
        if rank == 0:
            path = root / METRICS_NAME
            earlier = _find_unrecorded_metrics(path, fallback, resume_step)
            self._metrics = LineWriter(path, fallback=fallback, last=resume_step, earlier=earlier, notify=notify)
        if record_samples and dp_rank is not None:
            path = root / f"samples-{dp_rank}.jsonl"
            earlier = _find_unrecorded_samples(root, path, fallback, resume_step)
            self._samples = LineWriter(path, fallback=fallback, last=resume_step, earlier=earlier, notify=notify)
        self._tensorboard_folder = root / TENSORBOARD_NAME if rank == 0 and tensorboard else None
        self._tensorboard: ScalarWriter | None = None
        self._tensorboard_again_at = 0.0
        self._resume_step = resume_step

    @property
    def writes(self) -> bool:
        """Whether this rank records steps."""
        return self._metrics is not None or self._samples is not None

    @staticmethod
    def rewind(root: Path, step: int) -> None:
        """Cut all files to the history up to `step`, on rank 0, before any rank opens them. Raises StorageError."""
        truncate_after(root / METRICS_NAME, step)
        for path in root.glob("samples-*.jsonl"):
            truncate_after(path, step)

    @staticmethod
    def is_missing_line(root: Path, step: int, fallback: Path | None = None) -> bool:
        """Return whether the files have all steps before `step` but not its line, see `append_missing_line`.

        Raises StorageError.
        """
        waiting = [json.loads(line) for line in read_fallback_lines(root / METRICS_NAME, fallback, last=step)]
        newest = waiting or read_newest_lines(root / METRICS_NAME, 1)
        return bool(newest) and newest[-1]["step"] == step - 1

    @staticmethod
    def append_missing_line(root: Path, metrics: StepMetrics, fallback: Path | None = None) -> None:
        """Append the missing metrics of the resumed step, see `is_missing_line`."""
        writer = LineWriter(root / METRICS_NAME, fallback=fallback, last=metrics.step)
        writer.write(metrics.to_json())
        writer.close()

    @staticmethod
    def read_fallback_samples(step: int, fallback: Path | None) -> dict[str, list[int]]:
        """Return the samples of a step that wait on this node, by their file and line."""
        samples = {}
        for path in sorted(fallback.glob("samples-*.jsonl")) if fallback is not None else ():
            for line in read_fallback_lines(path, fallback, last=step):
                if read_step(line) == step:
                    samples[f"{path.name} {line.decode()}"] = list(json.loads(line)["samples"])
        return samples

    @staticmethod
    def append_missing_samples(
        root: Path,
        step: int,
        samples: Sequence[int],
        fallback: Path | None = None,
        waiting: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Append the samples of the resumed step that no rank has recorded. Raises StorageError.

        A step in the state has used all ranks' samples, even if some ranks failed before they recorded theirs. A sample
        may occur twice, if one pass over the data ends and the next begins. `waiting` are the lines that wait on the
        nodes of all ranks (`read_fallback_samples`), by default those of this node.
        """
        # Two lines: the rank's own, and one of an earlier resume at the same step.
        lines = [line for path in root.glob("samples-*.jsonl") for line in read_newest_lines(path, 2)]
        recorded = Counter(sample for line in lines if line["step"] == step for sample in line["samples"])
        for samples_on_node in (
            Recorder.read_fallback_samples(step, fallback) if waiting is None else waiting
        ).values():
            recorded.update(samples_on_node)
        missing = list((Counter(samples) - recorded).elements())
        if missing:
            writer = LineWriter(root / "samples-0.jsonl", fallback=fallback, last=step)
            writer.write({"step": step, "samples": missing, "mended": True})
            writer.close()

    def record_samples(self, step: int, samples: Sequence[int]) -> None:
        """Record the samples of this rank in `step`."""
        if self._samples is not None:
            self._samples.write({"step": step, "samples": list(samples)})

    def step(self, metrics: StepMetrics) -> None:
        """Record a completed step."""
        if self._metrics is None:
            return
        self._metrics.write(metrics.to_json())
        self._write_tensorboard(metrics.step, metrics.list_scalars())

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
                    f"{create_write_error(self._tensorboard_folder, error)}; training continues without its curves"
                )
            # The file may contain a partial event, so the next attempt creates another file.
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
