"""The names of the trainer's shards, and the layout of their bytes in a snapshot.

Guarantees:
- In a payload, tensors lie in the order of their names at offsets that are multiples of 64 bytes. The payload is a
  multiple of the checksum's block, so that no byte is outside a block.
- Equal layouts have equal digests on all machines.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_worker.snapshots.files import ALIGNMENT_BYTES, BLOCK_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def format_shard_name(
    tp_rank: int, tp_size: int, dp_rank: int = 0, dp_size: int = 1, pp_rank: int = 0, pp_size: int = 1
) -> str:
    """Return the name of a part of the state; replicas share one name (their data-parallel part is 0 of 1)."""
    return f"t{tp_rank}of{tp_size}-d{dp_rank}of{dp_size}-p{pp_rank}of{pp_size}"


def describe_mesh(name: str) -> str:
    """Return the mesh of a shard's state (tensor x data x pipeline), which shards of one division have in common."""
    return " x ".join(re.findall("of([0-9]+)", name))


@dataclass(frozen=True, slots=True)
class _TensorSpan:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of a snapshot's payload."""

    parts: tuple[_TensorSpan, ...]
    payload_bytes: int
    digest: str
    """`<digest of the settings>-<digest of the tensors>`; equal on all ranks that may exchange snapshots."""

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], settings_digest: str) -> BufferLayout:
        """Return the layout of these tensors, which depends only on names, types and shapes."""
        parts: list[_TensorSpan] = []
        offset = 0
        for name in sorted(tensors):
            tensor = tensors[name]
            end = offset + tensor.numel() * tensor.element_size()
            parts.append(_TensorSpan(name, tensor.dtype, tuple(tensor.shape), offset, end))
            offset = round_up(end, ALIGNMENT_BYTES)
        text = "\n".join(f"{part.name} {part.dtype} {part.shape}" for part in parts)
        return BufferLayout(
            parts=tuple(parts),
            payload_bytes=max(BLOCK_BYTES, round_up(offset, BLOCK_BYTES)),
            digest=f"{settings_digest}-{hashlib.sha256(text.encode()).hexdigest()[:32]}",
        )

    def view_tensors(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Return typed views into a payload buffer, in the layout's order."""
        return [payload[part.start : part.end].view(part.dtype).view(part.shape) for part in self.parts]

    def sort_tensors(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors in the layout's order. Raises KeyError when one is missing."""
        return [tensors[part.name].detach() for part in self.parts]
