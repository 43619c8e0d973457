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
the lengths of steps. The trainer of this project writes the same record, and the agent reads both alike.

Guarantees:
- One writer, any number of readers, no system call per write.
- A reader gets a whole record or None: a sequence count is odd while a write is under way, and there is a checksum.
- The layout is fixed and versioned, so the two sides may be different builds: a reader of another layout sees none.
- The module needs Python 3.9 and nothing else.
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
"""Rank of this process, from 0."""
generation: int
"""Generation of the job's membership that this process belongs to; 0 without an agent."""

ENV_PROGRESS_FILE = "TRAINIUM_PROGRESS_FILE"
"""Path of the record; the agent sets it for each process."""
ENV_GENERATION = "TRAINIUM_GENERATION"
ENV_ATTEMPT = "TRAINIUM_ATTEMPT"
MEMORY = "memory"
"""`where` of `saved` for a snapshot in the memory of the nodes."""
STOPPED = 75
"""Exit code of a program that has saved and left because of `should_stop`: it is not complete."""
TRAIN = "Train"
"""The stage in which steps are made."""

# ---- the pulse -----------------------------------------------------------------------------------------------------

RING = 128
_WORDS = 2  # the word, and how many steps the ring has seen
_NUMBERS = 1 + 2 * RING  # length of the first step, then (length, own work) pairs
PULSE_BYTES = 8 * (_WORDS + _NUMBERS)
_PULSE = struct.Struct(f"<{_WORDS}Q{_NUMBERS}d")
_COUNT_SHIFT = 16
_ACTIVITY_SHIFT = 8


class Activity(IntEnum):
    """Activity of a training process, as far as the limits of a hang differ."""

    INIT = 1
    """Opening data, meeting the other ranks, building the model."""
    LOAD = 2
    COMPILE = 3
    """The first step after a start."""
    STEP = 4
    SAVE = 5
    """A place of the loop that waits for storage or for the memory tier, and what follows the last step."""


class Waiting(IntEnum):
    """A flag: a process waits for its peers."""

    NO = 0
    YES = 1
    MAYBE = 2
    """Its work has collectives inside, so only its stack shows which."""


@dataclass(frozen=True)
class PulseReading:
    """One reading of a pulse."""

    beats: int
    activity: Activity
    waiting: Waiting
    first_step_seconds: float
    """Length of the first step of this start; 0 while it has not ended."""
    steps: tuple[tuple[float, float], ...]
    """Length and own work (without the wait for peers) of the newest steps in seconds, newest last."""


class Pulse:
    """The heartbeats of one thread of one process; `Pulse()` without memory has no reader.

    One 64-bit word holds a count that grows with every heartbeat, the activity, and whether the process waits for its
    peers; a ring beside it holds the lengths of the newest steps.

    Guarantees:
    - A heartbeat is one store into mapped memory, no system call.
    - The word is written in one piece and never read as two halves.
    - A first step, which compiles, is not in the ring.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        """Take over `PULSE_BYTES` of memory; the ring in it stays, since it reports the same job's steps."""
        whole = memory if memory is not None else memoryview(bytearray(PULSE_BYTES))
        self._memory = whole
        self._words = whole[: 8 * _WORDS].cast("Q")
        self._numbers = whole[8 * _WORDS :].cast("d")
        self._beats = 0
        self._activity = int(Activity.INIT)
        self._waiting = int(Waiting.NO)
        self._waited = 0.0
        self._first = True
        self._numbers[0] = 0.0
        self.peers = _Wait(self, Waiting.YES)
        """Context of a wait for the other ranks."""
        self.work_with_collectives = _Wait(self, Waiting.MAYBE)
        """Context of work that has collectives inside."""
        self.work = _Wait(self, Waiting.NO)
        """Context of local work: a heartbeat at its start and at its end."""
        self.saving = _Doing(self, Activity.SAVE)
        """Context of a place that waits for storage."""
        self.measuring = _Measuring(self)
        """Context of a validation between two steps, which is no part of either; the first one compiles."""
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
        """Record that the stage after the last step continues, with collectives; or that steps do (`trains`)."""
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
            seen = self._words[1]
            place = 1 + 2 * (seen % RING)
            self._numbers[place] = seconds
            self._numbers[place + 1] = max(0.0, seconds - self._waited)
            self._words[1] = seen + 1
        self._waited = 0.0
        self.enter(Activity.STEP, Waiting.NO)

    def read(self) -> PulseReading | None:
        """Return the current reading; from any thread of this process. None once closed."""
        try:
            return unpack_pulse(self._memory.tobytes())
        except ValueError:  # released
            return None

    def close(self) -> None:
        """Release the memory."""
        for view in (self._words, self._numbers, self._memory):
            view.release()


