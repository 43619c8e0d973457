"""The division of a live state over the ranks, what each rank writes of it, and its copy in host memory during a save.

Guarantees:
- Only copies are read from a device.
- A state whose tensors do not match the layout is refused before anything is written.
- Plain tensors are replicated on all ranks of a stage.
- The buffers of a copy are allocated once and reused, so a save costs one memory copy. Later changes of the live state
  never reach the copy.
- Rank 0 receives a digest from each rank and a layout from each stage once per layout, whatever the number of saves.
- A layout in which a value has no writer or several writers is refused before anything is written.
- A `TensorPart` has the division of the whole over all ranks, so its file can be read at any division, and vice versa.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from trainium_contract.wire.checkpoint_manifest import CheckpointKind
from trainium_trainer.checkpoint.collectives import reduce_on_root
from trainium_trainer.checkpoint.format.layout import (
    CheckpointLayout,
    TensorMetadata,
    WriteItem,
    merge_stages,
    replace_stages,
)
from trainium_trainer.checkpoint.format.writer import SAFETENSORS_TYPES
from trainium_trainer.checkpoint.sharding import Axis, Box, Cut, Division, Grid, find_box
from trainium_trainer.models.state_dict import parse_parameter_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from trainium_trainer.checkpoint.interfaces import MeshCoordinates

_AXES = {"dp": Axis.DATA, "tp": Axis.TENSOR}
"""The axes by the names of mesh dimensions."""


class TensorPart(torch.Tensor):
    """One box of a tensor whose other boxes are on other ranks, for divisions that DTensor cannot express.

    DTensor knows equal chunks along mesh dimensions. A weight that stacks several tensors and is cut again by ZeRO-1
    has different boundaries on every rank. A part is a Tensor only because a state holds tensors: its size is that of
    the whole, and no operation works on it. Its values are fetched from the device only when they are needed.
    """

    whole: torch.Size
    offsets: torch.Size
    sizes: torch.Size
    """The sizes of the box."""
    division: Division | None
    """The division of the whole over the ranks of a stage; None: the part can be loaded, not saved."""
    _values: Callable[[], Tensor]
    _local: Tensor | None
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001 - a subclass without one

    @staticmethod
    def __new__(
        cls: type[Self],
        values: Callable[[], Tensor],
        *,
        whole: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        dtype: torch.dtype,
        division: Division | None = None,
    ) -> Self:
        """Create the box of `sizes` at `offsets` of a tensor of size `whole`; `values` returns the tensor in it."""
        wrap: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - as DTensor is made
        part: Self = wrap(cls, torch.Size(whole), dtype=dtype, device="cpu")
        part.whole, part.offsets, part.sizes = torch.Size(whole), torch.Size(offsets), torch.Size(sizes)
        part.division = division
        part._values, part._local = values, None
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse every operation."""
        raise TypeError(f"{func} on a TensorPart: use its local tensor")

    @property
    def local(self) -> Tensor:
        """Return the values, the same tensor at each call."""
        if self._local is None:
            self._local = self._values().detach()
            assert self._local.shape == self.sizes, (self._local.shape, self.sizes)
        return self._local


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is a DTensor, by the name of its class, because importing DTensor takes a second."""
    return type(value).__name__ == "DTensor"


def to_local(value: Any) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    if isinstance(value, TensorPart):
        return value.local
    local: torch.Tensor = value.detach()
    if is_dtensor(value):
        local = value.to_local().detach()
    return local


def get_division(value: Any) -> Division:
    """Return the division of a tensor. Raises TypeError for a division that checkpoints cannot express."""
    if isinstance(value, TensorPart):
        if value.division is None:
            raise TypeError("a TensorPart that is to be saved needs the division of the whole")
        return value.division
    if not is_dtensor(value):
        return ()
    cuts: list[Cut] = []
    later: list[Cut] = []
    names = value.device_mesh.mesh_dim_names or ()
    for name, size, placement in zip(names, value.device_mesh.mesh.shape, value.placements, strict=True):
        if size == 1 or placement.is_replicate():
            continue
        if name not in _AXES or getattr(placement, "dim", None) is None:
            raise TypeError(f"checkpoints cannot express the placement {placement} along {name}")
        # FSDP after tensor parallelism gives a strided placement; the order of the mesh would put FSDP first.
        strided = type(placement).__name__ == "_StridedShard"
        (later if strided else cuts).append(Cut(placement.dim, _AXES[name]))
    return (*cuts, *later)


def get_box(value: Any) -> Box:
    """Return the box of the whole tensor that this rank holds."""
    shape = tuple(value.shape)
    if isinstance(value, TensorPart):
        return Box(tuple(value.offsets), tuple(value.sizes))
    if not is_dtensor(value):
        return Box((0,) * len(shape), shape)
    mesh = value.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    coordinate = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    grid = Grid(1, sizes.get("dp", 1), sizes.get("tp", 1))
    return find_box(shape, get_division(value), grid, coordinate.get("dp", 0), coordinate.get("tp", 0))


def build_grid(mesh: MeshCoordinates) -> Grid:
    """Return the grid of ranks. Raises ValueError if its size is not the number of ranks."""
    grid = Grid(mesh.pp_size, mesh.dp_size, mesh.tp_size)
    if mesh.world_size != grid.size:
        raise ValueError(f"there are {mesh.world_size} ranks, but {grid} has {grid.size}")
    return grid


def find_file_index(mesh: MeshCoordinates) -> int:
    """Return the index of this rank in the grid, which names its file.

    It may differ from the rank: NxD follows the wiring of a node (docs/backends.md).
    """
    return build_grid(mesh).find_rank(mesh.pp_rank, mesh.dp_rank, mesh.tp_rank)


def build_layout(tensors: Mapping[str, Any], mesh: MeshCoordinates) -> CheckpointLayout:
    """Return the layout of this rank's stage, the same on all its ranks.

    Raises TypeError for a tensor that cannot be saved and ValueError if this rank's tensors do not match the layout.
    """
    grid = build_grid(mesh)
    metadata: list[TensorMetadata] = []
    for name, value in tensors.items():
        if value.dtype not in SAFETENSORS_TYPES:
            raise TypeError(f"{name}: checkpoints do not hold {value.dtype}")
        division, shape = get_division(value), tuple(value.shape)
        expected = find_box(shape, division, grid, mesh.dp_rank, mesh.tp_rank)
        if expected.volume or find_local_sizes(value).numel():
            box = get_box(value)
            if box != expected or find_local_sizes(value) != expected.sizes:
                raise ValueError(f"{name}: rank {mesh.rank} holds {box}, but by its division it has {expected}")
        metadata.append(TensorMetadata(name, SAFETENSORS_TYPES[value.dtype], shape, mesh.pp_rank, division))
    return CheckpointLayout(grid, metadata)


def find_local_sizes(value: Any) -> torch.Size:
    """Return the size of this rank's part of a tensor, without fetching values."""
    return value.sizes if isinstance(value, TensorPart) else to_local(value).shape


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested state dictionary to dotted names. Raises TypeError for a value that is not a tensor."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            flat[prefix + name] = value
        elif isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            raise TypeError(f"state_dict() must hold tensors only: {prefix}{name} is {type(value).__name__}")
    return flat


