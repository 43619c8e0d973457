"""A copy of the training state in host memory, taken between two steps and kept while it is written.

Invariants: buffers are made once and reused, so a save costs one memory copy; what later steps change in the live
state never reaches the copy; the copy has the names and the sharding of the live state, so DCP plans on it as on that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.checkpoint.layout import copy_all

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        self._buffers = [torch.zeros_like(_local(live[name]), device="cpu") for name in self._names]
        self.tensors = {
            name: _like(live[name], buffer) for name, buffer in zip(self._names, self._buffers, strict=True)
        }
        """What DCP writes."""

    def fill(self, state: Mapping[str, Any]) -> None:
        """Copy the live state; complete on return."""
        live = flatten(state)
        copy_all(self._buffers, [_local(live[name]) for name in self._names])


def _is_dtensor(value: torch.Tensor) -> bool:
    # By name: importing DTensor takes a second, and a state without one does not need it.
    return type(value).__name__ == "DTensor"


def _local(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.detach()
    if _is_dtensor(value):
        local = value.to_local().detach()
    return local


def _like(value: Any, buffer: torch.Tensor) -> torch.Tensor:
    """The buffer, sharded on paper as `value` is."""
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
