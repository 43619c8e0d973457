"""The division of a live state: a scheme for saving, a box for loading; and its copy in host memory while it is saved.

Guarantees:
- Nothing but a copy is read from a device.
- A state whose tensors are not where the scheme places them is refused before anything is written.
- Plain tensors are copies on all ranks of a stage.
- The buffers of a copy are made once and reused, so a save costs one memory copy. What later steps change in the live
  state never reaches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.checkpoint.dividing import Axis, Box, Cut, Divided, Division, Grid, Scheme, box_at
from trainium_trainer.checkpoint.format.part import TensorPart
from trainium_trainer.checkpoint.format.shards import SAFETENSORS_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainium_trainer.checkpoint.interfaces import MeshPlace

_AXES = {"dp": Axis.DATA, "tp": Axis.TENSOR}
"""By the names that meshes have here."""


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is divided, by the name of its class: importing DTensor takes a second."""
    return type(value).__name__ == "DTensor"


def local_of(value: Any) -> torch.Tensor:
    """Return this rank's values."""
    if isinstance(value, TensorPart):
        return value.local
    local: torch.Tensor = value.detach()
    if is_dtensor(value):
        local = value.to_local().detach()
    return local


def division_of(value: Any) -> Division:
    """Return how a tensor is divided. TypeError for a division that checkpoints cannot express."""
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
        # What FSDP divides after tensor parallelism is strided: in the order of the mesh it would come first.
        strided = type(placement).__name__ == "_StridedShard"
        (later if strided else cuts).append(Cut(placement.dim, _AXES[name]))
    return (*cuts, *later)


def box_of(value: Any) -> Box:
    """Return the box of the whole that this rank holds."""
    shape = tuple(value.shape)
    if isinstance(value, TensorPart):
        return Box(tuple(value.offsets), tuple(value.sizes))
    if not is_dtensor(value):
        return Box((0,) * len(shape), shape)
    mesh = value.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    place = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    grid = Grid(1, sizes.get("dp", 1), sizes.get("tp", 1))
    return box_at(shape, division_of(value), grid, place.get("dp", 0), place.get("tp", 0))


def signature_of(value: Any) -> tuple[object, ...]:
    """Return what has to be the same for a plan, and for the memory of a copy, to fit."""
    kind: tuple[object, ...] = ()
    if isinstance(value, TensorPart):
        kind = (value.offsets, value.sizes, value.division)
    elif is_dtensor(value):
        kind = (value.placements,)
    return type(value), value.dtype, value.shape, *kind


def grid_of(mesh: MeshPlace) -> Grid:
    """Return the table of ranks. ValueError when it has not as many as there are."""
    grid = Grid(mesh.pp_size, mesh.dp_size, mesh.tp_size)
    if mesh.world_size != grid.size:
        raise ValueError(f"there are {mesh.world_size} ranks, but {grid} has {grid.size}")
    return grid


def place_of(mesh: MeshPlace) -> int:
    """Return the number of this rank's place in the table, which names its file.

    It is not always the rank: NxD follows the wiring of a node (docs/backends.md).
    """
    return grid_of(mesh).rank(mesh.pp_rank, mesh.dp_rank, mesh.tp_rank)


def scheme_of(tensors: Mapping[str, Any], mesh: MeshPlace) -> Scheme:
    """Return the scheme of this rank's stage, the same on all its ranks.

    TypeError for what cannot be saved; ValueError when this rank holds something else than in the scheme.
    """
    grid = grid_of(mesh)
    found: list[Divided] = []
    for name, value in tensors.items():
        if value.dtype not in SAFETENSORS_TYPES:
            raise TypeError(f"{name}: checkpoints do not hold {value.dtype}")
        division, shape = division_of(value), tuple(value.shape)
        expected = box_at(shape, division, grid, mesh.dp_rank, mesh.tp_rank)
        if expected.volume or local_sizes(value).numel():
            box = box_of(value)
            if box != expected or local_sizes(value) != expected.sizes:
                raise ValueError(f"{name}: rank {mesh.rank} holds {box}, but by its division it has {expected}")
        found.append(Divided(name, SAFETENSORS_TYPES[value.dtype], shape, mesh.pp_rank, division))
    return Scheme(grid, found)


def local_sizes(value: Any) -> torch.Size:
    """Size of this rank's values; nothing is fetched for it."""
    return value.sizes if isinstance(value, TensorPart) else local_of(value).shape


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested state dictionary with dotted names; TypeError for a value that is not a tensor."""
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


class Staging:
    """The reused copy of one state."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        """Make the buffers of a flat state and touch their pages, which costs more than ten copies into them."""
        self._signatures = {name: signature_of(value) for name, value in live.items()}
        # Nothing is asked of the device for them.
        self._buffers = {name: torch.zeros(local_sizes(value), dtype=value.dtype) for name, value in live.items()}

    def fits(self, live: Mapping[str, Any]) -> bool:
        """Return whether a flat state has the names, types, sizes and divisions that the buffers were made for."""
        return self._signatures == {name: signature_of(value) for name, value in live.items()}

    def fill(self, live: Mapping[str, Any], wanted: Callable[[str], bool] = lambda _: True) -> dict[str, torch.Tensor]:
        """Copy the live values of the wanted names, complete on return; those names with this rank's copies."""
        chosen = {name: buffer for name, buffer in self._buffers.items() if wanted(name)}
        copy_all(list(chosen.values()), [local_of(live[name]) for name in chosen])
        return chosen