@torch.no_grad()
def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors, also across devices; on return the copies are complete."""
    if targets:
        torch._foreach_copy_(targets, sources)


class StagingBuffers:
    """The reused copy of a state, whose tensors keep their names, types and sizes."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        """Allocate the buffers of a flat state and touch their pages, which costs more than ten copies into them."""
        # Allocating them does not access the device.
        self._buffers = {name: torch.zeros(find_local_sizes(value), dtype=value.dtype) for name, value in live.items()}

    def fill(self, live: Mapping[str, Any], wanted: Callable[[str], bool] = lambda _: True) -> dict[str, torch.Tensor]:
        """Copy the live values of the wanted names and return this rank's copies by name; complete on return."""
        chosen = {name: buffer for name, buffer in self._buffers.items() if wanted(name)}
        assert live.keys() == self._buffers.keys(), "the names of a state do not change"
        assert all(live[name].dtype == buffer.dtype for name, buffer in chosen.items()), "nor do its types"
        copy_all(list(chosen.values()), [to_local(live[name]) for name in chosen])
        return chosen


# ---- what each rank writes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """A rank's report of its layout."""

    file_index: int
    """The index of the rank in the grid and of its file."""
    stage: int
    digest: bytes
    layout: CheckpointLayout | None
    """Set by one rank of each stage; None on the others."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The items that a rank writes and, on rank 0, the layout of all ranks."""

    file_index: int
    """The index of this rank in the grid and of its file."""
    items: tuple[WriteItem, ...]
    """The items in the order of this rank's file."""
    whole: CheckpointLayout | None
    """The layout of all ranks; None except on rank 0."""


