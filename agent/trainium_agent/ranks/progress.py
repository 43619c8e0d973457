"""Publish the progress of a training process to its agent, in shared memory.

The process's pulse (`monitor.pulse`) lies behind the record in the same file.

Guarantees:
- One writer, any number of readers, no system call per write.
- A reader gets a whole record or None (a sequence count that is odd while a write is under way, and a checksum).
- The layout is fixed and versioned, so the two sides may be different builds: a reader of another layout sees none.
- Importing this module imports nothing heavy. What is longer than a number lies in files beside the record: the notice,
  the alerts, the results.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from trainium_agent.ranks.pulse import PULSE_BYTES, Pulse, PulseReading, unpack_pulse
from trainium_contract.status.results import RunResults, RunStage

if TYPE_CHECKING:
    from pathlib import Path

    from trainium_contract.status.results import ArtifactReport, EvaluationFigure
    from trainium_trainer.monitor.figures import StepFigures

_MAGIC = 0x544E5250
_VERSION = 5
_HEADER = struct.Struct("<IIQ")  # magic, version, sequence
_CHECKSUM = struct.Struct("<I")
_READ_ATTEMPTS = 5
_STAGES = tuple(RunStage)


class ProgressPhase(IntEnum):
    """Phase of a training process."""

    LOADING = 1
    TRAINING = 2
    YIELDED = 3
    FINISHED = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class ProgressRecord:
    """Progress of one training process; -1 stands for "none yet" in the step fields, NaN in the measured ones."""

    pid: int
    generation: int = 0
    attempt: int = 0
    phase: ProgressPhase = ProgressPhase.LOADING
    step: int = -1
    """Optimizer steps completed."""
    resume_step: int = -1
    """Step that this process resumed from; 0 for a fresh start."""
    tokens: int = 0
    samples: int = 0
    memory_step: int = -1
    durable_step: int = -1
    spikes: int = 0
    """Spikes of the gradient norm in the whole run."""
    total_steps: int = 0
    """Steps of the whole run; 0 until they are known."""
    stage_number: int = 0
    """Place of the stage in `RunStage`."""
    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float = math.nan
    tokens_per_second: float = math.nan
    """Over the whole job, newest steps."""
    updated: float = 0.0
    """Unix seconds when the newest step ended; 0 before the first."""
    monotonic: float = 0.0
    """The same by the machine's monotonic clock."""
    step_seconds: float = 0.0
    """Length of the newest step."""
    productive_seconds: float = 0.0
    """Time in steps that are in the history, over all attempts of the generation."""
    validation_loss: float = math.nan
    """The newest one."""
    parameter_norm: float = math.nan
    """The newest one."""
    utilisation: float = math.nan
    """Model FLOPs utilisation (MFU), 0 to 1; NaN where the device's peak is not known."""
    goodput: float = math.nan
    """Share of the time since the first step that went into steps of the history, 0 to 1; known to rank 0."""
    stage_progress: float = 0.0
    """Share of the stage that is over, 0 to 1; 0 in `Train`, which counts steps."""
    stage_since: float = 0.0
    """Unix seconds when this process came into the stage; 0 in `Train`."""
    reward_margin: float = math.nan
    """Of preference tuning: mean difference of the rewards of two answers, of the newest step, as `reward_accuracy`."""
    reward_accuracy: float = math.nan
    """Share of pairs whose preferred answer has the greater reward."""

    @property
    def stage(self) -> RunStage:
        """Record the stage of the run: steps, or what follows the last one."""
        return _STAGES[self.stage_number]


_PAYLOAD = struct.Struct("<13q16d")
_RECORD = _HEADER.size + _PAYLOAD.size + _CHECKSUM.size
_PULSE_AT = (_RECORD + 7) // 8 * 8
_SIZE = _PULSE_AT + PULSE_BYTES
_values = attrgetter(*(field.name for field in fields(ProgressRecord)))


