"""Report the progress of a training program to the agent of its pod; without an agent each call does nothing.

    import trainium_worker

    for step in range(first, last + 1):
        loss = train(step)
        trainium_worker.step(step, loss=loss, tokens=batch_tokens)
        if trainium_worker.should_stop():
            save(step)
            trainium_worker.saved(step, path)
            sys.exit(trainium_worker.STOPPED)

A record in shared memory has the newest step, its loss and the checkpoints; the pulse behind it has the heartbeats and
the lengths of steps. The trainer of this project writes the same record, and the agent reads both in the same way.

Guarantees:
- One writer, any number of readers, no system call per write.
- A reader gets a complete record or None: a sequence count is odd during a write, and there is a checksum.
- The layout is fixed and versioned, so the two sides may be different builds: a reader of another layout gets None.
- The module needs only Python 3.9.
- All ranks get True from `should_stop` after the same step: the agents choose it once each rank waits or has passed.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import sys
import threading
import time
import zlib
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from operator import attrgetter, index
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import SupportsFloat, SupportsIndex

__all__ = ["MEMORY", "STOPPED", "generation", "notice", "rank", "saved", "should_stop", "stage", "step"]

rank: int
"""The rank of this process, from 0."""
generation: int
"""The generation of the job's membership of this process; 0 without an agent."""

ENV_PROGRESS_FILE = "TRAINIUM_PROGRESS_FILE"
"""The path of the record; the agent sets it for each process."""
ENV_GENERATION = "TRAINIUM_GENERATION"
ENV_ATTEMPT = "TRAINIUM_ATTEMPT"
MEMORY = "memory"
"""`where` of `saved` for a snapshot in the memory of the nodes."""
STOPPED = 75
"""The exit code of a program that saved and exited because of `should_stop`: it is not complete."""
TRAIN = "Train"
"""The stage of the training steps."""

# ---- the pulse ------------------------------------------------------------------------------------------------------

RING = 128
_WORDS = 2  # the word, and the number of steps written to the ring
_NUMBERS = 1 + 2 * RING  # length of the first step, then pairs of length and time without waits
PULSE_BYTES = 8 * (_WORDS + _NUMBERS)
_PULSE = struct.Struct(f"<{_WORDS}Q{_NUMBERS}d")
_COUNT_SHIFT = 16
_ACTIVITY_SHIFT = 8


class Activity(IntEnum):
    """The activity of a training process; each has its limits for a hang."""

    INIT = 1
    """Opening data, connecting to the other ranks, building the model."""
    LOAD = 2
    COMPILE = 3
    """The first step after a start."""
    STEP = 4
    SAVE = 5
    """A wait of the loop for storage or the memory tier, and the stages after the last step."""


class Waiting(IntEnum):
    """The state of a process's wait for its peers."""

    NO = 0
    YES = 1
    MAYBE = 2
    """The work contains collectives, so only the stack shows whether the process waits."""


@dataclass(frozen=True)
class PulseReading:
    """A reading of a pulse."""

    beats: int
    activity: Activity
    waiting: Waiting
    first_step_seconds: float
    """The length of the first step of this start; 0 until it has ended."""
    steps: tuple[tuple[float, float], ...]
    """Length and time without waits for peers of the newest steps in seconds, newest last."""


