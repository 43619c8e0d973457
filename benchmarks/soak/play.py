"""Play a schedule: each fault at its time, and what follows it (a power cut after a notice, a repair) at its own.

Invariants: the rules are those of `simulate.virtual.world`: a place without power is not hit, a rank only where one is,
a hang only while steps are made, the newest repair and the newest wish count. What could not be played is told.
"""

from __future__ import annotations

import heapq
import itertools
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.soak.course import MODEL, NODES
from trainium_simulator.virtual.failures import FaultClass
from trainium_simulator.virtual.world import CONDEMNED_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.soak.course import Course
    from benchmarks.soak.places import Place, Places
    from trainium_simulator.virtual.schedule import Fault

_STEPS_STAND_STILL_SECONDS = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of one fault."""

    kind: str
    place: int
    planned: float
    """Seconds since the job was created."""
    at: float
    """When it struck."""
    over: float
    """When an outage was over; of anything else the same as `at`."""
    hit: bool
    """False where nobody was there to be hit."""
    error: str = ""


class Player:
    """Plays one schedule; actions run in threads of their own, so that a slow one delays no other."""

    def __init__(
        self,
        course: Course,
        places: Places,
        *,
        zero: float,
        steps_since: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        """`zero`: Unix seconds of the job's creation; `steps_since()`: seconds since the newest step ended."""
        self.played: list[Played] = []
        self.errors: list[str] = []
        """What went wrong in repairs and the like."""
        self._course = course
        self.places = places
        self._zero = zero
        self._steps_since = steps_since
        self._say = say
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._wishes = 0

    @property
    def now(self) -> float:
        """Seconds since the job was created."""
        return time.time() - self._zero

    def play(self, until: float) -> None:
        """Everything that is due before `until`; then wait for what is still under way."""
        for fault in self._course.faults:
            self._at(fault.at, partial(self._strike, fault))
        while True:
            with self._lock:
                due = self._due[0][0] if self._due else until
                if min(due, until) > self.now:
                    self._lock.wait(min(due, until) - self.now)
                    continue
                if due >= until:
                    break
                act = heapq.heappop(self._due)[2]
            thread = threading.Thread(target=self._do_later, args=(act,), daemon=True)
            self._threads.append(thread)
            thread.start()
        for thread in self._threads:
            thread.join(120)

    def finish(self) -> None:
        """Bring back at once what is still being repaired."""
        while self._due:
            self._do_later(heapq.heappop(self._due)[2])
        for thread in self._threads:
            thread.join(120)

    def _do_later(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as problem:  # noqa: BLE001 - told at the end; it must not end the soak
            self.errors.append(f"what follows a fault could not be played: {type(problem).__name__}: {problem}")

    def _at(self, when: float, act: Callable[[], None]) -> None:
        with self._lock:
            heapq.heappush(self._due, (when, next(self._numbers), act))
            self._lock.notify_all()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._at(self.now + seconds, act)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        at, hit, error = self.now, False, ""
        try:
            hit = self._do(fault)
        except Exception as problem:  # noqa: BLE001 - one that cannot be played must not end the soak
            error = f"{type(problem).__name__}: {problem}"
        over = at + fault.lasts if fault.kind is FaultClass.API_OUTAGE else at
        self.played.append(
            Played(
                kind=fault.kind.value,
                place=fault.slot,
                planned=fault.at,
                at=round(at, 2),
                over=round(over, 2),
                hit=hit,
                error=error,
            )
        )
        self._say(f"{at:7.1f} {fault.kind} at {fault.slot}{'' if hit else ' (nobody hit)'}{error and ': ' + error}")

    def _do(self, fault: Fault) -> bool:
        match fault.kind:
            case FaultClass.API_OUTAGE:
                self.places.stop_api_server()
                self._after(fault.lasts, self.places.start_api_server)
                return True
            case FaultClass.OPERATOR_LOST:
                self.places.lose_operator()
                return True
            case FaultClass.RESIZE:
                return self._resize(fault)
            case _:
                place = self.places.places[fault.slot]
                return place.up and self._hit(fault, place)

    def _hit(self, fault: Fault, place: Place) -> bool:
        match fault.kind:
            case FaultClass.PROCESS_CRASH:
                return self.places.signal_rank(place, signal.SIGKILL)
            case FaultClass.HANG:
                steps = self._steps_since() < _STEPS_STAND_STILL_SECONDS
                return steps and self.places.signal_rank(place, signal.SIGSTOP)
            case FaultClass.DEVICE_ERROR:
                return self._break_device(place, fault)
            case FaultClass.NODE_LOST:
                self._lose([place], fault)
            case FaultClass.RACK:
                self._lose([each for each in self.places.rack_of(place.number, MODEL.rack_nodes) if each.up], fault)
            case FaultClass.MAINTENANCE:
                self._give_notice(place, fault)
            case FaultClass.STRAGGLER:
                self._slow_down(place, fault)
            case _:
                raise AssertionError(fault.kind)
        return True

    def _break_device(self, place: Place, fault: Fault) -> bool:
        hit = self.places.write_device_line(place)
        repair = self._begin_repair(place)

        def condemn() -> None:
            if place.repair == repair and place.up:
                self.places.condemn(place)

        self._after(CONDEMNED_SECONDS, condemn)
        self._repair_after(place, fault, repair)
        return hit

    def _lose(self, places: list[Place], fault: Fault) -> None:
        repairs = [self._begin_repair(place) for place in places]
        for place in places:
            self.places.power_off(place)
        for place, repair in zip(places, repairs, strict=True):
            self._repair_after(place, fault, repair)

    def _give_notice(self, place: Place, fault: Fault) -> None:
        repair = self._begin_repair(place)
        self.places.give_notice(place)

        def leave() -> None:
            if place.repair == repair and place.up:
                self._lose([place], fault)

        self._after(MODEL.notice_seconds, leave)

    def _slow_down(self, place: Place, fault: Fault) -> None:
        node = place.node
        self.places.slow_down(place, MODEL.straggler_factor)

        def recover() -> None:
            if place.node == node:
                self.places.slow_down(place, None)

        self._after(fault.lasts, recover)

    def _resize(self, fault: Fault) -> bool:
        self._wishes += 1
        wish = self._wishes
        self.places.ask_for(fault.slot)

        def ask_again() -> None:
            if wish == self._wishes:
                self.places.ask_for(NODES)

        self._after(fault.lasts, ask_again)
        return True

    def _begin_repair(self, place: Place) -> int:
        place.repair += 1
        return place.repair

    def _repair_after(self, place: Place, fault: Fault, repair: int) -> None:
        def restore() -> None:
            if place.repair == repair:
                self.places.restore(place, same_machine=fault.same_machine)

        self._after(fault.lasts, restore)
