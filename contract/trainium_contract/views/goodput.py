"""Where the time of a job went (definitions: docs/goodput.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import mapping, number, numbers, objects, whole

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class SizeView:
    """Steps that were made at one size."""

    size: int
    steps: int
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class GoodputView:
    """The ledger; every number is the operator's own."""

    ratio: float | None
    """None before the first generation."""
    uptime_ratio: float | None
    fleet_ratio: float | None
    productive_seconds: float
    wall_seconds: float
    node_seconds: float
    lost_seconds: dict[str, float]
    """By cause, the largest first."""
    lost_by_stage: dict[str, float]
    stage_seconds: dict[str, float]
    sizes: tuple[SizeView, ...]
    counted_seconds_ago: float | None

    @property
    def lost(self) -> float:
        """All that was lost."""
        return sum(self.lost_seconds.values())


def goodput_view(status: Mapping[str, Any], now: float) -> GoodputView:
    """The ledger of a status."""
    raw = mapping(status, "goodput")
    wall, until = number(raw, "wallSeconds") or 0.0, number(raw, "accountedUntil")
    lost = numbers(raw, "lostSeconds")
    return GoodputView(
        ratio=number(raw, "ratio") if wall else None,
        uptime_ratio=number(raw, "uptimeRatio") if wall else None,
        fleet_ratio=number(raw, "fleetRatio") if wall else None,
        productive_seconds=number(raw, "productiveSeconds") or 0.0,
        wall_seconds=wall,
        node_seconds=number(raw, "nodeSeconds") or 0.0,
        lost_seconds=dict(sorted(lost.items(), key=lambda item: -item[1])),
        lost_by_stage=numbers(raw, "lostByStage"),
        stage_seconds=numbers(raw, "stageSeconds"),
        sizes=tuple(
            SizeView(whole(each, "size"), whole(each, "steps"), number(each, "stepSeconds"))
            for each in objects(raw, "sizes")
        ),
        counted_seconds_ago=None if until is None else max(0.0, now - until),
    )
