"""Delay creations after a refusal (a quota, admission, a namespace that is deleted), and record name conflicts.

Guarantees:
- After a refusal nothing is created for that job until its pause is over, whatever happens meanwhile. Otherwise each
  event about the job would try again, and each try would use up ordinals of pods.
- Pauses grow up to a minute and start again once the refused object is accepted: that another object of the job is
  written means nothing for a quota of pods.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.resources import PODS
from trainium_operator.newest import Newest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
REMEMBERED = 4_096
"""Jobs."""
PLACES = 32
"""Limit for a job: it has no more objects that are named differently."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float
    message: str


class CreationBackoff:
    """Keeps pauses and conflicts by job uid; times in Unix seconds of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pauses: Newest[str, Newest[str, _Pause]] = Newest(REMEMBERED)
        """By job and place: `Kind/name`, and all pods as one."""
        self._name_conflicts: Newest[str, dict[str, str]] = Newest(REMEMBERED)

    def blocked_until(self, job_uid: str) -> float:
        """Return when something may be created for the job again; 0 when nothing was refused."""
        return max((pause.until for pause in self._pauses.get(job_uid, {}).values()), default=0.0)

    def refusal(self, job_uid: str) -> str:
        """Return why the API server refuses what the job needs, of pods first; empty when nothing was refused."""
        places: dict[str, _Pause] = self._pauses.get(job_uid, {})
        return next((places[place].message for place in sorted(places, key=lambda place: place != PODS.kind)), "")

    def name_conflicts(self, job_uid: str) -> Mapping[str, str]:
        """Return the objects of others that have a name that the job needs: `Kind/name` -> a sentence."""
        known = self._name_conflicts.get(job_uid)
        return dict(known) if known is not None else {}

    def record_name_conflict(self, job_uid: str, place: str, refusal: str) -> None:
        """Record that the object at `place` (`Kind/name`) is not the job's."""
        self._name_conflicts[job_uid] = {**self._name_conflicts.get(job_uid, {}), place: refusal}

    def clear_name_conflict(self, job_uid: str, place: str) -> None:
        """Record that the object at `place` is the job's."""
        known = self._name_conflicts.get(job_uid)
        if known is not None and place in known:
            del known[place]

    def record_refusal(self, job_uid: str, place: str, refusal: str) -> float:
        """Record that a creation was refused; several of one moment count once. Return the pause in seconds."""
        places, now = self._pauses.setdefault(job_uid, Newest(PLACES)), self._clock()
        known = places.get(place)
        if known is None or now >= known.until:
            seconds = FIRST_SECONDS if known is None else min(LONGEST_SECONDS, 2.0 * known.seconds)
            known = _Pause(now + seconds, seconds, "")
            self._pauses.move_to_end(job_uid)
        places[place] = replace(known, message=refusal)
        return known.seconds

    def record_success(self, job_uid: str, place: str) -> None:
        """End the pause of `place`: the object was written."""
        places: dict[str, _Pause] = self._pauses.get(job_uid, {})
        places.pop(place, None)
        if not places:
            self._pauses.pop(job_uid, None)