class ProgressWriter:
    """Writes the record of this process; opening it announces generation and attempt at once."""

    def __init__(self, path: Path | None, *, generation: int = 0, attempt: int = 0) -> None:
        """Create or take over the file; without a path nobody can read the record. Raises OSError."""
        self._previous = read_progress(path) if path else None
        self._map = _map(path) if path else mmap.mmap(-1, _SIZE)
        self._notice = notice_path(path) if path else None
        self._alerts = alerts_path(path) if path else None
        self._results = results_path(path) if path else None
        self._sent_alerts: dict[str, dict[str, object]] = {}
        self._found = RunResults()
        if path and self._previous is not None and self._previous.generation == generation:
            self._found = read_results(path)
        self._sequence = 0
        self.pulse = Pulse(memoryview(self._map)[_PULSE_AT:])
        self.record = ProgressRecord(pid=os.getpid(), generation=generation, attempt=attempt)
        self._write()

    def resumed(self, step: int, *, tokens: int, samples: int) -> None:
        """Training starts after `step`; time of an earlier attempt counts as far as its steps are in the history."""
        productive = 0.0
        before = self._previous
        if before is not None and before.generation == self.record.generation:
            lost = max(0, before.step - step)
            productive = max(0.0, before.productive_seconds - lost * before.step_seconds)
        self.record = replace(
            self.record,
            phase=ProgressPhase.TRAINING,
            step=step,
            resume_step=step,
            tokens=tokens,
            samples=samples,
            productive_seconds=productive,
        )
        self._write()
        self.pulse.begin_steps()

    def step_done(self, figures: StepFigures, *, seconds: float) -> None:
        """Record a completed step that took `seconds`."""
        record = self.record
        self.record = replace(
            record,
            step=figures.step,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            learning_rate=figures.learning_rate,
            tokens=figures.tokens,
            samples=figures.samples,
            spikes=figures.stability.spikes,
            tokens_per_second=_or_nan(figures.tokens_per_second),
            updated=time.time(),
            monotonic=time.monotonic(),
            step_seconds=seconds,
            productive_seconds=record.productive_seconds + seconds,
            stage_number=RunStage.TRAIN.number,
            stage_progress=0.0,
            stage_since=0.0,
            validation_loss=_or_nan(figures.validation_loss, record.validation_loss),
            parameter_norm=_or_nan(figures.parameter_norm, record.parameter_norm),
            utilisation=_or_nan(figures.utilisation),
            goodput=_or_nan(figures.goodput),
            reward_margin=math.nan if figures.rewards is None else figures.rewards.margin,
            reward_accuracy=math.nan if figures.rewards is None else figures.rewards.accuracy,
        )
        self._write()
        self.pulse.step_done(seconds)

    def checkpoints(self, *, memory_step: int, durable_step: int) -> None:
        """Record the newest checkpoints."""
        if (memory_step, durable_step) != (self.record.memory_step, self.record.durable_step):
            self.record = replace(self.record, memory_step=memory_step, durable_step=durable_step)
            self._write()

    def notice(self, sentence: str) -> None:
        """Leave a sentence for a person beside the record; the newest counts."""
        if self._notice is not None:
            _leave(self._notice, sentence)

    def alert(self, kind: str, step: int, sentence: str) -> None:
        """Leave an alert beside the record; of each kind the newest counts."""
        if self._alerts is not None:
            self._sent_alerts[kind] = {"step": step, "message": sentence}
            _leave(self._alerts, json.dumps(self._sent_alerts))

    def total_steps(self, steps: int) -> None:
        """Record how many steps the whole run has, once that is known."""
        if steps != self.record.total_steps:
            self.record = replace(self.record, total_steps=steps)
            self._write()

    def stage(self, stage: RunStage, done: float = 0.0) -> None:
        """Record the stage that the run is in, and the share of it that is over (0 to 1); a sign of life too.

        To be called often in `Export` and `Evaluate`: a process that gives no sign for as long as a save may take is
        called hung. A step returns the run to `Train` by itself.
        """
        record = self.record
        trains = stage is RunStage.TRAIN
        self.record = replace(
            record,
            stage_number=stage.number,
            stage_progress=0.0 if trains or not done > 0 else min(done, 1.0),
            stage_since=0.0 if trains else record.stage_since if record.stage is stage else time.time(),
        )
        self._write()
        self.pulse.stage(trains=trains)

    def artifact(self, report: ArtifactReport) -> None:
        """Record a complete artifact beside the progress record. Raises OSError."""
        self._leave(self._found.with_artifact(report))

    def evaluation(self, figures: tuple[EvaluationFigure, ...]) -> None:
        """Leave the figures of an evaluation beside the record. Raises OSError."""
        self._leave(self._found.with_evaluation(figures))

    def phase(self, phase: ProgressPhase) -> None:
        """Record what the process does now."""
        self.record = replace(self.record, phase=phase)
        self._write()

    def close(self) -> None:
        """Unmap; the file stays for its readers."""
        self.pulse.close()
        self._map.close()

    def publish(self, **values: Any) -> None:
        """Record these fields."""
        self.record = replace(self.record, **values)
        self._write()

    def _leave(self, results: RunResults) -> None:
        self._found = results
        if self._results is not None:
            _replace(self._results, json.dumps(results.to_wire()))

    def _write(self) -> None:
        payload = _PAYLOAD.pack(*_values(self.record))
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, self._sequence + 1)
        self._map[_HEADER.size : _RECORD] = payload + _CHECKSUM.pack(zlib.crc32(payload))
        self._sequence += 2
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, self._sequence)


