"""Where the time of a job went (definitions: docs/goodput.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.views.status_reader import StatusReader


@dataclass(frozen=True, slots=True)
class SizeView:
    """Steps that were made at one size."""

    size: int
    steps: int
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class CostView:
    """Money for the nodes of a job, in the currency of `price`."""

    price: float
    """Price of a node-hour."""
    so_far: float
    """For all node time that the job held; the parts below together."""
    productive: float
    lost: dict[str, float]
    """By cause: all nodes that were held meanwhile."""
    idle: float
    """For nodes that did not train while others did: spares, nodes that waited, quarantined ones."""
    to_end: float | None
    """Cost until the last step, at the present size and loss of time; None where the time left is not known."""


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
    cost: CostView | None = None
    """Known where a price is given."""

    @property
    def lost(self) -> float:
        """All that was lost."""
        return sum(self.lost_seconds.values())


def goodput_view(status: StatusReader[PublicStatus], now: float) -> GoodputView:
    """Return the ledger of a status."""
    part = status.part("goodput")
    wall, until = part.number("wallSeconds") or 0.0, part.number("accountedUntil")
    lost = part.numbers("lostSeconds")
    return GoodputView(
        ratio=part.number("ratio") if wall else None,
        uptime_ratio=part.number("uptimeRatio") if wall else None,
        fleet_ratio=part.number("fleetRatio") if wall else None,
        productive_seconds=part.number("productiveSeconds") or 0.0,
        wall_seconds=wall,
        node_seconds=part.number("nodeSeconds") or 0.0,
        lost_seconds=dict(sorted(lost.items(), key=lambda item: -item[1])),
        lost_by_stage=part.numbers("lostByStage"),
        stage_seconds=part.numbers("stageSeconds"),
        sizes=tuple(
            SizeView(each.whole("size"), each.whole("steps"), each.number("stepSeconds"))
            for each in part.parts("sizes")
        ),
        counted_seconds_ago=None if until is None else max(0.0, now - until),
    )
