"""A copy of the training state in host memory, taken between two steps and kept while it is written.

Guarantees:
- Buffers are made once and reused, so a save costs one memory copy.
- What later steps change in the live state never reaches the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainium_trainer.checkpoint.format.flat_buffer import copy_all
from trainium_trainer.checkpoint.format.live_state import local_of, local_sizes, signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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


class Staging:
    """The reused copy of one state."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        """Make the buffers of a flat state and touch their pages, which costs more than ten copies into them."""
        self._signatures = {name: signature_of(value) for name, value in live.items()}
        self._buffers = {name: _host_buffer(value) for name, value in live.items()}

    def fits(self, live: Mapping[str, Any]) -> bool:
        """Return whether a flat state has the names, types, sizes and divisions that the buffers were made for."""
        return self._signatures == {name: signature_of(value) for name, value in live.items()}

    def fill(self, live: Mapping[str, Any], wanted: Callable[[str], bool] = lambda _: True) -> dict[str, torch.Tensor]:
        """Copy the live values of the wanted names, complete on return; those names with this rank's copies."""
        chosen = {name: buffer for name, buffer in self._buffers.items() if wanted(name)}
        copy_all(list(chosen.values()), [local_of(live[name]) for name in chosen])
        return chosen


def _host_buffer(value: Any) -> torch.Tensor:
    """Host memory for a value's local part; nothing is asked of the device for it."""
    return torch.zeros(local_sizes(value), dtype=value.dtype)
