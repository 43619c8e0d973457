"""The part that each rank saves, agreed on once for a layout of the state and kept: no save plans anything.

Every rank derives its stage's scheme from its tensors (`scheme_of`). The ranks of a stage must have derived the same
one, which rank 0 checks by their digests. One rank of each stage also sends the scheme itself, for the index. The
answer is the few tensors that several stages hold.

Guarantees:
- Rank 0 receives a digest from each rank and a scheme from each stage, once for a layout.
- A scheme under which a value would be written by nobody, or twice, is refused before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_trainer.checkpoint.collectives import reduce_on_root
from trainium_trainer.checkpoint.dividing import Item, Scheme, merged, placed
from trainium_trainer.checkpoint.format.live_state import place_of, scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.interfaces import MeshPlace


@dataclass(frozen=True, slots=True)
class SchemeReport:
    """A rank's report of its scheme."""

    place: int
    stage: int
    digest: bytes
    scheme: Scheme | None
    """From one rank of each stage."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The items that a rank writes, and, on rank 0, those of all."""

    place: int
    """Place of this rank in the mesh: the number of its file."""
    items: tuple[Item, ...]
    """In the order of this rank's file."""
    whole: Scheme | None
    """On rank 0."""


class Planner:
    """The plans of one layout; made by all ranks together."""

    def __init__(self, tensors: Mapping[str, Any], mesh: MeshPlace, group: ProcessGroup | None) -> None:
        """Agree. Raises TypeError or ValueError, on all ranks, when the state cannot be saved so. Collective."""
        self._place = place_of(mesh)
        self._whole: Scheme | None = None
        mine: list[Scheme] = []

        def report_scheme() -> SchemeReport:
            mine.append(scheme_of(tensors, mesh))
            sends = mesh.dp_rank == 0 and mesh.tp_rank == 0
            return SchemeReport(self._place, mesh.pp_rank, mine[0].digest, mine[0] if sends else None)

        def decide(reports: list[SchemeReport]) -> dict[str, int]:
            self._whole, moved = agreed(reports)
            return moved

        moved = reduce_on_root(report_scheme, decide, group, "layout")
        self._mine = placed(mine[0], moved)

    def plan(self, wanted: Callable[[str], bool]) -> SavePlan:
        """Return the plan for the tensors of some names."""
        whole = None if self._whole is None else self._whole.only(wanted)
        return SavePlan(self._place, self._mine.only(wanted).file(self._place), whole)


def agreed(reports: Sequence[SchemeReport]) -> tuple[Scheme, dict[str, int]]:
    """Return the scheme of all stages, and the stage that writes each tensor that several hold.

    ValueError when ranks of a stage report_scheme different things, or a value would not be written exactly once.
    """
    if sorted(report.place for report in reports) != list(range(len(reports))):
        raise ValueError("two ranks have one place in the mesh")
    stages = {report.stage: report for report in reports if report.scheme is not None}
    for rank, report in enumerate(reports):
        if report.digest != stages[report.stage].digest:
            raise ValueError(f"rank {rank} divides the state otherwise than others of pipeline stage {report.stage}")
    schemes = [report.scheme for _, report in sorted(stages.items()) if report.scheme is not None]
    whole = merged(schemes)
    if problem := whole.problem():
        raise ValueError(f"the state cannot be saved: {problem}")
    holders: dict[str, int] = {}
    for scheme in schemes:
        for name in scheme.tensors:
            holders[name] = holders.get(name, 0) + 1
    return whole, {name: whole.tensors[name].stage for name, count in holders.items() if count > 1}
