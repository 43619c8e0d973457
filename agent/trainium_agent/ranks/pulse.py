"""The current activity of a training process, in shared memory: its agent distinguishes a hang from work by it.

One 64-bit word holds a count that grows with every heartbeat, the activity, and whether the process waits for its
peers; a ring beside it holds the lengths of the newest steps.

Guarantees:
- A heartbeat is one store into mapped memory, no system call.
- The word is written in one piece and never read as two halves.
- A first step (which compiles) is not in the ring. Importing this module imports nothing heavy.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

RING = 128
_WORDS = 2  # the word, and how many steps the ring has seen
_NUMBERS = 1 + 2 * RING  # length of the first step, then (length, own work) pairs
PULSE_BYTES = 8 * (_WORDS + _NUMBERS)
_LAYOUT = struct.Struct(f"<{_WORDS}Q{_NUMBERS}d")
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


@dataclass(frozen=True, slots=True)
class PulseReading:
    """One look at a pulse."""

    beats: int
    activity: Activity
    waiting: Waiting
    first_step_seconds: float
    """Length of the first step of this start; 0 while it has not ended."""
    steps: tuple[tuple[float, float], ...]
    """Length and own work (without the wait for peers) of the newest steps in seconds, newest last."""


class Pulse:
    """Written by one thread of one process; `Pulse()` without memory beats for nobody."""

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

    def enter(self, activity: Activity) -> None:
        """Something else is being done from now on."""
        self._activity = int(activity)
        self.beat()

    def stage(self, *, trains: bool) -> None:
        """Record that the stage after the last step continues, with collectives; or that steps do (`trains`)."""
        self._waiting = int(Waiting.NO if trains else Waiting.MAYBE)
        self.enter(Activity.STEP if trains else Activity.SAVE)

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
        self._waiting = int(Waiting.NO)
        self.enter(Activity.STEP)

    def read(self) -> PulseReading | None:
        """Return the current reading; from any thread of this process. None once closed."""
        try:
            return unpack_pulse(self._memory.tobytes())
        except ValueError:  # released
            return None

    def close(self) -> None:
        """Let go of the memory."""
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
    word, seen, first, *ring = _LAYOUT.unpack(data)
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