class _Wait:
    """Marks a stretch in which the process waits, may wait or does not wait for its peers; certain waits are summed."""

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


class _Doing:
    """Marks a stretch with a separate activity."""

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


class _Measuring:
    """Marks work between two steps: waits in it are not the steps' own."""

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
    """Return the reading that `PULSE_BYTES` of memory hold; None when they hold none."""
    word, seen, first, *ring = _PULSE.unpack(data)
    try:
        activity = Activity(word >> _ACTIVITY_SHIFT & 0xFF)
        waiting = Waiting(word & 0xFF)
    except ValueError:
        return None
    kept = min(seen, RING)
    places = ((seen - kept + number) % RING for number in range(kept))
    steps = ((ring[2 * place], ring[2 * place + 1]) for place in places)
    return PulseReading(
        beats=word >> _COUNT_SHIFT,
        activity=activity,
        waiting=waiting,
        first_step_seconds=first if math.isfinite(first) and first > 0 else 0.0,
        steps=tuple(pair for pair in steps if math.isfinite(sum(pair)) and min(pair) >= 0),
    )


# ---- the record ----------------------------------------------------------------------------------------------------

_MAGIC = 0x544E5250
_VERSION = 7
_HEADER = struct.Struct("<IIQ")  # magic, version, sequence
_CHECKSUM = struct.Struct("<I")
_READ_ATTEMPTS = 5
_STAGE_BYTES = 32


class ProgressPhase(IntEnum):
    """Phase of a training process."""

    LOADING = 1
    TRAINING = 2
    YIELDED = 3
    FINISHED = 4
    FAILED = 5


@dataclass(frozen=True)
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
    stop_checks: int = 0
    """Number of calls that asked whether to stop; all ranks ask after each step."""
    loss: float = math.nan
    grad_norm: float = math.nan
    learning_rate: float = math.nan
    tokens_per_second: float = math.nan
    """Over the whole job, newest steps."""
    samples_per_second: float = math.nan
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
    """Mean difference of the rewards of two answers in the newest step (preference tuning), as `reward_accuracy`."""
    reward_accuracy: float = math.nan
    """Share of pairs whose preferred answer has the greater reward."""
    stage: str = TRAIN
    """Stage of the run: `Train`, or what comes before or after the steps."""


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
        """Create or take over the file; without a path nobody can read the record. Raises OSError."""
        self._previous = read_progress(path) if path else None
        self._map = _map(path) if path else mmap.mmap(-1, _SIZE)
        self._path = path
        self._sent_alerts: dict[str, dict[str, object]] = {}
        self._sequence = 0
        self._map[_STOP_AT:] = _STOP.pack(_NO_STOP)  # a request to an earlier attempt
        self.pulse = Pulse(memoryview(self._map)[_PULSE_AT:_STOP_AT])
        self.record = ProgressRecord(pid=os.getpid(), generation=generation, attempt=attempt)
        self._write()

    @property
    def continues(self) -> bool:
        """Whether an earlier attempt of the same generation wrote the record before."""
        return self._previous is not None and self._previous.generation == self.record.generation

    def resumed(self, step: int, *, tokens: int, samples: int) -> None:
        """Training starts after `step`; time of an earlier attempt counts as far as its steps are in the history."""
        productive = 0.0
        before = self._previous
        if before is not None and self.continues:
            lost = max(0, before.step - step)
            productive = max(0.0, before.productive_seconds - lost * before.step_seconds)
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

    def checkpoints(self, *, memory_step: int, durable_step: int) -> None:
        """Record the newest checkpoints."""
        if (memory_step, durable_step) != (self.record.memory_step, self.record.durable_step):
            self.publish(memory_step=memory_step, durable_step=durable_step)

    def notice(self, sentence: str) -> None:
        """Leave a sentence for a person beside the record; the newest counts."""
        if self._path is not None:
            _leave(notice_path(self._path), sentence)

    def alert(self, kind: str, step: int, sentence: str) -> None:
        """Leave an alert beside the record; of each kind the newest counts."""
        if self._path is not None:
            self._sent_alerts[kind] = {"step": step, "message": sentence}
            _leave(alerts_path(self._path), json.dumps(self._sent_alerts))

    def total_steps(self, steps: int) -> None:
        """Record how many steps the whole run has, once that is known."""
        if steps != self.record.total_steps:
            self.publish(total_steps=steps)

    def stage(self, stage: str, done: float = 0.0) -> None:
        """Record the stage that the run is in, and the share of it that is over (0 to 1); a sign of life too.

        To be called often after the last step: a process that gives no sign for as long as a save may take is called
        hung. A step returns the run to `Train` by itself.
        """
        self.enter_stage(stage, done)
        self.pulse.stage(trains=stage == TRAIN)

    def enter_stage(self, stage: str, done: float = 0.0) -> None:
        """Record the stage as `stage` does, without an activity."""
        record, trains = self.record, stage == TRAIN
        self.publish(
            stage=stage,
            stage_progress=0.0 if trains or not done > 0 else min(done, 1.0),
            stage_since=0.0 if trains else record.stage_since if record.stage == stage else time.time(),
        )

    def phase(self, phase: ProgressPhase) -> None:
        """Record what the process does now."""
        self.publish(phase=phase)

    def publish(self, **changes: Any) -> None:
        """Change fields of the record, all at once."""
        self.record = replace(self.record, **changes)
        self._write()

    def check_stop(self) -> int:
        """Count a question whether to stop, then return the agent's answer (see `stop_at`)."""
        self.publish(stop_checks=self.record.stop_checks + 1)
        return self.stop_answer()

    def stop_answer(self) -> int:
        """Return the number of the check after which all ranks stop; 0 for none, -1 while the agents choose it."""
        return int(_STOP.unpack_from(self._map, _STOP_AT)[0])

    def close(self) -> None:
        """Unmap; the file stays for its readers."""
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
    """Let the process wait at its next `should_stop` until `stop_at` answers it. For the agent."""
    _write_stop(path, _STOP_PENDING)