def plan_saves(
    tensors: Mapping[str, Any], mesh: MeshCoordinates, group: ProcessGroup | None
) -> dict[CheckpointKind, SavePlan]:
    """Agree on the layout of the state and return the plans for it. Collective.

    Every rank derives its stage's layout from its tensors. Rank 0 checks by digests that the ranks of a stage derived
    the same one. One rank of each stage also sends the layout itself, for the index. Rank 0 returns the writers of the
    few tensors that several stages hold. Raises TypeError or ValueError, on all ranks, if the state cannot be saved.
    """
    index = find_file_index(mesh)
    whole: CheckpointLayout | None = None
    local_layouts: list[CheckpointLayout] = []

    def report_layout() -> LayoutReport:
        layout = build_layout(tensors, mesh)
        local_layouts.append(layout)
        sends_layout = mesh.dp_rank == 0 and mesh.tp_rank == 0
        return LayoutReport(index, mesh.pp_rank, layout.digest, layout if sends_layout else None)

    def decide(reports: list[LayoutReport]) -> dict[str, int]:
        nonlocal whole
        whole, writing_stages = merge_reports(reports)
        return writing_stages

    writing_stages = reduce_on_root(report_layout, decide, group, "layout")
    local_layout = replace_stages(local_layouts[0], writing_stages)
    plans: dict[CheckpointKind, SavePlan] = {}
    for kind, is_saved in ((CheckpointKind.STATE, lambda _: True), (CheckpointKind.WEIGHTS, is_weight)):
        plans[kind] = SavePlan(index, local_layout.select(is_saved).plan_items(index), whole and whole.select(is_saved))
    return plans


def merge_reports(reports: Sequence[LayoutReport]) -> tuple[CheckpointLayout, dict[str, int]]:
    """Return the layout of all stages, and the stage that writes each tensor that several hold.

    Raises ValueError when ranks of a stage report different layouts, or a value would not be written exactly once.
    """
    if sorted(report.file_index for report in reports) != list(range(len(reports))):
        raise ValueError("two ranks have one place in the mesh")
    stages = {report.stage: report for report in reports if report.layout is not None}
    for rank, report in enumerate(reports):
        if report.digest != stages[report.stage].digest:
            raise ValueError(f"rank {rank} divides the state otherwise than others of pipeline stage {report.stage}")
    layouts = [report.layout for _, report in sorted(stages.items()) if report.layout is not None]
    whole = merge_stages(layouts)
    if problem := whole.find_problem():
        raise ValueError(f"the state cannot be saved: {problem}")
    holders: dict[str, int] = {}
    for layout in layouts:
        for name in layout.tensors:
            holders[name] = holders.get(name, 0) + 1
    return whole, {name: whole.tensors[name].stage for name, count in holders.items() if count > 1}


def is_weight(name: str) -> bool:
    """Return whether a milestone contains the tensor of this name."""
    return parse_parameter_name(name) is not None
