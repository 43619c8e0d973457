"""The stages of one interruption: when each ended, as far as that is known, and how much of a stretch falls into each.

Detect ends when the failure is known, Decide when the next generation is decided on: at once where the workers for it
are there, so its seconds are the wait for them (a restart in place needs no decision). Restart ends when the processes
are up, Load when they train, Replay with the first step that had not been done before. Invariants: the ends never go
back; what is not known belongs to the stage before it, so nothing is counted twice and nothing is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.status.interruptions import Interruption, Rung
from trainium_contract.status.ledger import StageSeconds

if TYPE_CHECKING:
    from trainium_operator.plan.view.facts import Facts

STAGES = ("detect", "decide", "restart", "load", "replay")
"""In order; fields of `StageSeconds`."""


def split(facts: Facts, entry: Interruption, start: float, end: float) -> StageSeconds:
    """The seconds from `start` to `end` (Unix seconds), which lie in this interruption, by stage."""
    seconds, at = {}, start
    for stage, ended in zip(STAGES, (*_ends(facts, entry, end), end), strict=True):
        until = min(max(at, ended), end)
        seconds[stage] = round(until - at, 3)
        at = until
    return StageSeconds(**seconds)


def _ends(facts: Facts, entry: Interruption, end: float) -> tuple[float, float, float, float]:
    """When the first four stages ended; `end` for one that has not, or of which nothing is known."""
    failed_at = entry.failed_at if entry.failed_at is not None else end
    detected = failed_at + (entry.detected_seconds or 0.0)
    decided = detected if entry.rung is Rung.IN_PLACE else entry.decided_at
    if decided is None:
        return detected, end, end, end
    started, loaded = _reported(facts, entry)
    return detected, decided, started or loaded or end, loaded or end


def _reported(facts: Facts, entry: Interruption) -> tuple[float, float]:
    """When the slowest member's processes were up, and had loaded, in a later attempt; 0 while not all have said so.

    Of an interruption that is over, whoever has said it counts: the heartbeat that ended it was the first of several.
    """
    later = [
        beat.progress
        for _, beat in facts.beats
        if beat.progress is not None and (beat.generation, beat.attempt) > (entry.generation, entry.attempt)
    ]
    over = entry.recovered_seconds is not None
    if not over and len(later) < len(facts.members):
        return 0.0, 0.0
    return _last([each.started for each in later], over=over), _last([each.loaded for each in later], over=over)


def _last(told: list[float], *, over: bool) -> float:
    return max(told, default=0.0) if over or all(told) else 0.0
