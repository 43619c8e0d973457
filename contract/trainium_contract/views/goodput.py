"""Where the time of a job went (definitions: docs/goodput.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainium_contract.status.public import PublicStatus
    from trainium_contract.views.status_reader import StatusReader


@dataclass(frozen=True, slots=True)
class SizeView:
    """Steps at one size."""

    size: int
    steps: int
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class CostView:
    """Money for the nodes of a job, in the currency of `price`."""

    price: float
    """Price of a node-hour."""
    so_far: float
    """For all node time that the job held; the sum of the parts below."""
    productive: float
    lost: dict[str, float]
    """By cause: for all nodes that were held meanwhile."""
    idle: float
    """For nodes that did not train while others did: spares, waiting nodes, quarantined ones."""
    to_end: float | None
    """Cost until the last step, at the present size and loss of time; None if the remaining time is unknown."""


@dataclass(frozen=True, slots=True)
class GoodputView:
    """The ledger; all numbers are the operator's."""

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
    """None without a price."""

    @property
    def lost(self) -> float:
        """Return the sum of the lost time."""
        return sum(self.lost_seconds.values())


def build_goodput_view(status: StatusReader[PublicStatus], now: float) -> GoodputView:
    """Return the ledger of a status."""
    part = status.read_part("goodput")
    wall, until = part.read_number("wallSeconds") or 0.0, part.read_number("accountedUntil")
    lost = part.read_numbers("lostSeconds")
    return GoodputView(
        ratio=part.read_number("ratio") if wall else None,
        uptime_ratio=part.read_number("uptimeRatio") if wall else None,
        fleet_ratio=part.read_number("fleetRatio") if wall else None,
        productive_seconds=part.read_number("productiveSeconds") or 0.0,
        wall_seconds=wall,
        node_seconds=part.read_number("nodeSeconds") or 0.0,
        lost_seconds=dict(sorted(lost.items(), key=lambda item: -item[1])),
        lost_by_stage=part.read_numbers("lostByStage"),
        stage_seconds=part.read_numbers("stageSeconds"),
        sizes=tuple(
            SizeView(account.read_integer("size"), account.read_integer("steps"), account.read_number("stepSeconds"))
            for account in part.read_parts("sizes")
        ),
        counted_seconds_ago=None if until is None else max(0.0, now - until),
    )
