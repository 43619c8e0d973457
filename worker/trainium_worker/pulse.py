"""The pulse of a training process: its heartbeats, its activity and the lengths of its steps, in shared memory."""

from __future__ import annotations

import math
import struct
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RING_STEPS = 128
_WORD_COUNT = 2  # the state word (beats, activity, waiting) and the ring's step count
_NUMBER_COUNT = 1 + 2 * RING_STEPS  # length of the first step, then pairs of length and time without waits
PULSE_BYTES = 8 * (_WORD_COUNT + _NUMBER_COUNT)
_PULSE = struct.Struct(f"<{_WORD_COUNT}Q{_NUMBER_COUNT}d")
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
        self._memory = memoryview(bytearray(PULSE_BYTES)) if memory is None else memory
        self._words = self._memory[: 8 * _WORD_COUNT].cast("Q")
        self._numbers = self._memory[8 * _WORD_COUNT :].cast("d")
        self._beats = 0
        self._activity = int(Activity.INIT)
        self._waiting = int(Waiting.NO)
        self._waited_seconds = 0.0
        self._is_first_step = True
        self._is_first_validation = True
        self._numbers[0] = 0.0
        self.waiting_for_peers = _WaitContext(self, Waiting.YES)
        """A context for a wait for the other ranks."""
        self.work_with_collectives = _WaitContext(self, Waiting.MAYBE)
        """A context for work that contains collectives."""
        self.local_work = _WaitContext(self, Waiting.NO)
        """A context for local work: a heartbeat at its start and at its end."""
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

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose a wait for storage."""
        previous = Activity(self._activity)
        self.enter(Activity.SAVE)
        try:
            yield
        finally:
            self.enter(previous)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Enclose a validation between two steps, which is part of neither; the first one compiles."""
        previous, waited_seconds = Activity(self._activity), self._waited_seconds
        self.enter(Activity.COMPILE if self._is_first_validation else previous)
        try:
            yield
        finally:
            self._is_first_validation = False
            self._waited_seconds = waited_seconds
            self.enter(previous)

    def begin_steps(self) -> None:
        """Record that the loop starts; its first step compiles."""
        self._is_first_step = True
        self._waited_seconds = 0.0
        self.enter(Activity.COMPILE)

    def complete_step(self, seconds: float) -> None:
        """Record a completed step of `seconds`."""
        if self._is_first_step:
            self._is_first_step = False
            self._numbers[0] = seconds
        else:
            step_count = self._words[1]
            index = 1 + 2 * (step_count % RING_STEPS)
            self._numbers[index] = seconds
            self._numbers[index + 1] = max(0.0, seconds - self._waited_seconds)
            self._words[1] = step_count + 1
        self._waited_seconds = 0.0
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

    __slots__ = ("_entered_at", "_pulse", "_waiting")

    def __init__(self, pulse: Pulse, waiting: Waiting) -> None:
        self._pulse = pulse
        self._waiting = int(waiting)
        self._entered_at = 0.0

    def __enter__(self) -> None:
        pulse = self._pulse
        self._entered_at = time.perf_counter()
        pulse._waiting = self._waiting  # noqa: SLF001 - a part of the pulse
        pulse.beat()

    def __exit__(self, *raised: object) -> None:
        pulse = self._pulse
        if self._waiting == Waiting.YES:
            pulse._waited_seconds += time.perf_counter() - self._entered_at  # noqa: SLF001 - a part of the pulse
        pulse._waiting = 0  # noqa: SLF001 - a part of the pulse
        pulse.beat()


def unpack_pulse(data: bytes) -> PulseReading | None:
    """Parse a reading from `PULSE_BYTES` of memory; None if there is none."""
    word, step_count, first_step_seconds, *ring = _PULSE.unpack(data)
    try:
        activity = Activity(word >> _ACTIVITY_SHIFT & 0xFF)
        waiting = Waiting(word & 0xFF)
    except ValueError:
        return None
    ring_count = min(step_count, RING_STEPS)
    positions = (number % RING_STEPS for number in range(step_count - ring_count, step_count))
    steps = ((ring[2 * position], ring[2 * position + 1]) for position in positions)
    return PulseReading(
        beats=word >> _COUNT_SHIFT,
        activity=activity,
        waiting=waiting,
        first_step_seconds=first_step_seconds if 0 < first_step_seconds < math.inf else 0.0,
        steps=tuple(pair for pair in steps if math.isfinite(sum(pair)) and min(pair) >= 0),
    )
