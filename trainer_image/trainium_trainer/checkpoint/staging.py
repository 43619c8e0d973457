"""A copy of the training state in host memory, taken between two steps and kept while it is written.

Invariants: buffers are made once and reused, so a save costs one memory copy; what later steps change in the live
state never reaches the copy; the copy has the names and the sharding of the live state, so DCP plans on it as on that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.checkpoint.layout import copy_all
from trainium_trainer.checkpoint.part import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested state dictionary with dotted names; TypeError for a value that is not a tensor."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            flat[prefix + name] = value
        elif isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            raise TypeError(f"state_dict() must hold tensors only: {prefix}{name} is {type(value).__name__}")
    return flat


class Staging:
    """The reused copy of one state."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Make the buffers and touch their pages, which costs more than ten copies into them."""
        live = flatten(state)
        self._names = list(live)
        self._buffers = [_room(live[name]) for name in self._names]
        self.tensors = {
            name: _like(live[name], buffer) for name, buffer in zip(self._names, self._buffers, strict=True)
        }
        """What DCP writes."""

    def fill(self, state: Mapping[str, Any], wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Any]:
        """Copy the live values of the wanted names, complete on return; those names with the copies."""
        live = flatten(state)
        chosen = [(name, buffer) for name, buffer in zip(self._names, self._buffers, strict=True) if wanted(name)]
        copy_all([buffer for _, buffer in chosen], [_local(live[name]) for name, _ in chosen])
        return {name: self.tensors[name] for name, _ in chosen}


def _room(value: Any) -> torch.Tensor:
    """Host memory for a value's local part; nothing is asked of the device for it."""
    if isinstance(value, Part):
        return torch.zeros(value.sizes, dtype=value.dtype)
    return torch.zeros_like(_local(value), device="cpu")


def _is_dtensor(value: Any) -> bool:
    # By name: importing DTensor takes a second, and a state without one does not need it.
    return type(value).__name__ == "DTensor"


def _local(value: Any) -> torch.Tensor:
    if isinstance(value, Part):
        return value.local
    local: torch.Tensor = value.detach()
    if _is_dtensor(value):
        local = value.to_local().detach()
    return local


def _like(value: Any, buffer: torch.Tensor) -> torch.Tensor:
    """The buffer, sharded on paper as `value` is."""
    if isinstance(value, Part):
        return value.over(buffer)
    if not _is_dtensor(value):
        return buffer
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - see _is_dtensor
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    mesh = value.device_mesh
    if mesh.device_type != "cpu":
        # The same ranks on host memory, for planning only: no process group is made.
        mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
    staged: torch.Tensor = DTensor.from_local(
        buffer, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return staged
