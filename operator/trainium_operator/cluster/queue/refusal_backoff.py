"""Back off after refused writes of a job (a quota, admission, a namespace that is deleted), and record name conflicts.

Guarantees:
- After a refusal nothing is created for that job until its pause is over. Otherwise each event about the job would
  trigger another attempt, and each attempt uses up ordinals of pods.
- Pauses grow up to a minute and start again once the refused object is accepted. A write of another object of the job
  does not reset the pause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_operator.bounded_dict import BoundedDict
from trainium_operator.cluster.api.resources import PODS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIRST_SECONDS = 1.0
MAX_SECONDS = 60.0
REMEMBERED = 4_096
"""Jobs."""
MAX_PLACES = 32
"""Maximum number of objects with a conflict in one job, which has no more objects with fixed names."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float
    message: str


class RefusalBackoff:
    """Keeps pauses and conflicts by job uid; times in Unix seconds of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pauses: BoundedDict[str, BoundedDict[str, _Pause]] = BoundedDict(REMEMBERED)
        """By job and place: `Kind/name`, with all pods as one."""
        self._name_conflicts: BoundedDict[str, dict[str, str]] = BoundedDict(REMEMBERED)

    def get_blocked_until(self, job_uid: str) -> float:
        """Return when something may next be created for the job; 0 if nothing was refused."""
        return max((pause.until for pause in self._pauses.get(job_uid, {}).values()), default=0.0)

    def find_refusal(self, job_uid: str) -> str:
        """Return why the API server refuses an object of the job, pods first; empty if nothing was refused."""
        places: dict[str, _Pause] = self._pauses.get(job_uid, {})
        return next((places[place].message for place in sorted(places, key=lambda place: place != PODS.kind)), "")

    def list_name_conflicts(self, job_uid: str) -> Mapping[str, str]:
        """Return other owners' objects with a name that the job needs: `Kind/name` -> a sentence."""
        conflicts = self._name_conflicts.get(job_uid)
        return dict(conflicts) if conflicts is not None else {}

    def record_name_conflict(self, job_uid: str, place: str, refusal: str) -> None:
        """Record that the object at `place` (`Kind/name`) is not the job's."""
        self._name_conflicts[job_uid] = {**self._name_conflicts.get(job_uid, {}), place: refusal}

    def clear_name_conflict(self, job_uid: str, place: str) -> None:
        """Record that the object at `place` is the job's."""
        conflicts = self._name_conflicts.get(job_uid)
        if conflicts is not None and place in conflicts:
            del conflicts[place]

    def record_refusal(self, job_uid: str, place: str, refusal: str) -> float:
        """Record a refused creation; several at one moment count once. Return the pause in seconds."""
        places, now = self._pauses.setdefault(job_uid, BoundedDict(MAX_PLACES)), self._clock()
        pause = places.get(place)
        if pause is None or now >= pause.until:
            seconds = FIRST_SECONDS if pause is None else min(MAX_SECONDS, 2.0 * pause.seconds)
            pause = _Pause(now + seconds, seconds, "")
            self._pauses.move_to_end(job_uid)
        places[place] = replace(pause, message=refusal)
        return pause.seconds

    def record_success(self, job_uid: str, place: str) -> None:
        """End the pause of `place`, because the object was written."""
        places: dict[str, _Pause] = self._pauses.get(job_uid, {})
        places.pop(place, None)
        if not places:
            self._pauses.pop(job_uid, None)