class Pulse:
    """The heartbeats of one thread of a process; `Pulse()` without memory has no reader.

    One 64-bit word holds a count that grows with every heartbeat, the activity, and whether the process waits for its
    peers; a ring next to it holds the lengths of the newest steps.

    Guarantees:
    - A heartbeat is one store into mapped memory, no system call.
    - The word is written and read atomically.
    - The first step, which compiles, is not in the ring.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        """Attach to `PULSE_BYTES` of memory; the ring in it is kept, because it reports steps of the same job."""
        mapped = memory if memory is not None else memoryview(bytearray(PULSE_BYTES))
        self._memory = mapped
        self._words = mapped[: 8 * _WORDS].cast("Q")
        self._numbers = mapped[8 * _WORDS :].cast("d")
        self._beats = 0
        self._activity = int(Activity.INIT)
        self._waiting = int(Waiting.NO)
        self._waited = 0.0
        self._first = True
        self._numbers[0] = 0.0
        self.peers = _WaitContext(self, Waiting.YES)
        """A context for a wait for the other ranks."""
        self.work_with_collectives = _WaitContext(self, Waiting.MAYBE)
        """A context for work that contains collectives."""
        self.work = _WaitContext(self, Waiting.NO)
        """A context for local work: a heartbeat at its start and at its end."""
        self.saving = _ActivityContext(self, Activity.SAVE)
        """A context for a wait for storage."""
        self.measuring = _ValidationContext(self)
        """A context for a validation between two steps, which is part of neither; the first one compiles."""
        self.beat()

    def beat(self) -> None:
        """Record a heartbeat."""
        self._beats += 1
        self._words[0] = self._beats << _COUNT_SHIFT | self._activity << _ACTIVITY_SHIFT | self._waiting

    def enter(self, activity: Activity, waiting: Waiting | None = None) -> None:
        """Record another activity."""
        self._activity = int(activity)
        self._waiting = self._waiting if waiting is None else int(waiting)
        self.beat()

    def stage(self, *, trains: bool) -> None:
        """Record progress of a stage after the last step, with collectives; or of steps (`trains`)."""
        if trains:
            self.enter(Activity.STEP, Waiting.NO)
        else:
            self.enter(Activity.SAVE, Waiting.MAYBE)

    def begin_steps(self) -> None:
        """Record that the loop starts; its first step compiles."""
        self._first = True
        self._waited = 0.0
        self.enter(Activity.COMPILE)

    def step_done(self, seconds: float) -> None:
        """Record a completed step of `seconds`."""
        if self._first:
            self._first = False
            self._numbers[0] = seconds
        else:
            step_count = self._words[1]
            index = 1 + 2 * (step_count % RING)
            self._numbers[index] = seconds
            self._numbers[index + 1] = max(0.0, seconds - self._waited)
            self._words[1] = step_count + 1
        self._waited = 0.0
        self.enter(Activity.STEP, Waiting.NO)

    def read(self) -> PulseReading | None:
        """Return the current reading, in any thread of this process; None after `close`."""
        try:
            return unpack_pulse(self._memory.tobytes())
        except ValueError:  # released
            return None

    def close(self) -> None:
        """Release the memory."""
        for view in (self._words, self._numbers, self._memory):
            view.release()


class _WaitContext:
    """A context in which the process waits, may wait or does not wait for its peers; it sums definite waits."""

    __slots__ = ("_began", "_kind", "_pulse")

    def __init__(self, pulse: Pulse, kind: Waiting) -> None:
        self._pulse = pulse
        self._kind = int(kind)
        self._began = 0.0

    def __enter__(self) -> None:
        pulse = self._pulse
        self._began = time.perf_counter()
        pulse._waiting = self._kind  # noqa: SLF001 - two halves of one thing
        pulse.beat()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pulse = self._pulse
        if self._kind == Waiting.YES:
            pulse._waited += time.perf_counter() - self._began  # noqa: SLF001 - two halves of one thing
        pulse._waiting = 0  # noqa: SLF001 - two halves of one thing
        pulse.beat()


class _ActivityContext:
    """A context with another activity."""

    __slots__ = ("_activity", "_before", "_pulse")

    def __init__(self, pulse: Pulse, activity: Activity) -> None:
        self._pulse = pulse
        self._activity = activity
        self._before = Activity.INIT

    def __enter__(self) -> None:
        self._before = Activity(self._pulse._activity)  # noqa: SLF001 - two halves of one thing
        self._pulse.enter(self._activity)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pulse.enter(self._before)


class _ValidationContext:
    """A context for work between two steps: its waits do not count as waits of steps."""

    __slots__ = ("_before", "_first", "_pulse", "_waited")

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._first = True
        self._before = Activity.STEP
        self._waited = 0.0

    def __enter__(self) -> None:
        pulse = self._pulse
        self._before, self._waited = Activity(pulse._activity), pulse._waited  # noqa: SLF001 - two halves of one thing
        pulse.enter(Activity.COMPILE if self._first else self._before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._first = False
        self._pulse._waited = self._waited  # noqa: SLF001 - two halves of one thing
        self._pulse.enter(self._before)


def unpack_pulse(data: bytes) -> PulseReading | None:
    """Parse a reading from `PULSE_BYTES` of memory; None if there is none."""
    word, step_count, first, *ring = _PULSE.unpack(data)
    try:
        activity = Activity(word >> _ACTIVITY_SHIFT & 0xFF)
        waiting = Waiting(word & 0xFF)
    except ValueError:
        return None
    ring_count = min(step_count, RING)
    places = ((step_count - ring_count + number) % RING for number in range(ring_count))
    steps = ((ring[2 * place], ring[2 * place + 1]) for place in places)
    return PulseReading(
        beats=word >> _COUNT_SHIFT,
        activity=activity,
        waiting=waiting,
        first_step_seconds=first if math.isfinite(first) and first > 0 else 0.0,
        steps=tuple(pair for pair in steps if math.isfinite(sum(pair)) and min(pair) >= 0),
    )


# ---- the record -----------------------------------------------------------------------------------------------------

_MAGIC = 0x544E5250
_VERSION = 7
_HEADER = struct.Struct("<IIQ")  # magic, version, sequence
_CHECKSUM = struct.Struct("<I")
_READ_ATTEMPTS = 5
_STAGE_BYTES = 32


class ProgressPhase(IntEnum):
    """The phase of a training process."""

    LOADING = 1
    TRAINING = 2
    YIELDED = 3
    FINISHED = 4
    FAILED = 5


@dataclass(frozen=True)
class ProgressRecord:
    """The progress of a training process; -1 means none yet in the fields of steps, NaN in the measured ones."""

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
    spikes: int = 0
    """The number of spikes of the gradient norm in the whole run."""
    total_steps: int = 0
    """The number of steps of the whole run; 0 until known."""
    stop_checks: int = 0
    """The number of calls of `should_stop`; all ranks call it after each step."""
    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float = math.nan
    tokens_per_second: float = math.nan
    """The rate of the whole job over the newest steps."""
    samples_per_second: float = math.nan
    """The rate of the whole job over the newest steps."""
    updated: float = 0.0
    """Unix seconds when the newest step ended; 0 before the first."""
    monotonic: float = 0.0
    """The same by the machine's monotonic clock."""
    step_seconds: float = 0.0
    """The length of the newest step."""
    productive_seconds: float = 0.0
    """The time of steps in the history, over all attempts of the generation."""
    validation_loss: float = math.nan
    """The newest one."""
    parameter_norm: float = math.nan
    """The newest one."""
    utilisation: float = math.nan
    """Model FLOPs utilisation (MFU), 0 to 1; NaN where the device's peak is not known."""
    goodput: float = math.nan
    """The fraction of the time since the first step spent in steps of the history, 0 to 1; set by rank 0."""
    stage_progress: float = 0.0
    """The completed fraction of the stage, 0 to 1; 0 in `Train`, which counts steps."""
    stage_since: float = 0.0
    """Unix seconds when this process entered the stage; 0 in `Train`."""
    reward_margin: float = math.nan
    """The mean difference of the rewards of two answers in the newest step (preference tuning)."""
    reward_accuracy: float = math.nan
    """The fraction of pairs of the newest step whose preferred answer has the greater reward."""
    stage: str = TRAIN
    """The stage of the run: `Train`, or one before or after the steps."""


