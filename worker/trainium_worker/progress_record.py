"""The progress record of a training process: a file in shared memory, and messages for the user beside it.

The record has the newest step, its loss and the checkpoints. The pulse and a request to stop are behind it.

Guarantees:
- One writer, any number of readers, no system call per write.
- A reader gets a complete record or None: a sequence count is odd during a write, and there is a checksum.
- The layout is fixed and versioned, so the two sides may be different builds: a reader of another layout gets None.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import struct
import time
import zlib
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from trainium_worker.pulse import PULSE_BYTES, Activity, Pulse, PulseReading, Waiting, unpack_pulse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TRAIN = "Train"
"""The stage of the training steps."""
PROFILE_SIGNAL = signal.SIGRTMIN + 5
"""The signal by which the agent asks a process with a handler for it to record a trace."""

_MAGIC = 0x544E5250
_VERSION = 11
_HEADER = struct.Struct("<IIQ")  # magic, version, sequence
_CHECKSUM = struct.Struct("<I")
_READ_ATTEMPTS = 5
_STAGE_BYTES = 32
_FIGURES_BYTES = 512
"""The size of the figures as a JSON object."""


class ProgressPhase(IntEnum):
    """The phase of a training process."""

    LOADING = 1
    TRAINING = 2
    YIELDED = 3
    FINISHED = 4
    FAILED = 5


@dataclass(frozen=True)
class ProgressRecord:
    """The progress of a training process; -1 means none yet in the fields of steps."""

    pid: int
    generation: int = 0
    attempt: int = 0
    phase: ProgressPhase = ProgressPhase.LOADING
    step: int = -1
    """The number of completed optimizer steps."""
    resume_step: int = -1
    """The step from which this process resumed; 0 for a fresh start."""
    tokens: int = 0
    samples: int = 0
    memory_step: int = -1
    durable_step: int = -1
    total_steps: int = 0
    """The number of steps of the whole run; 0 until known."""
    stop_checks: int = 0
    """The number of calls of `should_stop`; all ranks call it after each step."""
    updated: float = 0.0
    """Unix seconds when the newest step ended; 0 before the first."""
    step_seconds: float = 0.0
    """The length of the newest step."""
    productive_seconds: float = 0.0
    """The time of steps in the history, over all attempts of the generation."""
    stage_progress: float = 0.0
    """The completed fraction of the stage, 0 to 1; 0 in `Train`, which counts steps."""
    stage_since: float = 0.0
    """Unix seconds when this process entered the stage; 0 in `Train`."""
    newer_generation: int = 0
    """The generation that owns the checkpoints of the run, because of which this process ended; 0 for none."""
    stage: str = TRAIN
    """The stage of the run: `Train`, or one before or after the steps."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the newest step by name; rates are those of the whole job over the newest steps."""


@dataclass(frozen=True)
class ProgressReading:
    """A reading of a record and the pulse behind it."""

    record: ProgressRecord
    pulse: PulseReading | None


_FORMATS = {"float": "d", "str": f"{_STAGE_BYTES}s", "Mapping[str, float]": f"{_FIGURES_BYTES}s"}
_PAYLOAD = struct.Struct("<" + "".join(_FORMATS.get(str(field.type), "q") for field in fields(ProgressRecord)))
_RECORD_BYTES = _HEADER.size + _PAYLOAD.size + _CHECKSUM.size
_PULSE_OFFSET = (_RECORD_BYTES + 7) // 8 * 8
_STOP_OFFSET = _PULSE_OFFSET + PULSE_BYTES
_STOP = struct.Struct("<q")  # twice the check, plus 1 if the memory remains: one value is written at once
_FILE_BYTES = _STOP_OFFSET + _STOP.size
_FIELD_NAMES = tuple(field.name for field in fields(ProgressRecord))
_field_values = attrgetter(*_FIELD_NAMES)
_NO_STOP = 0
STOP_PENDING = -1


