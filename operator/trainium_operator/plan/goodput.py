"""Goodput: productive time over wall time since the first step, and where the rest went.

Wall time runs from the first step while the job holds workers; a suspension stops it. Time between a failure and the
first step that had not been completed before is lost, by its cause; so recomputed steps are lost time. The rest counts
as productive. Slow steps are not looked into here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainium_contract.job import GoodputStatus, Rung

if TYPE_CHECKING:
    from trainium_contract.exit_codes import Cause
    from trainium_operator.plan.facts import Draft, Facts


def add_loss(goodput: GoodputStatus, cause: Cause, seconds: float) -> GoodputStatus:
    """The account with `seconds` more lost to `cause`."""
    lost = dict(goodput.lost_seconds)
    lost[cause.value] = round(lost.get(cause.value, 0.0) + seconds, 3)
    return goodput.model_copy(update={"lost_seconds": lost})


def account(facts: Facts, draft: Draft, *, started: bool) -> None:
    """Bring the account up to now; `started`: the job has made its first step and holds workers."""
    goodput = draft.status.goodput
    if not started:
        draft.update(goodput=goodput.model_copy(update={"accounted_until": None}))
        return
    since = goodput.accounted_until if goodput.accounted_until is not None else facts.now
    wall = goodput.wall_seconds + max(0.0, facts.now - since)
    lost = min(wall, sum(goodput.lost_seconds.values()) + _being_lost(facts, draft))
    productive = wall - lost
    draft.update(
        goodput=goodput.model_copy(
            update={
                "accounted_until": facts.now,
                "wall_seconds": round(wall, 3),
                "productive_seconds": round(productive, 3),
                "ratio": round(productive / wall, 4) if wall > 0 else 1.0,
            }
        )
    )


def _being_lost(facts: Facts, draft: Draft) -> float:
    """Seconds since the earliest failure that has not been recovered from."""
    since = [
        entry.failed_at
        for entry in draft.status.history
        if entry.recovered_seconds is None and entry.rung is not Rung.STOP and entry.failed_at is not None
    ]
    return max(0.0, facts.now - min(since)) if since else 0.0