_PAYLOAD = struct.Struct(f"<13q17d{_STAGE_BYTES}s")
_RECORD_BYTES = _HEADER.size + _PAYLOAD.size + _CHECKSUM.size
_PULSE_AT = (_RECORD_BYTES + 7) // 8 * 8
_STOP_AT = _PULSE_AT + PULSE_BYTES
_STOP = struct.Struct("<q")
_SIZE = _STOP_AT + _STOP.size
_NAMES = tuple(field.name for field in fields(ProgressRecord))
_values = attrgetter(*_NAMES)
_NO_STOP = 0
_STOP_PENDING = -1


class ProgressWriter:
    """Writes the record of this process; opening it announces generation and attempt at once."""

    def __init__(self, path: Path | None, *, generation: int = 0, attempt: int = 0) -> None:
        """Create or reuse the file; without a path the record has no reader. Raises OSError."""
        self._previous = read_progress(path) if path else None
        self._map = _map(path) if path else mmap.mmap(-1, _SIZE)
        self._path = path
        self._sent_alerts: dict[str, dict[str, object]] = {}
        self._sequence = 0
        self._map[_STOP_AT:] = _STOP.pack(_NO_STOP)  # remove a request to an earlier attempt
        self.pulse = Pulse(memoryview(self._map)[_PULSE_AT:_STOP_AT])
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
        """Record a completed step that took `seconds`; `figures` are fields of the record."""
        self.publish(
            **figures,
            updated=time.time(),
            monotonic=time.monotonic(),
            step_seconds=seconds,
            productive_seconds=self.record.productive_seconds + seconds,
            stage=TRAIN,
            stage_progress=0.0,
            stage_since=0.0,
        )
        self.pulse.step_done(seconds)

    def record_checkpoints(self, *, memory_step: int, durable_step: int) -> None:
        """Record the newest checkpoints."""
        if (memory_step, durable_step) != (self.record.memory_step, self.record.durable_step):
            self.publish(memory_step=memory_step, durable_step=durable_step)

    def write_notice(self, sentence: str) -> None:
        """Write a message for the user next to the record, in place of the last one."""
        if self._path is not None:
            _write_user_file(notice_path(self._path), sentence)

    def write_alert(self, kind: str, step: int, sentence: str) -> None:
        """Write an alert next to the record, in place of the last one of its kind."""
        if self._path is not None:
            self._sent_alerts[kind] = {"step": step, "message": sentence}
            _write_user_file(alerts_path(self._path), json.dumps(self._sent_alerts))

    def set_total_steps(self, steps: int) -> None:
        """Record the number of steps of the whole run, once it is known."""
        if steps != self.record.total_steps:
            self.publish(total_steps=steps)

    def set_stage(self, stage: str, done: float = 0.0) -> None:
        """Record the stage of the run and its completed fraction (0 to 1), with a heartbeat.

        Call it often after the last step: a process without a heartbeat for longer than a save may take counts as hung.
        A step returns the run to `Train`.
        """
        self.enter_stage(stage, done)
        self.pulse.stage(trains=stage == TRAIN)

    def enter_stage(self, stage: str, done: float = 0.0) -> None:
        """Record the stage as `set_stage` does, without an activity."""
        record, trains = self.record, stage == TRAIN
        self.publish(
            stage=stage,
            stage_progress=0.0 if trains or not done > 0 else min(done, 1.0),
            stage_since=0.0 if trains else record.stage_since if record.stage == stage else time.time(),
        )

    def set_phase(self, phase: ProgressPhase) -> None:
        """Record the phase of the process."""
        self.publish(phase=phase)

    def publish(self, **changes: Any) -> None:
        """Change fields of the record atomically."""
        self.record = replace(self.record, **changes)
        self._write()

    def check_stop(self) -> int:
        """Count a check whether to stop, then return the agent's answer (see `stop_at`)."""
        self.publish(stop_checks=self.record.stop_checks + 1)
        return self.stop_answer()

    def stop_answer(self) -> int:
        """Return the number of the check after which all ranks stop; 0 for none, -1 while the agents choose it."""
        return int(_STOP.unpack_from(self._map, _STOP_AT)[0])

    def close(self) -> None:
        """Unmap the file, which stays for its readers."""
        self.pulse.close()
        self._map.close()

    def _write(self) -> None:
        *numbers, stage = _values(self.record)
        payload = _PAYLOAD.pack(*numbers, stage.encode()[:_STAGE_BYTES])
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, self._sequence + 1)
        self._map[_HEADER.size : _RECORD_BYTES] = payload + _CHECKSUM.pack(zlib.crc32(payload))
        self._sequence += 2
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, self._sequence)