class ProgressWriter:
    """Writes the record of this process; opening it announces generation and attempt at once."""

    def __init__(self, path: Path | None, *, generation: int = 0, attempt: int = 0) -> None:
        """Create or reuse the file; without a path the record has no reader. Raises OSError."""
        self._previous = read_progress(path) if path else None
        self._map = _map_file(path) if path else mmap.mmap(-1, _FILE_BYTES)
        self._path = path
        self._alerts: dict[str, dict[str, object]] = {}
        self._sequence = 0
        self._map[_STOP_OFFSET:] = _STOP.pack(_NO_STOP)  # remove a request to an earlier attempt
        self.pulse = Pulse(memoryview(self._map)[_PULSE_OFFSET:_STOP_OFFSET])
        self.record = ProgressRecord(pid=os.getpid(), generation=generation, attempt=attempt)
        self._write()

    @property
    def continues(self) -> bool:
        """Whether an earlier attempt of the same generation wrote the record."""
        return self._previous is not None and self._previous.generation == self.record.generation

    def record_resume(self, step: int, *, tokens: int, samples: int) -> None:
        """Record that training starts after `step`; earlier time counts if its steps are in the history."""
        productive = 0.0
        previous = self._previous
        if previous is not None and self.continues:
            lost = max(0, previous.step - step)
            productive = max(0.0, previous.productive_seconds - lost * previous.step_seconds)
        self.publish(
            phase=ProgressPhase.TRAINING,
            step=step,
            resume_step=step,
            tokens=tokens,
            samples=samples,
            productive_seconds=productive,
        )
        self.pulse.begin_steps()

    def complete_step(self, figures: Mapping[str, object], *, seconds: float) -> None:
        """Record a completed step that took `seconds`; `figures`: see `publish`."""
        self.publish(
            **figures,
            updated=time.time(),
            step_seconds=seconds,
            productive_seconds=self.record.productive_seconds + seconds,
            stage=TRAIN,
            stage_progress=0.0,
            stage_since=0.0,
        )
        self.pulse.complete_step(seconds)

    def write_notice(self, sentence: str) -> None:
        """Write a message for the user next to the record, in place of the last one."""
        if self._path is not None:
            _write_user_file(notice_path(self._path), sentence)

    def write_alert(self, kind: str, step: int, sentence: str) -> None:
        """Write an alert next to the record, in place of the last one of its kind."""
        if self._path is not None:
            self._alerts[kind] = {"step": step, "message": sentence}
            _write_user_file(alerts_path(self._path), json.dumps(self._alerts))

    def enter_stage(self, stage: str, done: float = 0.0) -> None:
        """Record the stage of the run and its completed fraction (0 to 1), and send a heartbeat.

        Call it often after the last step: a process without a heartbeat for longer than a save may take counts as hung.
        A step returns the run to `Train`.
        """
        self.record_stage(stage, done)
        if stage == TRAIN:
            self.pulse.enter(Activity.STEP, Waiting.NO)
        else:
            self.pulse.enter(Activity.SAVE, Waiting.MAYBE)

    def record_stage(self, stage: str, done: float = 0.0) -> None:
        """Record the stage without a heartbeat."""
        record = self.record
        self.publish(
            stage=stage,
            stage_progress=0.0 if stage == TRAIN or not done > 0 else min(done, 1.0),
            stage_since=0.0 if stage == TRAIN else record.stage_since if record.stage == stage else time.time(),
        )

    def publish(self, **changes: Any) -> None:
        """Change fields of the record, and figures, which are all other names, atomically. None removes a figure."""
        if measured := {name: changes.pop(name) for name in changes.keys() - _FIELD_NAMES}:
            merged = {**self.record.figures, **measured}
            changes["figures"] = figures = {name: value for name, value in merged.items() if value is not None}
            if (size := len(json.dumps(figures))) > _FIGURES_BYTES:
                raise ValueError(f"{len(figures)} figures need {size} of {_FIGURES_BYTES} bytes: report fewer")
        previous, self.record = self.record, replace(self.record, **changes)
        if self.record != previous:
            self._write()

    def check_stop(self) -> int:
        """Count a check whether to stop, then return the agent's answer (see `stop_at`)."""
        self.publish(stop_checks=self.record.stop_checks + 1)
        return self.read_stop_answer()

    def read_stop_answer(self) -> int:
        """Return the number of the check after which all ranks stop; 0 for none, -1 while the agents choose it."""
        return self._read_stop() >> 1

    def read_memory_remains(self) -> bool:
        """Return whether the memory of all nodes remains after the stop that the agents have chosen."""
        return bool(self._read_stop() & 1)

    def _read_stop(self) -> int:
        return int(_STOP.unpack_from(self._map, _STOP_OFFSET)[0])

    def close(self) -> None:
        """Unmap the file, which stays for its readers."""
        self.pulse.close()
        self._map.close()

    def _write(self) -> None:
        *numbers, stage, figures = _field_values(self.record)
        payload = _PAYLOAD.pack(*numbers, stage.encode()[:_STAGE_BYTES], json.dumps(figures).encode())
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, self._sequence + 1)
        self._map[_HEADER.size : _RECORD_BYTES] = payload + _CHECKSUM.pack(zlib.crc32(payload))
        self._sequence += 2
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, self._sequence)