def _leave(path: Path, text: str) -> None:
    """Replace a file for people; where there is no room for it, training goes on without."""
    with contextlib.suppress(OSError):
        _replace(path, text)


def _replace(path: Path, text: str) -> None:
    """Write by a separate draft: artifacts are reported from another thread than notices and alerts."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


def notice_path(path: Path) -> Path:
    """Where the sentence belonging to a record is."""
    return path.with_name(f"{path.name}.notice")


def alerts_path(path: Path) -> Path:
    """Where the alerts belonging to a record are: a JSON object, kind -> step and message."""
    return path.with_name(f"{path.name}.alerts")


def read_notice(path: Path) -> str:
    """Return the newest sentence beside the record at `path`; empty for none."""
    try:
        return notice_path(path).read_text()
    except FileNotFoundError:
        return ""


def read_alerts(path: Path) -> dict[str, dict[str, Any]]:
    """Return the alerts beside the record at `path`: kind -> step and message."""
    try:
        alerts: dict[str, dict[str, Any]] = json.loads(alerts_path(path).read_text())
    except FileNotFoundError:
        return {}
    return alerts


def results_path(path: Path) -> Path:
    """Where artifacts and evaluation belonging to a record are: a `RunResults` in JSON."""
    return path.with_name(f"{path.name}.results")


def read_results(path: Path) -> RunResults:
    """Read the results beside the record at `path`; empty where they cannot be read."""
    try:
        return RunResults.model_validate_json(results_path(path).read_bytes())
    except (OSError, ValueError):
        return RunResults()


def _or_nan(value: float | None, otherwise: float = math.nan) -> float:
    return otherwise if value is None else value


def _map(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, _SIZE)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def read_progress(path: Path) -> ProgressRecord | None:
    """Return the newest whole record; None when there is none, it has another layout, or it keeps changing."""
    found = read_with_pulse(path)
    return None if found is None else found[0]


def read_with_pulse(path: Path) -> tuple[ProgressRecord, PulseReading | None] | None:
    """Return the newest whole record and the pulse behind it; None as for `read_progress`."""
    for _ in range(_READ_ATTEMPTS):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != _SIZE:
            return None
        magic, version, sequence = _HEADER.unpack_from(data)
        if (magic, version) != (_MAGIC, _VERSION):
            return None
        payload = data[_HEADER.size : _RECORD - _CHECKSUM.size]
        if sequence % 2 == 0 and _CHECKSUM.unpack_from(data, _RECORD - _CHECKSUM.size)[0] == zlib.crc32(payload):
            record = _unpack(payload)
            return None if record is None else (record, unpack_pulse(data[_PULSE_AT:]))
        time.sleep(0.0005)
    return None


def _unpack(payload: bytes) -> ProgressRecord | None:
    values = dict(zip((field.name for field in fields(ProgressRecord)), _PAYLOAD.unpack(payload), strict=True))
    try:
        values["phase"] = ProgressPhase(values["phase"])
    except ValueError:
        return None
    return ProgressRecord(**values) if 0 <= values["stage_number"] < len(_STAGES) else None