def request_stop(path: Path) -> None:
    """Make the process wait at its next `should_stop` until `stop_at` answers it. Called by the agent."""
    _write_stop(path, _STOP_PENDING)


def stop_at(path: Path, check: int) -> None:
    """Make the process stop at this call of `should_stop`. Called by the agent.

    All ranks stop at the same call if its number is above the `stop_checks` of every rank, read after `request_stop` to
    each.
    """
    _write_stop(path, check)


def release_stop(path: Path) -> None:
    """Release a process that waits for an answer. Called by the agent."""
    _write_stop(path, _NO_STOP)


def _write_stop(path: Path, value: int) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(_STOP_AT)
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
    """Return the path of the message of a record."""
    return path.with_name(f"{path.name}.notice")


def alerts_path(path: Path) -> Path:
    """Return the path of the alerts of a record: a JSON object, kind -> step and message."""
    return path.with_name(f"{path.name}.alerts")


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


def _map(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(descriptor, _SIZE)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def read_progress(path: Path) -> ProgressRecord | None:
    """Return the newest complete record; None if there is none, it has another layout, or it keeps changing."""
    progress = read_with_pulse(path)
    return None if progress is None else progress[0]


def read_with_pulse(path: Path) -> tuple[ProgressRecord, PulseReading | None] | None:
    """Return the newest complete record and the pulse behind it; None as for `read_progress`."""
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
        payload = data[_HEADER.size : _RECORD_BYTES - _CHECKSUM.size]
        checksum = _CHECKSUM.unpack_from(data, _RECORD_BYTES - _CHECKSUM.size)[0]
        if sequence % 2 == 0 and checksum == zlib.crc32(payload):
            record = _unpack(payload)
            return None if record is None else (record, unpack_pulse(data[_PULSE_AT:_STOP_AT]))
        time.sleep(0.0005)
    return None


def _unpack(payload: bytes) -> ProgressRecord | None:
    values = dict(zip(_NAMES, _PAYLOAD.unpack(payload)))
    try:
        values["phase"] = ProgressPhase(values["phase"])
        values["stage"] = values["stage"].rstrip(b"\0").decode()
    except ValueError:
        return None
    return ProgressRecord(**values)


# ---- the reports of a program ---------------------------------------------------------------------------------------

_STOP_POLL_SECONDS = 0.005
_STOP_TIMEOUT_SECONDS = 60.0
_ACTIVITIES = {
    "Load": Activity.LOAD,
    "Compile": Activity.COMPILE,
    "Save": Activity.SAVE,
    "Export": Activity.SAVE,
    "Evaluate": Activity.SAVE,
    TRAIN: Activity.STEP,
}
"""The activities of the stages whose limits for a hang differ from those of steps."""


class _Program:
    """The reports of this process, which may come from several threads."""

    def __init__(self, writer: ProgressWriter | None) -> None:
        self.pid = os.getpid()
        self._writer = writer
        self._lock = threading.Lock()
        self._since: float | None = None
        """The start of the current step, if known."""

    def step(self, number: int, figures: dict[str, float], consumed: Mapping[str, int]) -> None:
        """Record a completed step."""
        writer = self._writer
        if writer is None:
            return
        with self._lock:
            now, last = time.monotonic(), writer.record.step
            seconds = 0.0 if self._since is None else now - self._since
            if last < 0:
                writer.record_resume(number - 1, tokens=0, samples=0)
            elif number < last:
                writer.write_notice(
                    f"rank {__getattr__('rank')} reported step {number} after step {last}: report steps as a number "
                    "that rises by one with each step of the optimizer, also after a resume"
                )
            elif number == last:  # a further call for the same step
                writer.publish(**figures)
                writer.pulse.enter(Activity.STEP, Waiting.MAYBE)
                return
            self._since = now
            for name, count in consumed.items():
                figures[f"{name}_per_second"] = count / seconds if seconds > 0 else math.nan
                figures[name] = getattr(writer.record, name) + count
            writer.complete_step({"step": number, **figures}, seconds=seconds)
            writer.pulse.enter(Activity.STEP, Waiting.MAYBE)

    def saved(self, number: int, *, memory: bool) -> None:
        """Record a committed checkpoint."""
        if self._writer is not None:
            with self._lock:
                self._writer.publish(**{"memory_step" if memory else "durable_step": number})

    def stage(self, name: str, done: float) -> None:
        """Record the stage of the program."""
        writer = self._writer
        if writer is None:
            return
        with self._lock:
            self._since = time.monotonic()
            writer.enter_stage(name, done)
            writer.pulse.enter(_ACTIVITIES.get(name, Activity.STEP if writer.record.step >= 0 else Activity.INIT))

    def notice(self, sentence: str) -> None:
        """Write a message for the user."""
        if self._writer is not None:
            self._writer.write_notice(sentence)

    def should_stop(self) -> bool:
        """Return whether to save and exit; waits while the agents agree on the step."""
        writer = self._writer
        if writer is None:
            return False
        with self._lock:
            answer = writer.check_stop()
            check = writer.record.stop_checks
        if answer == _STOP_PENDING:
            with writer.pulse.peers:
                answer = self._await_answer(writer)
        return 0 < answer <= check

    @staticmethod
    def _await_answer(writer: ProgressWriter) -> int:
        deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
        answer = writer.stop_answer()
        while answer == _STOP_PENDING and time.monotonic() < deadline:
            time.sleep(_STOP_POLL_SECONDS)
            answer = writer.stop_answer()
        return answer


_program: _Program | None = None
_opening = threading.Lock()


def _opened() -> _Program:
    """Return the reports of this process: opened by the first call, again in a fork."""
    global _program  # noqa: PLW0603 - one process has one record
    with _opening:
        if _program is None or _program.pid != os.getpid():
            _program = _Program(_open_record(os.environ.get(ENV_PROGRESS_FILE)))
        return _program


def _open_record(path: str | None) -> ProgressWriter | None:
    """Return the record of this process; None without an agent, or if it cannot be written: training continues."""
    if not path:
        return None
    attempt = int(os.environ.get(ENV_ATTEMPT, "0"))
    try:
        return ProgressWriter(Path(path), generation=__getattr__("generation"), attempt=attempt)
    except OSError as error:
        sys.stderr.write(f"trainium_worker: nothing is reported to the agent: {path}: {error.strerror}\n")
        return None


def __getattr__(name: str) -> int:
    """Return the current `rank` and `generation` of the environment: a warm process is forked before it has a rank."""
    if name == "rank":
        return int(os.environ.get("RANK", "0"))
    if name == "generation":
        return int(os.environ.get(ENV_GENERATION, "0"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def step(
    number: SupportsIndex,
    *,
    loss: SupportsFloat | None = None,
    tokens: SupportsIndex | None = None,
    samples: SupportsIndex | None = None,
    learning_rate: SupportsFloat | None = None,
    grad_norm: SupportsFloat | None = None,
    total_steps: SupportsIndex | None = None,
) -> None:
    """Report that the optimizer has completed its step `number`, counted from 1 over the whole run.

    Call it on every rank after each step, and after a resume with the number that continues the run. A second call for
    a step adds to the first.

    tokens, samples: of this step, over all ranks. A loss on a device is copied, which waits for the device.
    """
    named = {"loss": loss, "learning_rate": learning_rate, "grad_norm": grad_norm}
    figures: dict[str, float] = {name: float(value) for name, value in named.items() if value is not None}
    if total_steps is not None:
        figures["total_steps"] = index(total_steps)
    counts = {"tokens": tokens, "samples": samples}
    completed, consumed = index(number), {name: index(count) for name, count in counts.items() if count is not None}
    _opened().step(completed, figures, consumed)


def saved(number: SupportsIndex, where: str | os.PathLike[str]) -> None:
    """Report that the checkpoint of a step is complete: in a folder or bucket, or in `MEMORY`."""
    _opened().saved(index(number), memory=os.fspath(where) == MEMORY)


def stage(name: str, done: float = 0.0) -> None:
    """Report the stage of the program and its completed fraction (0 to 1).

    `load`, `compile`, `save`, `export` and `evaluate` have separate limits for a hang; `train` and each step end them.
    A name has at most 32 bytes.
    """
    _opened().stage(name[:1].upper() + name[1:], done)


def notice(sentence: str) -> None:
    """Show a message in the status of the job, in place of the last one."""
    _opened().notice(sentence)


def should_stop() -> bool:
    """Return whether to save and leave now, with exit code `STOPPED`.

    Call it on every rank, once after each step: it is True on all ranks after the same step, without a collective.
    """
    return _opened().should_stop()