def request_stop(path: Path) -> None:
    """Make the process wait at its next `should_stop` until `stop_at` answers it. Called by the agent."""
    _write_stop(path, STOP_PENDING)


def stop_at(path: Path, check: int, *, memory_remains: bool = False) -> None:
    """Make the process stop at this call of `should_stop`. Called by the agent.

    memory_remains: all nodes keep what is in their memory, so that the step need not be saved to storage.

    All ranks stop at the same call if its number is above the `stop_checks` of every rank, read after `request_stop` to
    each.
    """
    _write_stop(path, 2 * check + memory_remains)


def release_stop(path: Path) -> None:
    """Release a process that waits for an answer. Called by the agent."""
    _write_stop(path, _NO_STOP)


def _write_stop(path: Path, value: int) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(_STOP_OFFSET)
        file.write(_STOP.pack(value))


def _write_user_file(path: Path, text: str) -> None:
    """Write a file for the user; ignore errors, so that a full file system does not stop training."""
    with contextlib.suppress(OSError):
        replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically through a draft; one thread writes each file."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


def notice_path(path: Path) -> Path:
    """Return the path of the user notice beside a progress record."""
    return path.with_name(f"{path.name}.notice")


def alerts_path(path: Path) -> Path:
    """Return the path of the alerts of a record: a JSON object, kind -> step and message."""
    return path.with_name(f"{path.name}.alerts")


def profile_request_path(path: Path) -> Path:
    """Return the path of the request for a trace, which `PROFILE_SIGNAL` announces."""
    return path.with_name(f"{path.name}.profile")


def read_notice(path: Path) -> str:
    """Return the newest message of the record at `path`; empty for none."""
    try:
        return notice_path(path).read_text()
    except FileNotFoundError:
        return ""


def read_alerts(path: Path) -> dict[str, dict[str, Any]]:
    """Return the alerts of the record at `path`: kind -> step and message."""
    try:
        alerts: dict[str, dict[str, Any]] = json.loads(alerts_path(path).read_text())
    except FileNotFoundError:
        return {}
    return alerts


def _map_file(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, _FILE_BYTES)
        return mmap.mmap(descriptor, _FILE_BYTES)
    finally:
        os.close(descriptor)


def read_progress(path: Path) -> ProgressRecord | None:
    """Return the newest complete record; None if there is none, it has another layout, or it keeps changing."""
    reading = read_with_pulse(path)
    return None if reading is None else reading.record


def read_with_pulse(path: Path) -> ProgressReading | None:
    """Return the newest complete record and the pulse behind it; None as for `read_progress`."""
    for _ in range(_READ_ATTEMPTS):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != _FILE_BYTES:
            return None
        magic, version, sequence = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            return None
        payload = data[_HEADER.size : _RECORD_BYTES - _CHECKSUM.size]
        checksum = _CHECKSUM.unpack_from(data, _RECORD_BYTES - _CHECKSUM.size)[0]
        if sequence % 2 == 0 and checksum == zlib.crc32(payload):
            record = _unpack(payload)
            return None if record is None else ProgressReading(record, unpack_pulse(data[_PULSE_OFFSET:_STOP_OFFSET]))
        time.sleep(0.0005)
    return None


def _unpack(payload: bytes) -> ProgressRecord | None:
    values = dict(zip(_FIELD_NAMES, _PAYLOAD.unpack(payload)))
    try:
        values["phase"] = ProgressPhase(values["phase"])
        values["stage"] = values["stage"].rstrip(b"\0").decode()
        figures = json.loads(values["figures"].rstrip(b"\0"))
        values["figures"] = {name: float(value) for name, value in figures.items()}
    except (AttributeError, TypeError, ValueError, RecursionError):
        return None
    return ProgressRecord(**values)