def stop_at(path: Path, check: int) -> None:
    """Let the process stop at this one of its calls of `should_stop`. For the agent.

    All ranks stop at the same one if it is above the `stop_checks` of every rank, read after `request_stop` to each.
    """
    _write_stop(path, check)


def release_stop(path: Path) -> None:
    """Let the process go on that waits for an answer. For the agent."""
    _write_stop(path, _NO_STOP)


def _write_stop(path: Path, value: int) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(_STOP_AT)
        file.write(_STOP.pack(value))


def _leave(path: Path, text: str) -> None:
    """Replace a file for people; where there is no room for it, training goes on without."""
    with contextlib.suppress(OSError):
        replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
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


# ---- the reports of a program --------------------------------------------------------------------------------------

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
"""Activities of the stages that have other limits of a hang than steps."""


class _Program:
    """The reports of this process, which may come from several threads."""

    def __init__(self, writer: ProgressWriter | None) -> None:
        self.pid = os.getpid()
        self._writer = writer
        self._lock = threading.Lock()
        self._since: float | None = None
        """When the step under way began, as far as that is known."""

    def step(self, number: int, figures: dict[str, float], consumed: Mapping[str, int]) -> None:
        """Record a completed step."""
        writer = self._writer
        if writer is None:
            return
        with self._lock:
            now, last = time.monotonic(), writer.record.step
            seconds = 0.0 if self._since is None else now - self._since
            if last < 0:
                writer.resumed(number - 1, tokens=0, samples=0)
            elif number < last:
                writer.notice(
                    f"rank {__getattr__('rank')} reported step {number} after step {last}: report steps as a number "
                    "that rises by one with each step of the optimizer, also after a resume"
                )
            elif number == last:  # more of the same step
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
        """Record what the program does now."""
        writer = self._writer
        if writer is None:
            return
        with self._lock:
            self._since = time.monotonic()
            writer.enter_stage(name, done)
            writer.pulse.enter(_ACTIVITIES.get(name, Activity.STEP if writer.record.step >= 0 else Activity.INIT))

    def notice(self, sentence: str) -> None:
        """Leave a sentence for people."""
        if self._writer is not None:
            self._writer.notice(sentence)

    def should_stop(self) -> bool:
        """Ask the agent, and wait while the agents agree."""
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
    """Return the record of this process; None without an agent, or where it cannot be written: training goes on."""
    if not path:
        return None
    attempt = int(os.environ.get(ENV_ATTEMPT, "0"))
    try:
        return ProgressWriter(Path(path), generation=__getattr__("generation"), attempt=attempt)
    except OSError as error:
        sys.stderr.write(f"trainium_worker: nothing is reported to the agent: {path}: {error.strerror}\n")
        return None


def __getattr__(name: str) -> int:
    """Return `rank` and `generation` as the environment has them now: a warm process is forked before it has a rank."""
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

    Call it on every rank, after each step; also after a resume, with the number that the run would have had. A second
    call for a step adds to it.

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
    """Report what the program does now, and the share of it that is over (0 to 1).

    `load`, `compile`, `save`, `export` and `evaluate` have separate limits of a hang; `train`, and each step, ends
    them. A name has at most 32 bytes.
    """
    _opened().stage(name[:1].upper() + name[1:], done)


def notice(sentence: str) -> None:
    """Show a sentence in the status of the job; the newest counts."""
    _opened().notice(sentence)


def should_stop() -> bool:
    """Return whether to save and leave now, with exit code `STOPPED`.

    Call it on every rank, once after each step: it is True on all ranks after the same step, without a collective.
    """
    return _opened().should_stop()
