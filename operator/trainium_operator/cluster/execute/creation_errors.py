"""Creations that are refused (a quota, admission, a namespace that goes), and names that another's object bears.

Invariant: after a refusal nothing is created for that job until its pause is over, whatever happens meanwhile; the
pauses grow up to a minute and begin anew once what was refused is accepted: that another object of the job is written
says nothing about a quota of pods. Without this each event about the job would try again, and each try would use up
ordinals of pods.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainium_operator.cluster.api.resources import PODS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
REMEMBERED = 4_096
"""Jobs."""
PLACES = 32
"""Of a job: it has no more objects that are named differently."""


@dataclass(frozen=True, slots=True)
class _Pause:
    until: float
    seconds: float
    sentence: str


class Refusals:
    """Jobs by uid; times in Unix seconds of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pauses: OrderedDict[str, dict[str, _Pause]] = OrderedDict()
        """Of each job those of what was refused, by place: `Kind/name`, and all pods as one."""
        self._in_the_way: OrderedDict[str, dict[str, str]] = OrderedDict()

    def until(self, job_uid: str) -> float:
        """When something may be created for the job again; 0 when nothing was refused."""
        return max((pause.until for pause in self._pauses.get(job_uid, {}).values()), default=0.0)

    def sentence(self, job_uid: str) -> str:
        """Return why the API server refuses what the job needs, of pods first; empty when nothing was refused."""
        places = self._pauses.get(job_uid, {})
        return next((places[place].sentence for place in sorted(places, key=lambda place: place != PODS.kind)), "")

    def in_the_way(self, job_uid: str) -> Mapping[str, str]:
        """Objects of others that bear a name that the job needs: `Kind/name` -> a sentence."""
        known = self._in_the_way.get(job_uid)
        return dict(known) if known is not None else {}

    def met(self, job_uid: str, place: str, sentence: str) -> None:
        """At `place` (`Kind/name`) there is an object that is not the job's."""
        known = self._in_the_way.pop(job_uid, None) or {}
        self._in_the_way[job_uid] = {**known, place: sentence}
        while len(self._in_the_way) > REMEMBERED:
            self._in_the_way.popitem(last=False)

    def cleared(self, job_uid: str, place: str) -> None:
        """At `place` there is the job's own object."""
        known = self._in_the_way.get(job_uid)
        if known is not None and place in known:
            del known[place]

    def refused(self, job_uid: str, place: str, sentence: str) -> float:
        """Record that a creation was refused; several of one moment count once. Return the pause in seconds."""
        places, now = self._pauses.setdefault(job_uid, {}), self._clock()
        known = places.pop(place, None)
        if known is None or now >= known.until:
            seconds = FIRST_SECONDS if known is None else min(LONGEST_SECONDS, 2.0 * known.seconds)
            known = _Pause(now + seconds, seconds, "")
            self._pauses.move_to_end(job_uid)
        places[place] = replace(known, sentence=sentence)
        while len(places) > PLACES:
            del places[next(iter(places))]
        while len(self._pauses) > REMEMBERED:
            self._pauses.popitem(last=False)
        return known.seconds

    def accepted(self, job_uid: str, place: str) -> None:
        """What was refused there, if anything, was written."""
        places = self._pauses.get(job_uid, {})
        places.pop(place, None)
        if not places:
            self._pauses.pop(job_uid, None)
